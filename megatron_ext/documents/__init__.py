"""Records and documents of files: reading them in order, and by number."""

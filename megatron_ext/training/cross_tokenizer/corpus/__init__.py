"""Documents of files, by number."""

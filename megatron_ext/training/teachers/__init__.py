"""Teachers of a run: building or reaching them, serving them, and their targets in files."""

"""Targets of a teacher in files: made once, and read by runs in any layout."""

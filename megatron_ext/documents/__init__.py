"""Readers of data files: records in order, and documents by number."""

"""Alignment, packing and batching of documents for the student and all teachers."""

"""Texts to batches for a student and its teachers, for torch's data loaders."""

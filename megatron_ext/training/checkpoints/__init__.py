"""Checkpoints of a run: written, read under any layout, and turned from and into HuggingFace folders."""

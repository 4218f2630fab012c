"""Checkpoints: written, read under any layout, and exchanged with HuggingFace folders."""

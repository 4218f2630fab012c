"""What a run reads: sources, their blend, and global batches that no layout changes."""

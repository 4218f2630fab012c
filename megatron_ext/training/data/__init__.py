"""What a run reads: its sources, microbatches and held-out rows."""

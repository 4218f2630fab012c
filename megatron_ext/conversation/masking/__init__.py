"""Training masks of rendered conversations: trained characters, and trained tokens."""

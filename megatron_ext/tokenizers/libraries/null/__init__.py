"""Numbers as ids."""

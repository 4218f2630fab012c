"""Chat templates rendered with the provenance of each character."""

"""What was tokenized and aligned once, kept by content."""

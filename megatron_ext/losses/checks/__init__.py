"""What is refused before an objective runs, and what is found out with all ranks."""

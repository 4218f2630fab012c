"""What a run measures of itself besides its loss, and where its numbers go."""

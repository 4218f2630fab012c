"""The objectives, each under its paper's name."""

"""Texts and conversations as the student and every teacher read them."""

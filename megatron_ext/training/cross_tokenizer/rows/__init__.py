"""Tokens as the rows of a batch."""

"""Aligning what differs: texts that a tokenizer changes, and conversations of two templates."""

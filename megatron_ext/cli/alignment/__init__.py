"""The audit of a tokenizer pair in a terminal, as JSON and as a page."""

"""HuggingFace fast tokenizers and the files that they come in."""

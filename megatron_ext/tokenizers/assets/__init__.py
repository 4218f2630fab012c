"""What a checkpoint keeps of a tokenizer, and the tokenizer from it again."""

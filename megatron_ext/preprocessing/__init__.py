"""Documents to Megatron's indexed datasets: read, tokenize, write."""

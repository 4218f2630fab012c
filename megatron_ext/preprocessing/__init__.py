"""``megatron-ext tokenize``: documents to Megatron's indexed datasets."""

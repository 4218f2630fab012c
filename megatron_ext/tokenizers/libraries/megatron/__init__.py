"""Megatron's named tokenizers."""

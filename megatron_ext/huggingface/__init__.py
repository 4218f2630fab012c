"""Checkpoints of HuggingFace: their configuration, their tensors, and what each family calls them.

Nothing here knows megatron-core: tensors of a ``GPTModel`` are named and shaped as its checkpoints
have them, settings as the fields of ``training.config.ModelConfig``.
"""

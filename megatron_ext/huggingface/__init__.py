"""HuggingFace checkpoints: their files, configuration and tensors, and the model families.

Nothing here imports megatron-core: tensors of a ``GPTModel`` have the names and shapes of its
checkpoints, and settings are the fields of ``ModelConfig``.
"""

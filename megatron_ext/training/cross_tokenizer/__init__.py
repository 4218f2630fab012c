"""Data for distillation across tokenizers, for torch's data loaders."""

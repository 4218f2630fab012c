"""HuggingFace checkpoints in runs: read into a model, imported to a checkpoint, exported again."""

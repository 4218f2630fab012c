"""A run whose heads are in the order of a vocabulary layout, and whose checkpoints are not."""

from megatron_ext.training.vocabulary_layout.batch_places import BatchPlaces
from megatron_ext.training.vocabulary_layout.run_layout import LAYOUT_FILE, RunLayout, lay_out
from megatron_ext.training.vocabulary_layout.vocabulary_rows import VocabularyRows

__all__ = ["LAYOUT_FILE", "BatchPlaces", "RunLayout", "VocabularyRows", "lay_out"]

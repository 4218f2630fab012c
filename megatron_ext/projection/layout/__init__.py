"""Vocabularies in an order that puts what two models share on one rank, side by side."""

from megatron_ext.projection.layout.packing import VocabularyOrder
from megatron_ext.projection.layout.vocabulary_layout import LayoutStatistics, VocabularyLayout

__all__ = ["LayoutStatistics", "VocabularyLayout", "VocabularyOrder"]

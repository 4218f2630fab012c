"""Vocabularies in an order that puts what two models share on one rank, side by side."""

from megatron_ext.projection.layout.vocabulary_layout import LayoutStatistics, VocabularyLayout
from megatron_ext.projection.layout.vocabulary_order import VocabularyOrder

__all__ = ["LayoutStatistics", "VocabularyLayout", "VocabularyOrder"]

"""Layouts of two vocabularies that put their common tokens side by side on one rank."""

from megatron_ext.projection.layout.packing import VocabularyOrder
from megatron_ext.projection.layout.vocabulary_layout import LayoutStatistics, VocabularyLayout

__all__ = ["LayoutStatistics", "VocabularyLayout", "VocabularyOrder"]

"""Projections between two vocabularies: the teacher tokens that a student token maps to."""

from megatron_ext.projection.builder import PROJECTION_METHODS
from megatron_ext.projection.combination import compose, drop_padding, fill_empty_rows
from megatron_ext.projection.compressed_rows import CompressedRows
from megatron_ext.projection.embedding_builder import build_embedding_projection
from megatron_ext.projection.embeddings import EmbeddingMatrix
from megatron_ext.projection.sparse_projection import SparseProjection
from megatron_ext.projection.speller import ProjectionMethod
from megatron_ext.projection.vocabulary_partition import VocabularyPartition

__all__ = [
    "PROJECTION_METHODS",
    "CompressedRows",
    "EmbeddingMatrix",
    "ProjectionMethod",
    "SparseProjection",
    "VocabularyPartition",
    "build_embedding_projection",
    "compose",
    "drop_padding",
    "fill_empty_rows",
]

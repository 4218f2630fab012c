"""Which teacher tokens stand for each student token, and in what shares."""

from megatron_ext.projection.builders import PROJECTION_METHODS, ProjectionMethod
from megatron_ext.projection.sparse_projection import SparseProjection

__all__ = ["PROJECTION_METHODS", "ProjectionMethod", "SparseProjection"]

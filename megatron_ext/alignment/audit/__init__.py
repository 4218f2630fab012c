"""Audit of a tokenizer pair before training: how both tokenize the same texts."""

from megatron_ext.alignment.audit.coverage_row import CoverageRow, SideReport, share_in_words
from megatron_ext.alignment.audit.document import AuditDocument, MultiTokenChunk
from megatron_ext.alignment.audit.pair_audit import AuditReport, PairAudit, Recommendation

__all__ = [
    "AuditDocument",
    "AuditReport",
    "CoverageRow",
    "MultiTokenChunk",
    "PairAudit",
    "Recommendation",
    "SideReport",
    "share_in_words",
]

"""What to know of a student and a teacher before training: how their tokens meet on a text."""

from megatron_ext.alignment.audit.coverage_row import CoverageRow, SideReport, share_in_words
from megatron_ext.alignment.audit.document import AuditDocument, Offender
from megatron_ext.alignment.audit.pair_audit import AuditReport, PairAudit, Recommendation

__all__ = [
    "AuditDocument",
    "AuditReport",
    "CoverageRow",
    "Offender",
    "PairAudit",
    "Recommendation",
    "SideReport",
    "share_in_words",
]

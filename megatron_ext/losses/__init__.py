from megatron_ext.losses.alm import AlmLoss
from megatron_ext.losses.base import (
    LOSS_REGISTRY,
    DistillationInputs,
    LossOutput,
    Objective,
    SumCount,
)
from megatron_ext.losses.boundary_columns import BoundaryColumns
from megatron_ext.losses.chunk_completions import ChunkCompletions
from megatron_ext.losses.completion_table import CompletionTable
from megatron_ext.losses.dskd import DskdLoss
from megatron_ext.losses.dskd_projectors import DskdProjectors
from megatron_ext.losses.gold import GoldLoss
from megatron_ext.losses.hybrid_kl import HybridKLLoss
from megatron_ext.losses.mined import MinedLoss
from megatron_ext.losses.next_token import NextTokenLoss
from megatron_ext.losses.partition_kl import PartitionKLLoss
from megatron_ext.losses.projected_kl import ProjectedKLLoss
from megatron_ext.losses.projection_shard import ProjectionShard
from megatron_ext.losses.strict_topk import StrictTopKLoss
from megatron_ext.losses.targets import TargetKind, TeacherTargets
from megatron_ext.losses.uld import ULDLoss
from megatron_ext.losses.vocab_kl import VocabKLLoss
from megatron_ext.losses.vocabulary_match import VocabularyMatch

__all__ = [
    "LOSS_REGISTRY",
    "AlmLoss",
    "BoundaryColumns",
    "ChunkCompletions",
    "CompletionTable",
    "DistillationInputs",
    "DskdLoss",
    "DskdProjectors",
    "GoldLoss",
    "HybridKLLoss",
    "LossOutput",
    "MinedLoss",
    "NextTokenLoss",
    "Objective",
    "PartitionKLLoss",
    "ProjectedKLLoss",
    "ProjectionShard",
    "StrictTopKLoss",
    "SumCount",
    "TargetKind",
    "TeacherTargets",
    "ULDLoss",
    "VocabKLLoss",
    "VocabularyMatch",
]

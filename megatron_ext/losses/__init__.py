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
from megatron_ext.losses.combined import CombinedOutput, LossPart, reduce_counts
from megatron_ext.losses.completion_table import CompletionTable
from megatron_ext.losses.context_parallel import ContextParallelPlan
from megatron_ext.losses.count_ahead import KnownAhead
from megatron_ext.losses.cross_tokenizer import CrossTokenizerDistillationLossFn
from megatron_ext.losses.cross_tokenizer_config import CrossTokenizerLossConfig, TeacherLossConfig
from megatron_ext.losses.dskd import DskdLoss
from megatron_ext.losses.dskd_projectors import DskdProjectors
from megatron_ext.losses.gold import GoldLoss
from megatron_ext.losses.gradient_magnitude import GradientMagnitudeWeighting, LayerGradients
from megatron_ext.losses.hybrid_kl import HybridKLLoss
from megatron_ext.losses.learned_projection import LearnedProjection
from megatron_ext.losses.mined import MinedLoss
from megatron_ext.losses.multi_teacher import MultiTeacherLossAggregator, TeacherObjective
from megatron_ext.losses.next_token import NextTokenLoss
from megatron_ext.losses.partition_kl import PartitionKLLoss
from megatron_ext.losses.projected_kl import ProjectedKLLoss
from megatron_ext.losses.projection_shard import ProjectionShard
from megatron_ext.losses.strict_topk import StrictTopKLoss
from megatron_ext.losses.targets import TargetKind, TeacherTargets
from megatron_ext.losses.teacher_scores import TeacherText, reduce_scores
from megatron_ext.losses.uld import ULDLoss
from megatron_ext.losses.vocab_kl import VocabKLLoss
from megatron_ext.losses.vocabulary_match import VocabularyMatch
from megatron_ext.losses.weighting import (
    FixedWeighting,
    LossWeighting,
    MatchedWeighting,
    ScheduledWeighting,
)

__all__ = [
    "LOSS_REGISTRY",
    "AlmLoss",
    "BoundaryColumns",
    "ChunkCompletions",
    "CombinedOutput",
    "CompletionTable",
    "ContextParallelPlan",
    "CrossTokenizerDistillationLossFn",
    "CrossTokenizerLossConfig",
    "DistillationInputs",
    "DskdLoss",
    "DskdProjectors",
    "FixedWeighting",
    "GoldLoss",
    "GradientMagnitudeWeighting",
    "HybridKLLoss",
    "KnownAhead",
    "LayerGradients",
    "LearnedProjection",
    "LossOutput",
    "LossPart",
    "LossWeighting",
    "MatchedWeighting",
    "MinedLoss",
    "MultiTeacherLossAggregator",
    "NextTokenLoss",
    "Objective",
    "PartitionKLLoss",
    "ProjectedKLLoss",
    "ProjectionShard",
    "ScheduledWeighting",
    "StrictTopKLoss",
    "SumCount",
    "TargetKind",
    "TeacherLossConfig",
    "TeacherObjective",
    "TeacherTargets",
    "TeacherText",
    "ULDLoss",
    "VocabKLLoss",
    "VocabularyMatch",
    "reduce_counts",
    "reduce_scores",
]

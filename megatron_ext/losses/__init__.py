from megatron_ext.imports import needed_packages

# All that follows needs torch, too.
with needed_packages("megatron_ext.losses"):
    from megatron_ext.losses.base import (
        DistillationInputs,
        LossOutput,
        SumCount,
    )

from megatron_ext.losses.base import KnownAhead
from megatron_ext.losses.completions import ChunkCompletions, CompletionTable
from megatron_ext.losses.context_parallel import ContextParallelPlan
from megatron_ext.losses.learned_projection import LearnedProjection
from megatron_ext.losses.lookup import Completions, CompletionSource
from megatron_ext.losses.multi_teacher import MultiTeacherLossAggregator, TeacherObjective
from megatron_ext.losses.nemo_rl import CrossTokenizerDistillationLossFn
from megatron_ext.losses.nemo_rl_config import CrossTokenizerLossConfig, TeacherLossConfig
from megatron_ext.losses.objective import (
    LOSS_REGISTRY,
    Evaluated,
    FusedObjective,
    Needs,
    Objective,
)
from megatron_ext.losses.objectives.alm import AlmLoss
from megatron_ext.losses.objectives.byte_prefix import BytePrefixLoss
from megatron_ext.losses.objectives.dskd import DskdLoss
from megatron_ext.losses.objectives.dskd_spaces import DskdProjectors
from megatron_ext.losses.objectives.gold import GoldLoss, HybridKLLoss
from megatron_ext.losses.objectives.hidden_states import (
    HiddenCosineLoss,
    HiddenMseLoss,
    StateProjectors,
)
from megatron_ext.losses.objectives.mined import MinedLoss
from megatron_ext.losses.objectives.next_token import NextTokenLoss
from megatron_ext.losses.objectives.partition_kl import PartitionKLLoss
from megatron_ext.losses.objectives.projected_kl import ProjectedKLLoss
from megatron_ext.losses.objectives.sampled_kl import SampledKLLoss
from megatron_ext.losses.objectives.strict_topk import StrictTopKLoss
from megatron_ext.losses.objectives.uld import ULDLoss
from megatron_ext.losses.objectives.vocab_kl import VocabKLLoss
from megatron_ext.losses.plan import CombinedOutput, Loss, LossPart, LossPlan, reduce_counts
from megatron_ext.losses.prefix_rows import PrefixRows
from megatron_ext.losses.prefix_table import PrefixTable
from megatron_ext.losses.projection_shard import ProjectionShard
from megatron_ext.losses.repeats import RepeatRows, RepeatTable
from megatron_ext.losses.stop_set import StopSet
from megatron_ext.losses.targets import TargetKind, TeacherTargets
from megatron_ext.losses.teacher_scores import TeacherText, reduce_scores
from megatron_ext.losses.vocabulary_match import BoundaryColumns, IdTable, VocabularyMatch
from megatron_ext.losses.weighting import (
    FixedWeighting,
    GradientMagnitudeWeighting,
    LayerGradients,
    LossWeighting,
    MatchedWeighting,
    ScheduledWeighting,
)

# NeMo RL's names.
CrossTokenizerDistillationLossConfig = CrossTokenizerLossConfig
CrossTokenizerDistillationLossDataDict = DistillationInputs

__all__ = [
    "LOSS_REGISTRY",
    "AlmLoss",
    "BoundaryColumns",
    "BytePrefixLoss",
    "ChunkCompletions",
    "CombinedOutput",
    "CompletionSource",
    "CompletionTable",
    "Completions",
    "ContextParallelPlan",
    "CrossTokenizerDistillationLossConfig",
    "CrossTokenizerDistillationLossDataDict",
    "CrossTokenizerDistillationLossFn",
    "CrossTokenizerLossConfig",
    "DistillationInputs",
    "DskdLoss",
    "DskdProjectors",
    "Evaluated",
    "FixedWeighting",
    "FusedObjective",
    "GoldLoss",
    "GradientMagnitudeWeighting",
    "HiddenCosineLoss",
    "HiddenMseLoss",
    "HybridKLLoss",
    "IdTable",
    "KnownAhead",
    "LayerGradients",
    "LearnedProjection",
    "Loss",
    "LossOutput",
    "LossPart",
    "LossPlan",
    "LossWeighting",
    "MatchedWeighting",
    "MinedLoss",
    "MultiTeacherLossAggregator",
    "Needs",
    "NextTokenLoss",
    "Objective",
    "PartitionKLLoss",
    "PrefixRows",
    "PrefixTable",
    "ProjectedKLLoss",
    "ProjectionShard",
    "RepeatRows",
    "RepeatTable",
    "SampledKLLoss",
    "ScheduledWeighting",
    "StateProjectors",
    "StopSet",
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

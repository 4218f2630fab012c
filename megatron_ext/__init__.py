"""megatron-ext: any tokenizer library on Megatron, and distillation across tokenizers.

Names load on first use, so that ``import megatron_ext`` stays instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from megatron_ext.constants import __version__
from megatron_ext.imports import find_moved_modules, needed_packages

if TYPE_CHECKING:
    # What type checkers of programs see of the names below.
    from megatron_ext.alignment import Alignment as Alignment
    from megatron_ext.alignment import TokenAligner as TokenAligner
    from megatron_ext.alignment import align_conversation as align_conversation
    from megatron_ext.alignment.batch import AlignmentBatch as AlignmentBatch
    from megatron_ext.data.collator import CrossTokenizerCollator as CrossTokenizerCollator
    from megatron_ext.data.collator import TeacherCTSpec as TeacherCTSpec
    from megatron_ext.data.sft_dataset import SFTDataset as SFTDataset
    from megatron_ext.data.sft_dataset import SFTDatasetConfig as SFTDatasetConfig
    from megatron_ext.data.sft_records import SFTConfig as SFTConfig
    from megatron_ext.documents.dataset import ArrowTextDataset as ArrowTextDataset
    from megatron_ext.losses import LOSS_REGISTRY as LOSS_REGISTRY
    from megatron_ext.losses import (
        CrossTokenizerDistillationLossFn as CrossTokenizerDistillationLossFn,
    )
    from megatron_ext.losses import MultiTeacherLossAggregator as MultiTeacherLossAggregator
    from megatron_ext.projection import SparseProjection as SparseProjection
    from megatron_ext.tokenizers import BertTokenizer as BertTokenizer
    from megatron_ext.tokenizers import DefaultTokenizerText as DefaultTokenizerText
    from megatron_ext.tokenizers import DefaultTokenizerVision as DefaultTokenizerVision
    from megatron_ext.tokenizers import GPTTokenizer as GPTTokenizer
    from megatron_ext.tokenizers import MambaTokenizer as MambaTokenizer
    from megatron_ext.tokenizers import MegatronTokenizer as MegatronTokenizer
    from megatron_ext.tokenizers import MegatronTokenizerText as MegatronTokenizerText
    from megatron_ext.tokenizers import (
        MegatronTokenizerTextAbstract as MegatronTokenizerTextAbstract,
    )
    from megatron_ext.tokenizers import MegatronTokenizerVision as MegatronTokenizerVision
    from megatron_ext.tokenizers import T5Tokenizer as T5Tokenizer
    from megatron_ext.tokenizers import TokenizerConfig as TokenizerConfig
    from megatron_ext.tokenizers import build_tokenizer as build_tokenizer
    from megatron_ext.tokenizers.from_huggingface import from_huggingface as from_huggingface
    from megatron_ext.training.cross_tokenizer_loss import CrossTokenizerLoss as CrossTokenizerLoss
    from megatron_ext.training.distillation_trainer import (
        DistillationTrainer as DistillationTrainer,
    )

_HOME_OF = {
    "AlignmentBatch": "megatron_ext.alignment.batch",
    "Alignment": "megatron_ext.alignment",
    "align_conversation": "megatron_ext.alignment",
    "ArrowTextDataset": "megatron_ext.documents.dataset",
    "CrossTokenizerCollator": "megatron_ext.data.collator",
    "CrossTokenizerDistillationLossFn": "megatron_ext.losses",
    "CrossTokenizerLoss": "megatron_ext.training.cross_tokenizer_loss",
    "DistillationTrainer": "megatron_ext.training.distillation_trainer",
    "LOSS_REGISTRY": "megatron_ext.losses",
    "MultiTeacherLossAggregator": "megatron_ext.losses",
    "MegatronTokenizer": "megatron_ext.tokenizers",
    "MegatronTokenizerText": "megatron_ext.tokenizers",
    "MegatronTokenizerTextAbstract": "megatron_ext.tokenizers",
    "SFTConfig": "megatron_ext.data.sft_records",
    "SFTDataset": "megatron_ext.data.sft_dataset",
    "SFTDatasetConfig": "megatron_ext.data.sft_dataset",
    "SparseProjection": "megatron_ext.projection",
    "TeacherCTSpec": "megatron_ext.data.collator",
    "TokenAligner": "megatron_ext.alignment",
    "BertTokenizer": "megatron_ext.tokenizers",
    "DefaultTokenizerText": "megatron_ext.tokenizers",
    "DefaultTokenizerVision": "megatron_ext.tokenizers",
    "GPTTokenizer": "megatron_ext.tokenizers",
    "MambaTokenizer": "megatron_ext.tokenizers",
    "MegatronTokenizerVision": "megatron_ext.tokenizers",
    "T5Tokenizer": "megatron_ext.tokenizers",
    "TokenizerConfig": "megatron_ext.tokenizers",
    "build_tokenizer": "megatron_ext.tokenizers",
    "from_huggingface": "megatron_ext.tokenizers.from_huggingface",
}

__all__ = ["__version__", *_HOME_OF]

find_moved_modules()


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'megatron_ext' has no attribute {name!r}")
    with needed_packages(f"megatron_ext.{name}"):
        return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

"""megatron-ext: any tokenizer library on Megatron, and distillation across tokenizers.

Names load on first use, so that ``import megatron_ext`` stays instant.
"""

from importlib import import_module

from megatron_ext.constants import __version__
from megatron_ext.imports import find_moved_modules, needed_packages

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

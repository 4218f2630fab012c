"""The class names that Megatron's releases gave to tokenizers of a model family; all are ours now.

There is no layer behind them: a tokenizer does not depend on the model that it serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from megatron_ext.tokenizers.text_tokenizer import MegatronTokenizerText
from megatron_ext.tokenizers.vision_tokenizer import MegatronTokenizerVision

DefaultTokenizerText: TypeAlias = MegatronTokenizerText
GPTTokenizer: TypeAlias = MegatronTokenizerText
BertTokenizer: TypeAlias = MegatronTokenizerText
MambaTokenizer: TypeAlias = MegatronTokenizerText
T5Tokenizer: TypeAlias = MegatronTokenizerText
DefaultTokenizerVision: TypeAlias = MegatronTokenizerVision

MEGATRON_CLASSES: Final[Mapping[str, type[MegatronTokenizerText]]] = {
    "MegatronTokenizerText": MegatronTokenizerText,
    "DefaultTokenizerText": DefaultTokenizerText,
    "GPTTokenizer": GPTTokenizer,
    "BertTokenizer": BertTokenizer,
    "MambaTokenizer": MambaTokenizer,
    "T5Tokenizer": T5Tokenizer,
    "RetroTokenizer": MegatronTokenizerText,
    "MegatronTokenizerVision": MegatronTokenizerVision,
    "DefaultTokenizerVision": DefaultTokenizerVision,
}
"""Name of a class in Megatron's package of tokenizers -> ours for it."""

"""Which class a tokenizer's metadata name.

The class names that Megatron's releases gave to tokenizers of a model family; all are ours now.

There is no layer behind them: a tokenizer does not depend on the model that it serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final, TypeAlias

from megatron_ext.errors import TokenizerError
from megatron_ext.registry import did_you_mean
from megatron_ext.tokenizers.libraries import library_of
from megatron_ext.tokenizers.metadata import MEGATRON_PACKAGE
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


def tokenizer_class(metadata: Mapping[str, Any]) -> type[MegatronTokenizerText]:
    """The class that checked metadata name, else the one for their mode.

    One of Megatron's own classes, of whatever release, stands for ours; megatron-core is not
    imported for it.

    Raises:
        TokenizerError: The class cannot be imported, or is no tokenizer of ours.
        UnknownNameError: The library is unknown.
    """
    name, module_name = metadata.get("class_name"), metadata.get("class_path")
    if name is None or module_name is None:
        return _class_for_mode(metadata)
    if f"{module_name}.".startswith(f"{MEGATRON_PACKAGE}."):
        return _megatron_class(metadata, name, module_name)
    found = _import_class(name, module_name)
    if not (isinstance(found, type) and issubclass(found, MegatronTokenizerText)):
        raise TokenizerError(
            "this is no tokenizer class",
            expected="a subclass of megatron_ext.tokenizers.MegatronTokenizerText",
            fix="derive it from that instead of Megatron's class",
            where=f"{module_name}.{name}",
        )
    return found


def _class_for_mode(metadata: Mapping[str, Any]) -> type[MegatronTokenizerText]:
    mode = metadata.get("mode") or library_of(metadata["library"]).mode
    return MegatronTokenizerVision if mode == "multimodal" else MegatronTokenizerText


def _megatron_class(
    metadata: Mapping[str, Any], name: str, module_name: str
) -> type[MegatronTokenizerText]:
    """Ours for one of Megatron's; one for images where either the class or the mode says so."""
    if name not in MEGATRON_CLASSES:
        raise TokenizerError(
            "Megatron has no such tokenizer class",
            got=repr(name),
            expected=f"one of {', '.join(MEGATRON_CLASSES)}",
            fix=did_you_mean(name, MEGATRON_CLASSES),
            where=module_name,
        )
    ours, for_mode = MEGATRON_CLASSES[name], _class_for_mode(metadata)
    return for_mode if issubclass(for_mode, ours) else ours


def _import_class(name: str, module_name: str) -> object:
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise TokenizerError(
            "cannot import the tokenizer class", got=str(error), where=f"{module_name}.{name}"
        ) from error
    try:
        found: object = getattr(module, name)
    except AttributeError:
        raise TokenizerError(
            "the module has no such class",
            got=repr(name),
            fix=did_you_mean(name, dir(module)),
            where=module_name,
        ) from None
    return found

"""Registration of our tokenizers for the isinstance checks of megatron-core.

megatron-core is heavy and is never imported here. Importing this module makes ours virtual
subclasses of those of its abstract classes that are loaded already, and puts a finder on
``sys.meta_path`` that does so for the others when they are loaded: in whichever order the packages
are imported.
"""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import Mapping
from types import ModuleType
from typing import Final

from megatron_ext.imports import AfterImport
from megatron_ext.tokenizers.base import MegatronTokenizerBase, MegatronTokenizerTextAbstract
from megatron_ext.tokenizers.text_tokenizer import MegatronTokenizerText
from megatron_ext.tokenizers.vision_tokenizer import MegatronTokenizerVision

_OURS: Final[Mapping[str, tuple[str, type]]] = {
    "megatron.core.tokenizers.base_tokenizer": ("MegatronTokenizerBase", MegatronTokenizerBase),
    "megatron.core.tokenizers.text.text_tokenizer": (
        "MegatronTokenizerText",
        MegatronTokenizerText,
    ),
    "megatron.core.tokenizers.text.libraries.abstract_tokenizer": (
        "MegatronTokenizerTextAbstract",
        MegatronTokenizerTextAbstract,
    ),
    "megatron.core.tokenizers.vision.vision_tokenizer": (
        "MegatronTokenizerVision",
        MegatronTokenizerVision,
    ),
}
"""Module of megatron-core -> its abstract class, and ours to be registered with it."""


def register_with_megatron_core() -> None:
    """Register with the classes of megatron-core that are loaded, and watch for the others.

    Calling it again changes nothing; a release that lacks a class is left alone.
    """
    for name in _OURS:
        module = sys.modules.get(name)
        if module is not None:
            _register(module)
    if _WATCHER not in sys.meta_path:
        sys.meta_path.insert(0, _WATCHER)


def _register(module: ModuleType) -> None:
    class_name, ours = _OURS[module.__name__]
    theirs = getattr(module, class_name, None)
    # ``register`` of an ABC does not check for methods, so ours need not match the signatures of
    # their abstract ``vocab`` and ``apply_chat_template``.
    if isinstance(theirs, ABCMeta):
        theirs.register(ours)


_WATCHER: Final = AfterImport(_OURS, _register)

register_with_megatron_core()

"""Registration of our tokenizers for the isinstance checks of megatron-core.

megatron-core is heavy and is never imported here. Importing this module makes ours virtual
subclasses of those of its abstract classes that are loaded already, and puts a finder on
``sys.meta_path`` that does so for the others when they are loaded: in whichever order the packages
are imported. The finder delegates the modules listed below to the other finders, and ignores all
others.
"""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

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
            _register(module, name)
    if not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher())


def _register(module: ModuleType, name: str) -> None:
    class_name, ours = _OURS[name]
    theirs = getattr(module, class_name, None)
    # ``register`` of an ABC does not check for methods, so ours need not match the signatures of
    # their abstract ``vocab`` and ``apply_chat_template``.
    if isinstance(theirs, ABCMeta):
        theirs.register(ours)


class _Watcher(MetaPathFinder):
    """Finder that delegates to the other finders, and registers with the modules they load."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname not in _OURS:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _RegisteringLoader(spec.loader)
                return spec
        return None


class _RegisteringLoader(Loader):
    """Loader that delegates to another loader, then registers."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        # Restore the original loader, so that this one is not seen later.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register(module, module.__name__)


register_with_megatron_core()

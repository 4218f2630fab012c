"""Functions of modules replaced as the modules are imported, whichever of them there are."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


@dataclass(frozen=True, slots=True)
class Patch:
    """A function of a module and what takes its place."""

    module: str
    function: str
    replace: Callable[[Any], Any]
    """The original -> what takes its place."""
    optional: bool = False
    """Whether the module does without the function in some releases."""


class PatchedModules(MetaPathFinder):
    """Finds the modules of ``patches`` where the other finders do, and patches them once executed.

    A module that is never imported costs nothing, so the patches may name modules of many releases.

    Args:
        patches: What to replace.
    """

    def __init__(self, patches: Iterable[Patch]) -> None:
        self._patches: dict[str, list[Patch]] = {}
        for patch in patches:
            self._patches.setdefault(patch.module, []).append(patch)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname not in self._patches:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _PatchingLoader(spec.loader, self._patch)
                return spec
        return None

    def patch_imported(self) -> None:
        """Patch the modules that are imported already, and every name bound to their functions."""
        for name in self._patches:
            module = sys.modules.get(name)
            if module is None:
                continue
            for original, replacement in self._patch(module):
                _rebind(original, replacement)

    def _patch(self, module: ModuleType) -> list[tuple[Any, Any]]:
        """Patch one module; the originals and what took their place."""
        replaced = []
        for patch in self._patches[module.__name__]:
            original = getattr(module, patch.function, None)
            if original is None and patch.optional:
                continue
            if original is None:
                warnings.warn(
                    f"{patch.module} has no {patch.function}: megatron-ext does not know this "
                    "release of Megatron-LM and leaves the function as it is",
                    stacklevel=2,
                )
                continue
            replacement = patch.replace(original)
            setattr(module, patch.function, replacement)
            replaced.append((original, replacement))
        return replaced


class _PatchingLoader(Loader):
    """A loader that patches the module it has executed."""

    def __init__(self, loader: Loader, patch: Callable[[ModuleType], object]) -> None:
        self._loader = loader
        self._patch = patch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)

    def __getattr__(self, name: str) -> Any:
        # Sources and resources of the module are the real loader's.
        return getattr(self._loader, name)


def _rebind(original: Any, replacement: Any) -> None:
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if value is original:
                setattr(module, name, replacement)

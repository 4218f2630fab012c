"""Megatron-LM's scripts, run in this process with some of its functions replaced.

Functions are replaced as their modules are imported. The table of patches names those of several
releases; modules that a release does not have are never imported.
"""

from __future__ import annotations

import multiprocessing.spawn
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from megatron_ext.errors import ConfigError
from megatron_ext.imports import AfterImport
from megatron_ext.megatron_lm.arguments import (
    with_our_flags,
    with_our_tokenizers,
    with_tokenizer_of_checkpoint,
    with_whole_tokenizers,
)


@dataclass(frozen=True, slots=True)
class Patch:
    """A function of a module and its replacement."""

    module: str
    function: str
    replace: Callable[[Any], Any]
    """Makes the replacement from the original."""
    optional: bool = False
    """Whether some releases lack the function."""


class PatchedModules(AfterImport):
    """A finder of modules that patches those of ``patches`` after their execution.

    Args:
        patches: Functions to replace, by module.
    """

    def __init__(self, patches: Iterable[Patch]) -> None:
        self._patches: dict[str, list[Patch]] = {}
        for patch in patches:
            self._patches.setdefault(patch.module, []).append(patch)
        super().__init__(self._patches, self._patch)

    def patch_imported(self) -> None:
        """Patch the modules that are imported already, and every name bound to their functions."""
        for name in self._patches:
            module = sys.modules.get(name)
            if module is None:
                continue
            for original, replacement in self._patch(module):
                _rebind(original, replacement)

    def _patch(self, module: ModuleType) -> list[tuple[Any, Any]]:
        """Patch one module; return the originals and their replacements."""
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


def _rebind(original: Any, replacement: Any) -> None:
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if value is original:
                setattr(module, name, replacement)


def _with_our_conversations(sft_dataset: type[Any]) -> type[Any]:
    """The data set of ``--sft`` in place of Megatron-LM's, for any of our tokenizers."""
    # It imports megatron-core, which the module of the class that it replaces has imported.
    from megatron_ext.megatron_lm.script_conversations import ScriptConversations

    return ScriptConversations


PATCHES: Final = (
    Patch("megatron.training.arguments", "_add_tokenizer_args", with_our_flags),
    # Up to 0.16.
    Patch("megatron.training.tokenizer.tokenizer", "build_tokenizer", with_our_tokenizers),
    Patch(
        "megatron.core.tokenizers.text.utils.build_tokenizer",
        "build_tokenizer",
        with_our_tokenizers,
    ),
    # From 0.17.
    Patch("megatron.core.tokenizers.utils.build_tokenizer", "build_tokenizer", with_our_tokenizers),
    Patch("megatron.training.datasets.sft_dataset", "SFTDataset", _with_our_conversations),
    Patch(
        "megatron.training.checkpointing",
        "load_args_from_checkpoint",
        with_tokenizer_of_checkpoint,
    ),
    # After 0.19.
    Patch(
        "megatron.training.checkpointing",
        "save_tokenizer_assets",
        with_whole_tokenizers,
        optional=True,
    ),
)


def install() -> None:
    """Give Megatron-LM our flags and tokenizers, in this process and those it forks.

    It may be called before or after Megatron-LM is imported, and more than once. It imports nothing
    and changes no file.
    """
    if any(isinstance(finder, PatchedModules) for finder in sys.meta_path):
        return
    modules = PatchedModules(PATCHES)
    sys.meta_path.insert(0, modules)
    modules.patch_imported()


SCRIPT_VARIABLE: Final = "MEGATRON_EXT_SCRIPT"
"""Environment variable with the path of the script, for the processes that it starts."""

_SPAWNED: Final = f"{__package__}.spawned_script"


def run_script(script: str | os.PathLike[str], arguments: Sequence[str] = ()) -> None:
    """Run ``script`` as ``python SCRIPT ARGUMENTS`` would, with our flags and tokenizers.

    It changes ``sys.path``, ``sys.argv`` and the environment of this process, which is meant to end
    with the script. The checkout that holds the script comes before an installed megatron-core, but
    not before ``PYTHONPATH``.

    Raises:
        ConfigError: The script does not exist, or is not Python.
    """
    file = Path(script)
    if not file.is_file():
        raise ConfigError(
            "the script does not exist",
            expected="a Python file, such as pretrain_gpt.py of a Megatron-LM checkout",
            where=file,
        )
    try:
        compile(file.read_bytes(), script, "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(
            "the script is not Python",
            got=getattr(error, "msg", None) or error,
            where=f"{file}:{getattr(error, 'lineno', None) or 1}",
        ) from error
    install()
    _prepare_processes(file.resolve())
    sys.argv = [os.fspath(script), *arguments]
    sys.path[:] = _search_path(file, sys.path)
    runpy.run_path(os.fspath(script), run_name="__main__")


def _search_path(file: Path, path: Sequence[str]) -> list[str]:
    """``path`` for a script: its folder, PYTHONPATH, its checkout, and the rest."""
    folder = file.resolve().parent
    checkouts = [f for f in (folder, *folder.parents) if (f / "megatron" / "training").is_dir()]
    # The first entry is this program's own folder, unless Python was told to leave it out.
    rest = path if getattr(sys.flags, "safe_path", False) else path[1:]
    given = {os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    return [
        str(folder),
        *(entry for entry in rest if os.path.abspath(entry) in given),
        *(str(checkout) for checkout in checkouts[:1] if checkout != folder),
        *(entry for entry in rest if os.path.abspath(entry) not in given),
    ]


def _prepare_processes(file: Path) -> None:
    """Make spawned processes install the patches before they run the script."""
    os.environ[SCRIPT_VARIABLE] = str(file)
    prepare = multiprocessing.spawn.get_preparation_data

    def prepare_with_patches(name: str) -> dict[str, Any]:
        data = prepare(name)
        if data.pop("init_main_from_path", None) is not None:
            data["init_main_from_name"] = _SPAWNED
        return data

    multiprocessing.spawn.get_preparation_data = prepare_with_patches

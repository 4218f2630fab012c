"""A script of Megatron-LM's, run in this process as Python would run it.

The main module of a process that a script spawned: the script's, under the patches.

``multiprocessing`` runs it under the name ``__mp_main__`` and takes its names for the script's, so
it has none of its own but those that start with an underscore.

What of Megatron-LM is replaced, in the layouts of its releases.
"""

from __future__ import annotations

import multiprocessing.spawn
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from megatron_ext.errors import ConfigError
from megatron_ext.megatron_lm.arguments import (
    with_our_flags,
    with_our_tokenizers,
    with_tokenizer_of_checkpoint,
    with_whole_tokenizers,
)
from megatron_ext.megatron_lm.patched_modules import Patch, PatchedModules

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
    """Put our flags and tokenizers under Megatron-LM, in this process and those it forks.

    It may be called before or after Megatron-LM is imported, and more than once. Nothing is
    imported by it, and no file is touched.
    """
    if any(isinstance(finder, PatchedModules) for finder in sys.meta_path):
        return
    modules = PatchedModules(PATCHES)
    sys.meta_path.insert(0, modules)
    modules.patch_imported()


SCRIPT_VARIABLE: Final = "MEGATRON_EXT_SCRIPT"
"""Environment variable that tells the processes a script starts which script that is."""

_SPAWNED: Final = f"{__package__}.spawned_script"


def run_script(script: str | os.PathLike[str], arguments: Sequence[str] = ()) -> None:
    """Run ``script`` as ``python SCRIPT ARGUMENTS`` would, with our flags and tokenizers.

    It changes ``sys.path``, ``sys.argv`` and the environment of this process, which is meant to end
    with the script. The checkout that holds the script comes before an installed megatron-core, but
    not before ``PYTHONPATH``.

    Raises:
        ConfigError: The script does not exist.
    """
    file = Path(script)
    if not file.is_file():
        raise ConfigError(
            "the script does not exist",
            expected="a Python file, such as pretrain_gpt.py of a Megatron-LM checkout",
            where=file,
        )
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
    """Let processes that are spawned, not forked, install the patches before the script."""
    os.environ[SCRIPT_VARIABLE] = str(file)
    prepare = multiprocessing.spawn.get_preparation_data

    def prepare_with_patches(name: str) -> dict[str, Any]:
        data = prepare(name)
        if data.pop("init_main_from_path", None) is not None:
            data["init_main_from_name"] = _SPAWNED
        return data

    multiprocessing.spawn.get_preparation_data = prepare_with_patches

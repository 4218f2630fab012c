"""A script of Megatron-LM's, run in this process as Python would run it."""

from __future__ import annotations

import multiprocessing.spawn
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from megatron_ext.errors import ConfigError
from megatron_ext.training.megatron_lm.install import install

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

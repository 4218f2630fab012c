"""Places and names of a run's checkpoints, and the newest complete one.

``checkpoints/iter_0000040`` holds one iteration; ``checkpoints/latest`` names the one to resume
from. Nothing here opens a checkpoint with torch, so that a wrong path is found before it is loaded.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from megatron_ext.errors import CheckpointError
from megatron_ext.files import flush, write_text
from megatron_ext.huggingface.checkpoint_files import is_checkpoint_folder
from megatron_ext.huggingface.hub import hub_model
from megatron_ext.registry import with_near_path
from megatron_ext.training.checkpoints.manifest import write_manifest

CHECKPOINTS: Final = "checkpoints"
"""Name of the folder of checkpoints in a run's folder."""

_LATEST = "latest"
_LONGEST_NAME: Final = 4096
_PREFIX = "iter_"
_WRITTEN_SUFFIX = ".distcp"
_METADATA_FILE = "metadata.json"
"""File that megatron-core writes last into a checkpoint, and recognises one by."""


def checkpoint_path(folder: Path, iteration: int) -> Path:
    """Final name of an iteration's checkpoint."""
    return folder / f"{_PREFIX}{iteration:07d}"


def iteration_of(checkpoint: Path) -> int:
    """The iteration of a ``checkpoint_path``."""
    return int(checkpoint.name.removeprefix(_PREFIX))


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint that ``latest`` names, the newest without that file, or None.

    Raises:
        CheckpointError: ``latest`` cannot be read, or names a checkpoint that is not there.
    """
    pointer = folder / _LATEST
    if not pointer.exists():
        # In a copy without the file, or killed behind the first save: the newest that is whole.
        whole = [
            path for path in _complete_checkpoints(folder) if (path / _METADATA_FILE).is_file()
        ]
        return whole[-1] if whole else None
    try:
        name = pointer.read_bytes()[:_LONGEST_NAME].decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            "the name of the latest checkpoint cannot be read",
            where=pointer,
            got=error,
            fix=f"write the name of a checkpoint that exists into {pointer}",
        ) from error
    names = [path.name for path in _complete_checkpoints(folder)]
    # A name alone: a path may lead to a checkpoint of another run.
    if name not in names:
        present = ", ".join(names) or "none"
        raise CheckpointError(
            "the latest checkpoint is missing",
            where=pointer,
            got=repr(name[:100]),
            expected=f"one of {present}",
            fix=f"write the name of a checkpoint that exists into {pointer}",
        )
    return folder / name


def publish_checkpoint(
    partial: Path, final: Path, *, keep: int, files: Sequence[Path] = ()
) -> None:
    """Rename a complete checkpoint to its final name, and make it the latest.

    Args:
        partial: Folder that it was written to, beside ``final``.
        keep: As in ``set_latest_checkpoint``.
        files: Files and folders that are copied into it; those that do not exist are left out.
    """
    for source in files:
        if source.is_dir():
            shutil.copytree(source, partial / source.name)
        elif source.exists():
            shutil.copyfile(source, partial / source.name)
    write_manifest(partial)
    # Before ``latest`` names it; writers flush their own files.
    flush(*(path for path in partial.rglob("*") if path.suffix != _WRITTEN_SUFFIX), partial)
    if final.exists():
        # Left by a run that went back to an earlier checkpoint.
        _remove(final)
    os.replace(partial, final)
    flush(final.parent)
    set_latest_checkpoint(final, keep=keep)


def remove_partial_checkpoints(folder: Path) -> None:
    """Remove the remains of saves and removals that were cut short."""
    for leftover in [*folder.glob(f".{_PREFIX}*.partial"), *folder.glob(f".{_PREFIX}*.removed")]:
        shutil.rmtree(leftover, ignore_errors=True)


def set_latest_checkpoint(checkpoint: Path, *, keep: int) -> None:
    """Make ``checkpoint`` the latest and remove all but the ``keep`` newest up to it.

    Checkpoints of later iterations stay, for a user who goes back to an earlier one.
    """
    folder = checkpoint.parent
    write_text(folder / _LATEST, checkpoint.name)
    done = [path for path in _complete_checkpoints(folder) if path.name <= checkpoint.name]
    for old in done[:-keep]:
        _remove(old)


def find_checkpoint(path: str, *, where: str) -> Path:
    """The checkpoint that a path stands for.

    Args:
        path: A checkpoint, a HuggingFace folder, or a run's folder or its ``checkpoints``, of which
            the latest is taken; or a model's name on the hub, as ``hub_model`` takes it.
        where: Configuration key with the path, for the error.

    Raises:
        CheckpointError: There is none.
    """
    folder = hub_model(path, where=where) or Path(path)
    if (folder / _METADATA_FILE).is_file() or is_checkpoint_folder(folder):
        return folder
    checkpoint = newest_checkpoint(folder)
    if checkpoint is None:
        raise CheckpointError(
            "no checkpoint found",
            where=where,
            got=f"{path}, {_described(folder)}",
            expected="a HuggingFace folder, a run, its checkpoints or one iteration in them, or "
            "OWNER/NAME of a model on the hub",
            fix=with_near_path(
                "correct the path, or train or download the model first: "
                f"hf download OWNER/NAME --local-dir {path}",
                path,
            ),
        )
    return checkpoint


def newest_checkpoint(folder: str | Path) -> Path | None:
    """The latest complete checkpoint of a run, by its folder or by its ``checkpoints``, or None.

    Raises:
        CheckpointError: As ``latest_checkpoint``.
    """
    return latest_checkpoint(Path(folder)) or latest_checkpoint(Path(folder, CHECKPOINTS))


def _described(path: Path) -> str:
    """Description of a path that is no checkpoint, for an error."""
    if path.is_dir():
        return "a folder without a model's config.json and without checkpoints"
    return "which is a file" if path.exists() else "which does not exist"


def _complete_checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if path.is_dir())


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint, renamed first so that it does not look complete meanwhile."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    shutil.rmtree(checkpoint.replace(hidden))

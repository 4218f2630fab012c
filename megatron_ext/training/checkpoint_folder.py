"""Where a run's checkpoints lie, and which of them is the newest complete one.

``checkpoints/iter_0000040`` holds one iteration; ``checkpoints/latest`` names the one to go on
from. Nothing here opens a checkpoint, so that a wrong path is found before torch is loaded.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from megatron_ext.atomic_file import write_text
from megatron_ext.errors import CheckpointError

_LATEST = "latest"
_PREFIX = "iter_"
_METADATA_FILE = "metadata.json"
"""What megatron-core writes last into a checkpoint, and knows one by."""


def checkpoint_path(folder: Path, iteration: int) -> Path:
    """Final name of an iteration's checkpoint."""
    return folder / f"{_PREFIX}{iteration:07d}"


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None.

    Raises:
        CheckpointError: ``latest`` names a checkpoint that is not there.
    """
    pointer = folder / _LATEST
    if not pointer.exists():
        return None
    name = pointer.read_text(encoding="utf-8").strip()
    checkpoint = folder / name
    if not name or not checkpoint.is_dir():
        present = ", ".join(path.name for path in _complete_checkpoints(folder)) or "none"
        raise CheckpointError(
            "the latest checkpoint is missing",
            where=pointer,
            got=repr(name),
            expected=f"one of {present}",
            fix=f"write the name of a checkpoint that exists into {pointer}",
        )
    return checkpoint


def set_latest_checkpoint(checkpoint: Path, *, keep: int) -> None:
    """Name ``checkpoint`` the latest and remove all but the ``keep`` newest up to it.

    Checkpoints of later iterations stay: a user who goes back to an earlier one has them.
    """
    folder = checkpoint.parent
    write_text(folder / _LATEST, checkpoint.name)
    done = [path for path in _complete_checkpoints(folder) if path.name <= checkpoint.name]
    for old in done[:-keep]:
        # Renamed first, so that a removal that is cut short leaves nothing that looks complete.
        removed = old.replace(old.with_name(f".{old.name}.removed"))
        shutil.rmtree(removed)


def find_checkpoint(path: str, *, where: str) -> Path:
    """A checkpoint folder, or the latest one of a run's ``checkpoints``.

    Args:
        path: Either of them.
        where: Configuration key that names it, for the error.

    Raises:
        CheckpointError: There is none.
    """
    folder = Path(path)
    if (folder / _METADATA_FILE).is_file():
        return folder
    checkpoint = latest_checkpoint(folder) if folder.is_dir() else None
    if checkpoint is None:
        raise CheckpointError(
            "no checkpoint found",
            where=where,
            got=path if folder.is_dir() else f"{path}, which is no folder",
            expected="a run's checkpoints folder, or one iteration in it",
            fix="train that model first, or correct the path",
        )
    return checkpoint


def _complete_checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if path.is_dir())

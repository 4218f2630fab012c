"""How the known tools name models and files, and what of their flags does nothing any more."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from megatron_ext.cli.projection.files import note
from megatron_ext.errors import ProjectionError

DATA_FOLDER: Final = "cross_tokenizer_data"
_SIZE = re.compile(r"-?[0-9.]+[bm]", re.IGNORECASE)
_VARIANT = re.compile(r"-(Base|it|Instruct)")

NO_SCALE_TRICK: Final = (
    "--enable-scale-trick does nothing: no column is given mass that stands for nothing, and the "
    "file says enable_scale_trick=False"
)
BYTES_DECIDE: Final = "does nothing: tokens are compared by their bytes, and equal ones are exact"


def clean_model_name(model: str) -> str:
    """A model's name as the known tools write it in file names.

    That is the last part of the path, without sizes (``-1B``) and variants (``-Base``,
    ``-Instruct``, ``-it``), and with ``_mini`` behind one that has "mini" in it.
    """
    name = Path(model).name
    cleaned = _VARIANT.sub("", _SIZE.sub("", name)).strip("-_")
    return f"{cleaned}_mini" if "mini" in name else cleaned


def prepared_name(student: str, teacher: str, top_k: int) -> str:
    """Stem of what the first step writes."""
    return (
        f"projection_map_{clean_model_name(student)}_to_{clean_model_name(teacher)}"
        f"_multitoken_top_{top_k}_double"
    )


def made_folder(path: str | Path) -> Path:
    """The folder at ``path``, which is made where it is missing.

    Raises:
        ProjectionError: It cannot be made.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProjectionError(
            "the folder cannot be made", where=folder, got=error.strerror
        ) from error
    return folder


def with_suffix(path: Path, words: str) -> Path:
    """``path`` as a .pt file with ``words`` behind its stem."""
    stem = path.name.removesuffix(path.suffix) if path.suffix in (".pt", ".pth") else path.name
    return path.with_name(f"{stem}{words}.pt")


def note_inert(arguments: argparse.Namespace, defaults: Mapping[str, object], why: str) -> None:
    """Say once which of the flags ``defaults`` were given in vain."""
    given = [flag for flag, default in defaults.items() if _value(arguments, flag) != default]
    if given:
        note(f"{_joined(given)} {why}")


def _value(arguments: argparse.Namespace, flag: str) -> object:
    name = flag.removeprefix("--").removeprefix("enable/disable-")
    return getattr(arguments, name.replace("-", "_"))


def _joined(names: Iterable[str]) -> str:
    return ", ".join(names)

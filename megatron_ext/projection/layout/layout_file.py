"""Layout files: one JSON file that names the pair of vocabularies it is for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from megatron_ext.errors import ProjectionError, refused_by_system
from megatron_ext.files import read_json, write_text
from megatron_ext.projection.layout.packing import VocabularyOrder

if TYPE_CHECKING:
    from megatron_ext.projection.layout.vocabulary_layout import VocabularyLayout
    from megatron_ext.tokenizers.base import ByteTokenizer

FORMAT: Final = "megatron-ext-vocabulary-layout"
FORMAT_VERSION: Final = 1
_REBUILD: Final = "make it again: VocabularyLayout.of(projection, ...)"


def save_layout(layout: VocabularyLayout, path: Path) -> None:
    """Replace ``path`` by ``layout`` in one step; see ``VocabularyLayout.save``."""
    sides = {
        side: {"vocab_size": order.vocab_size, "ids": order.ids.tolist()}
        for side, order in (("student", layout.student), ("teacher", layout.teacher))
    }
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "metadata": dict(layout.metadata),
        "common_counts": list(layout.common_counts),
        **sides,
    }
    with refused_by_system(
        "the vocabulary layout cannot be written",
        where=path,
        expected="a file name in an existing folder with room and write permission",
        kind=ProjectionError,
    ):
        # A missing folder is more often a typing error than a folder to make.
        path.parent.stat()
        write_text(path, json.dumps(content) + "\n")


def load_layout(
    layout_class: type[VocabularyLayout],
    path: Path,
    student: ByteTokenizer | None,
    teacher: ByteTokenizer | None,
) -> VocabularyLayout:
    """Read the file at ``path``; see ``VocabularyLayout.load``."""
    content = _read(path)
    for role, tokenizer in (("student", student), ("teacher", teacher)):
        if tokenizer is not None:
            _check_built_for(path, content, role, tokenizer.fingerprint())
    try:
        counts = tuple(content["common_counts"])
        student_order, teacher_order = (
            VocabularyOrder(
                ids=content[side]["ids"],
                vocab_size=content[side]["vocab_size"],
                rank_count=len(counts),
            )
            for side in ("student", "teacher")
        )
        return layout_class(
            student=student_order,
            teacher=teacher_order,
            common_counts=counts,
            metadata=content["metadata"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProjectionError(
            "the file is not a complete vocabulary layout", where=path, got=error, fix=_REBUILD
        ) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise ProjectionError(
            "the vocabulary layout cannot be read", where=path, got=error, fix=_REBUILD
        ) from error
    file_format = content.get("format") if isinstance(content, dict) else None
    if file_format != FORMAT or content.get("format_version") != FORMAT_VERSION:
        raise ProjectionError(
            "the file is not a vocabulary layout that this version reads",
            where=path,
            got=f"{file_format} version {content.get('format_version')}"
            if file_format
            else "another file",
            expected=f"{FORMAT} version {FORMAT_VERSION}",
            fix=_REBUILD,
        )
    assert isinstance(content, dict)
    return content


def _check_built_for(path: Path, content: dict[str, Any], role: str, given: str) -> None:
    built_for = content.get("metadata", {}).get(f"{role}_fingerprint")
    if built_for != given:
        raise ProjectionError(
            f"this vocabulary layout was made for another {role}",
            where=path,
            got=f"fingerprint {str(built_for)[:12]}" if built_for else "no fingerprint",
            expected=f"{given[:12]}, of the {role} given",
            fix=_REBUILD,
        )

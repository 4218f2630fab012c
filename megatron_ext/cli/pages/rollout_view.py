"""Logged completions of a run, their text coloured by how far student and teacher disagree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from markupsafe import Markup

from megatron_ext.cli.pages.frame import element, in_line
from megatron_ext.cli.pages.run_record import RunRecord, as_number
from megatron_ext.cli.pages.token_view import bits, number

_LEVELS: Final = (math.log(2), math.log(10), math.log(100))
"""Differences of surprise, in nats, from which on a piece has the next stronger colour."""

_MOST_PROMPT: Final = 300
"""Characters of a prompt that are shown, its last ones."""


@dataclass(frozen=True, slots=True)
class ShownCompletion:
    """A row of the table."""

    iteration: str
    text: Markup
    """The prompt, and the completion in pieces."""
    cells: tuple[str, str, str]
    """Tokens, and bits per byte of the student and of the teacher."""


class _Piece(NamedTuple):
    text: str
    student: float | None
    teacher: float | None


def completions(run: RunRecord) -> list[tuple[str, list[ShownCompletion]]]:
    """The completions by teacher; under an empty name those of which no surprise is known.

    Names are empty, too, in a run with a single teacher.
    """
    names = dict.fromkeys(name for record in run.completions for name in _surprise(record))
    if len(names) < 2:
        rows = [_shown(record, next(iter(names), "")) for record in run.completions]
        return [("", rows)] if rows else []
    return [(name, [_shown(record, name) for record in run.completions]) for name in names]


def _surprise(record: Mapping[str, Any]) -> Mapping[str, Any]:
    found = record.get("surprise")
    return found if isinstance(found, Mapping) else {}


def _shown(record: Mapping[str, Any], teacher: str) -> ShownCompletion:
    of_teacher = _surprise(record).get(teacher)
    of_teacher = of_teacher if isinstance(of_teacher, Mapping) else {}
    prompt = str(record.get("prompt", ""))
    completion = str(record.get("completion", ""))
    pieces = list(_pieces(of_teacher.get("pieces")))
    if len(prompt) > _MOST_PROMPT:
        prompt = "…" + prompt[-_MOST_PROMPT:]
    parts = [_part(prompt, "prompt"), *map(_coloured, pieces)]
    begin, more = "".join(piece.text for piece in pieces), as_number(of_teacher.get("more_pieces"))
    if more:
        parts.append(_part(f" … {number(more)} more", "prompt"))
    elif completion.startswith(begin):
        parts.append(_part(completion.removeprefix(begin), "cut" if pieces else "unknown"))
    count = as_number(of_teacher.get("bytes"))
    student, its = (_bits(of_teacher.get(side), count) for side in ("student", "teacher"))
    return ShownCompletion(
        number(as_number(record["iteration"])),
        Markup("").join(parts),
        (number(as_number(record.get("tokens"))), student, its),
    )


def _pieces(values: object) -> Iterator[_Piece]:
    """Pieces of a record; none where it is of another form."""
    for value in values if isinstance(values, list) else ():
        if isinstance(value, list) and len(value) == 3 and isinstance(value[0], str):
            yield _Piece(value[0], as_number(value[1]), as_number(value[2]))


def _bits(nats: object, byte_count: float | None) -> str:
    value = as_number(nats)
    return bits(value / math.log(2) / byte_count if value is not None and byte_count else None)


def _coloured(piece: _Piece) -> Markup:
    if piece.student is None or piece.teacher is None:
        return _part(piece.text, "unknown", _title(piece))
    return _part(piece.text, disagreement_style(piece.teacher - piece.student), _title(piece))


def disagreement_style(apart: float) -> str:
    """Class of a piece by how much likelier it is to the student than to the teacher, in nats."""
    level = sum(abs(apart) >= least for least in _LEVELS)
    return f"{'t' if apart > 0 else 's'}{level}" if level else ""


def _title(piece: _Piece) -> str:
    values: Sequence[tuple[str, float | None]] = [
        ("student", piece.student),
        ("teacher", piece.teacher),
    ]
    return ", ".join(f"{name} {number(value)} nats" for name, value in values if value is not None)


def _part(text: str, style: str, title: str = "") -> Markup:
    if not text:
        return Markup("")
    named = {"class": style, "title": title}
    return element("bdi", in_line(text), {name: value for name, value in named.items() if value})

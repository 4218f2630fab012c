"""Texts that the models of a run have written and read, coloured by how surprised they were.

Logged completions are coloured by how far student and teacher disagree; samples of both models,
from ``samples.json``, by the student's loss, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from markupsafe import Markup

from megatron_ext.alignment.audit import share_in_words
from megatron_ext.cli.pages.frame import TableRow, element, in_line
from megatron_ext.cli.pages.run_record import RunRecord, as_number
from megatron_ext.cli.pages.token_view import NOTHING, bits, number

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
    for value in _list(values):
        if isinstance(value, list) and len(value) == 3 and isinstance(value[0], str):
            yield _Piece(value[0], as_number(value[1]), as_number(value[2]))


def _bits(nats: object, byte_count: float | None) -> str:
    value = as_number(nats)
    return bits(value / math.log(2) / byte_count if value is not None and byte_count else None)


def _coloured(piece: _Piece) -> Markup:
    if piece.student is None or piece.teacher is None:
        style = "unknown"
    else:
        style = _disagreement(piece.teacher - piece.student)
    return _part(piece.text, style, _surprises(piece.student, piece.teacher))


def _disagreement(apart: float) -> str:
    """Class of a piece by how much likelier it is to the student than to the teacher, in nats."""
    level = sum(abs(apart) >= least for least in _LEVELS)
    return f"{'t' if apart > 0 else 's'}{level}" if level else ""


def _surprises(student: float | None, teacher: float | None) -> str:
    """Both models' surprise at a piece, where it is known, in words."""
    known = {"student": student, "teacher": teacher}
    return ", ".join(
        f"{name} {number(nats)} nats" for name, nats in known.items() if nats is not None
    )


def _part(text: str, style: str, title: str = "") -> Markup:
    if not text:
        return Markup("")
    named = {"class": style, "title": title}
    return element("bdi", in_line(text), {name: value for name, value in named.items() if value})


_LOSSES: Final = (1.0, 3.0, 6.0)
"""Surprise of the student in nats from which on a piece has the next stronger colour."""
_GROUPS: Final = {"script": "by script", "class": "by class", "chunk": "by kind of chunk"}


@dataclass(frozen=True, slots=True)
class SampledText:
    """A text in pieces, coloured by their predictions."""

    markup: Markup
    details: tuple[Any, ...]
    """Of each piece what is shown under the pointer: both surprises, both models' likeliest."""


@dataclass(frozen=True, slots=True)
class ModelSamples:
    """Samples of a student with one of its teachers."""

    teacher: str
    completions: tuple[tuple[str, str, str], ...]
    """Prompt, and what the student and the teacher go on with."""
    texts: tuple[SampledText, ...]
    groups: tuple[TableRow, ...]
    problem: str


def model_samples_of(run: RunRecord) -> list[ModelSamples]:
    """The samples of a run by teacher; none where none were made, or they have another form."""
    teachers = run.samples.get("teachers")
    found = teachers.items() if isinstance(teachers, Mapping) else ()
    return [_samples(str(name), values) for name, values in found if isinstance(values, Mapping)]


def _samples(teacher: str, values: Mapping[str, Any]) -> ModelSamples:
    texts = [text for text in _list(values.get("texts")) if isinstance(text, list)]
    return ModelSamples(
        teacher,
        tuple(_sampled_completions(_list(values.get("completions")))),
        tuple(map(_text, texts)),
        tuple(_groups(_list(values.get("groups")))),
        str(values.get("problem", "")),
    )


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _sampled_completions(values: Sequence[Any]) -> Iterator[tuple[str, str, str]]:
    for value in values:
        if isinstance(value, Mapping):
            prompt, student, teacher = (
                in_line(str(value.get(key, ""))) for key in ("prompt", "student", "teacher")
            )
            yield prompt, student, teacher


def _text(pieces: Sequence[Any]) -> SampledText:
    shown, details = [], []
    for piece in pieces:
        if not isinstance(piece, list) or len(piece) != 6 or not isinstance(piece[0], str):
            continue
        student, teacher = map(as_number, piece[2:4])
        style = _style(student, teacher)
        words = _surprises(student, teacher)
        shown.append(element("bdi", in_line(piece[0]), {"class": style, "title": words}))
        details.append([student, teacher, _likeliest(piece[4]), _likeliest(piece[5])])
    return SampledText(Markup("").join(shown), tuple(details))


def _style(student: float | None, teacher: float | None) -> str:
    """Classes of both ways of colouring: of the student's loss, and of the disagreement."""
    if student is None or teacher is None:
        return "unknown"
    level = sum(student >= least for least in _LOSSES)
    return f"l{level} {_disagreement(teacher - student)}".strip()


def _likeliest(values: object) -> list[list[Any]]:
    return [
        [in_line(pair[0]), as_number(pair[1])]
        for pair in _list(values)
        if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)
    ]


def _groups(values: Sequence[Any]) -> Iterator[TableRow]:
    last = None
    for value in values:
        if not isinstance(value, Mapping):
            continue
        if value.get("by") != last:
            last = value.get("by")
            yield TableRow(_GROUPS.get(str(last), str(last)))
        agreement = as_number(value.get("agreement"))
        yield TableRow(
            str(value.get("name")),
            (
                number(as_number(value.get("bytes"))),
                number(as_number(value.get("chunks"))),
                bits(as_number(value.get("student"))),
                bits(as_number(value.get("teacher"))),
                NOTHING if agreement is None else share_in_words(agreement),
            ),
        )

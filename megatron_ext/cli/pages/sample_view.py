"""What both models of a run write and predict, from ``samples.json``, as the page shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from markupsafe import Markup

from megatron_ext.alignment.audit import share_in_words
from megatron_ext.cli.pages.frame import TableRow, element, in_line
from megatron_ext.cli.pages.rollout_view import disagreement_style
from megatron_ext.cli.pages.run_record import RunRecord, as_number
from megatron_ext.cli.pages.token_view import NOTHING, bits, number

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
        tuple(_completions(_list(values.get("completions")))),
        tuple(map(_text, texts)),
        tuple(_groups(_list(values.get("groups")))),
        str(values.get("problem", "")),
    )


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _completions(values: Sequence[Any]) -> Iterator[tuple[str, str, str]]:
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
        words = ", ".join(
            f"{name} {number(value)} nats"
            for name, value in (("student", student), ("teacher", teacher))
            if value is not None
        )
        shown.append(element("bdi", in_line(piece[0]), {"class": style, "title": words}))
        details.append([student, teacher, _likeliest(piece[4]), _likeliest(piece[5])])
    return SampledText(Markup("").join(shown), tuple(details))


def _style(student: float | None, teacher: float | None) -> str:
    """Classes of both ways of colouring: of the student's loss, and of the disagreement."""
    if student is None or teacher is None:
        return "unknown"
    level = sum(student >= least for least in _LOSSES)
    return f"l{level} {disagreement_style(teacher - student)}".strip()


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

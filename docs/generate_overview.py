"""Draw the picture of the README: an alignment, and a student with and without its teacher.

    python docs/generate_overview.py runs/curve

The tokens and chunks are those that ``TokenAligner`` gives for the two tokenizers of the demo. The
curves are in the ``metrics.jsonl`` of its two students, measured more often than the demo does:
after ``megatron-ext demo``, run ``megatron-ext distill --config runs/demo/distill.yaml
--eval-interval 4`` with ``--run-dir runs/curve/distilled``, and with ``--run-dir
runs/curve/undistilled --loss-objective next_token``. It writes ``overview_light.svg`` and
``overview_dark.svg``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NamedTuple
from xml.sax.saxutils import escape

from megatron_ext import MegatronTokenizer, MegatronTokenizerText, TokenAligner
from megatron_ext.alignment import Alignment
from megatron_ext.cli.demo import STUDENT_TOKENIZER, TEACHER_TOKENIZER

FOLDER: Final = Path(__file__).parent
TEXT: Final = "Distillation of naïve tokenizers in 2017."
OF_STUDENT: Final = "student_bits_per_byte"
WIDTH, HEIGHT, CELL, LEFT = 900, 250, 10.0, 20.0
TOP, BOTTOM, BOX = 74.0, 154.0, 26.0
"""Rows of the two tokenizations, and the height of a token."""

PLOT: Final = (510.0, 56.0, 250.0, 130.0)
"""Left, top, width and height of the curves."""


class Colours(NamedTuple):
    """Of one theme; the background is the page's."""

    text: str
    muted: str
    student: str
    teacher: str
    plain: str
    uneven: str


THEMES: Final[Mapping[str, Colours]] = {
    "light": Colours("#1f2328", "#59636e", "#0969da", "#bc4c00", "#8c959f", "#bc4c00"),
    "dark": Colours("#e6edf3", "#9198a1", "#58a6ff", "#f0883e", "#8b949e", "#f0883e"),
}


def main() -> None:
    """Write both pictures."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/curve")
    runs = {name: rows_of(folder / name) for name in ("undistilled", "distilled")}
    for name, colours in THEMES.items():
        path = FOLDER / f"overview_{name}.svg"
        path.write_text(picture(runs, colours), encoding="utf-8")
        print(path)


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Lines of a run's log."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def picture(runs: Mapping[str, Sequence[Mapping[str, Any]]], colours: Colours) -> str:
    """The SVG of one theme."""
    parts = [*ribbon(colours), *curves(runs, colours)]
    title = "Two tokenizations of one text, chunk by chunk, and the loss of two students"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{title}" font-family="ui-sans-serif, system-ui, Helvetica, sans-serif" '
        f'font-size="13"><title>{title}</title>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def ribbon(colours: Colours) -> Iterator[str]:
    """Both tokenizations over one scale of characters, with a band for each chunk."""
    data = files("mistral_common") / "data"
    student = MegatronTokenizer.from_pretrained(data / STUDENT_TOKENIZER)
    teacher = MegatronTokenizer.from_pretrained(data / TEACHER_TOKENIZER)
    alignment = TokenAligner(student, teacher).align(TEXT)
    yield words(
        LEFT, 24, "One text, two tokenizers: chunks cover the same bytes", colours.text, 600
    )
    yield words(LEFT, TOP - 10, "student · Tekken, 131,072 tokens", colours.student)
    yield words(LEFT, BOTTOM + BOX + 18, "teacher · SentencePiece, 32,768 tokens", colours.teacher)
    ends = characters(student)
    yield from bands(alignment, ends, colours)
    yield from boxes(ends, TOP, colours.student, colours.text)
    yield from boxes(characters(teacher), BOTTOM, colours.teacher, colours.text)
    uneven = sum(int(stop - start != 1) for start, stop in alignment.teacher_spans)
    note = f"{len(alignment.student_spans)} chunks, {uneven} of them one token to several"
    yield words(LEFT, HEIGHT - 14, note, colours.muted)


def characters(tokenizer: MegatronTokenizerText) -> list[int]:
    """The character that each token of the text ends at."""
    _, ends = tokenizer.encode_with_byte_ends(TEXT)
    text = TEXT.encode()
    return [len(text[:end].decode()) for end in ends.tolist()]


def bands(alignment: Alignment, ends: Sequence[int], colours: Colours) -> Iterator[str]:
    """A band between the rows for each chunk; darker where it is not one to one."""
    spans = zip(alignment.student_spans.tolist(), alignment.teacher_spans.tolist(), strict=True)
    for (first, last), (other_first, other_last) in spans:
        start, stop = (ends[first - 1] if first else 0), ends[last - 1]
        is_even = (last - first, other_last - other_first) == (1, 1)
        colour, opacity = (colours.plain, 0.18) if is_even else (colours.uneven, 0.4)
        yield (
            f'<rect x="{LEFT + start * CELL + 1:g}" y="{TOP + BOX:g}" '
            f'width="{(stop - start) * CELL - 2:g}" height="{BOTTOM - TOP - BOX:g}" '
            f'fill="{colour}" fill-opacity="{opacity}"/>'
        )


def boxes(ends: Sequence[int], top: float, colour: str, ink: str) -> Iterator[str]:
    """A box for each token of a row, with its text."""
    for start, stop in zip([0, *ends], ends, strict=False):
        x, width = LEFT + start * CELL, (stop - start) * CELL
        yield (
            f'<rect x="{x + 1:g}" y="{top:g}" width="{width - 2:g}" height="{BOX:g}" rx="3" '
            f'fill="{colour}" fill-opacity="0.12" stroke="{colour}"/>'
        )
        for place, character in enumerate(TEXT[start:stop]):
            # A space is shown, faintly.
            shown, opacity = ("␣", 0.45) if character == " " else (character, 1)
            yield (
                f'<text x="{x + (place + 0.5) * CELL:g}" y="{top + 18:g}" fill="{ink}" '
                f'fill-opacity="{opacity}" text-anchor="middle" font-size="14" '
                f'font-family="ui-monospace, Menlo, monospace">{escape(shown)}</text>'
            )


def curves(runs: Mapping[str, Sequence[Mapping[str, Any]]], colours: Colours) -> Iterator[str]:
    """Bits per byte of held-out text of both students by step, and of the teacher."""
    left, top, width, height = PLOT
    lines = {name: measured(rows) for name, rows in runs.items()}
    teacher = next(row["teacher_bits_per_byte"] for row in runs["distilled"] if row.get(OF_STUDENT))
    first, steps = (lines["distilled"][place][0] for place in (0, -1))
    high, low = max(value for line in lines.values() for _, value in line), 2.0

    def x_of(step: float) -> float:
        return left + width * (step - first) / (steps - first)

    def y_of(value: float) -> float:
        return top + height * (high - value) / (high - low)

    yield words(left, 24, "The same student, with and without a teacher", colours.text, 600)
    yield words(left, 44, "bits per byte of held-out text", colours.muted)
    axes = f"M{left:g} {top:g}V{top + height:g}H{left + width:g}"
    yield f'<path d="{axes}" fill="none" stroke="{colours.muted}"/>'
    for value in (high, low):
        yield words(left - 8, y_of(value) + 4, f"{value:.1f}", colours.muted, anchor="end")
    for step, label in ((first, f"{first}"), (steps, f"{steps} steps")):
        yield words(x_of(step), top + height + 18, label, colours.muted, anchor="middle")
    yield (
        f'<path d="M{left:g} {y_of(teacher):.1f}H{left + width:g}" stroke="{colours.teacher}" '
        'stroke-dasharray="4 3"/>'
    )
    ends = {
        "undistilled": (f"no teacher {lines['undistilled'][-1][1]:.3f}", colours.plain, -6),
        "distilled": (f"distilled {lines['distilled'][-1][1]:.3f}", colours.student, 5),
    }
    for name, line in lines.items():
        label, colour, shift = ends[name]
        points = " ".join(f"{x_of(step):.1f},{y_of(value):.1f}" for step, value in line)
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
        yield words(left + width + 8, y_of(line[-1][1]) + shift, label, colour, 600)
    yield words(left + width + 8, y_of(teacher) + 5, f"teacher {teacher:.3f}", colours.teacher)
    yield words(left, HEIGHT - 14, "megatron-ext demo, on 2 CPU cores", colours.muted)


def measured(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Steps at which a run was measured, with its student's bits per byte."""
    return [(row["iteration"], row[OF_STUDENT]) for row in rows if row.get(OF_STUDENT)]


def words(
    x: float, y: float, text: str, colour: str, weight: int = 400, anchor: str = "start"
) -> str:
    """A line of text."""
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


if __name__ == "__main__":
    main()

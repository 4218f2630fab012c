"""The headline of a run: its student against its teachers, and against a run without a teacher."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from megatron_ext.cli.pages.run_record import RunRecord
from megatron_ext.cli.pages.token_view import bits, number

STUDENT: Final = "student_bits_per_byte"
TEACHER: Final = "teacher_bits_per_byte"


@dataclass(frozen=True, slots=True)
class Headline:
    """The result of a run."""

    run: str
    sentence: str
    figures: tuple[tuple[str, str, str], ...]
    """Name, value and unit of the main numbers; none where nothing was measured."""


def headlines(runs: Sequence[RunRecord]) -> list[Headline]:
    """A headline for each run with a teacher, or for all runs where none has one.

    A run without a teacher among them is the baseline of the others: of several, the one with the
    fewest bits per byte. Runs are compared only if they measured the same held-out text.
    """
    distilled = [run for run in runs if run.distils]
    return [_headline(run, _baseline(run, runs)) for run in distilled or runs]


def _headline(run: RunRecord, baseline: RunRecord | None) -> Headline:
    student = _last(run, STUDENT)
    if student is None:
        return Headline(run.name, _without_measurement(run), ())
    figures = [("student", bits(student), "bits per byte")]
    teachers = dict(_teachers(run))
    for name, value in teachers.items():
        figures.append((name, bits(value), ""))
    unaided = _last(baseline, STUDENT) if baseline else None
    if baseline is not None and unaided is not None:
        figures.append((f"without a teacher ({baseline.name})", bits(unaided), ""))
    parts = [f"{_when(run)} the student has {bits(student)} bits per byte of held-out text"]
    if run.distils and baseline is not None and unaided is not None:
        parts.append(_against_baseline(student, unaided))
        if len(teachers) == 1:
            teacher = next(iter(teachers.values()))
            parts.append(_gap(student, teacher, unaided))
            if student > teacher and unaided > max(student, teacher):
                closed = (unaided - student) / (unaided - teacher)
                figures.append(("gap to the teacher closed", f"{closed:.0%}", ""))
        if baseline.iterations != run.iterations:
            parts.append(
                f"; {baseline.name} was trained for {baseline.iterations:,} iterations, "
                f"this run for {run.iterations:,}"
            )
    elif run.distils and teachers:
        parts.append(", its " + ", ".join(f"{n} {bits(v)}" for n, v in teachers.items()))
    return Headline(run.name, "".join(parts) + ".", tuple(figures))


def _when(run: RunRecord) -> str:
    wanted = run.section("training").get("train_iters")
    done = f"{run.iterations:,} iterations"
    if isinstance(wanted, int) and run.iterations < wanted:
        return f"So far, after {run.iterations:,} of {wanted:,} iterations,"
    return f"After {done}"


def _against_baseline(student: float, unaided: float) -> str:
    change = student / unaided - 1 if unaided else 0.0
    if abs(change) < 5e-4:
        return ", as many as without a teacher"
    return f", {abs(change):.1%} {'more' if change > 0 else 'fewer'} than without a teacher"


def _gap(student: float, teacher: float, unaided: float) -> str:
    if student <= teacher:
        return f", and no more than its teacher ({bits(teacher)})"
    if teacher < unaided and student < unaided:
        closed = (unaided - student) / (unaided - teacher)
        return f": it closes {closed:.0%} of the gap to its teacher ({bits(teacher)})"
    return f"; its teacher has {bits(teacher)}"


def _without_measurement(run: RunRecord) -> str:
    losses = run.values("loss")
    if not losses:
        return "Nothing has been measured yet."
    part = max(len(losses) // 10, 1)
    first, last = sum(losses[:part]) / part, sum(losses[-part:]) / part
    return (
        f"{_when(run)} the loss went from {number(first)} to {number(last)}, means of the first "
        "and the last tenth. Nothing was measured on held-out text; data.validation names one, and "
        "training.eval_interval says how often it is read."
    )


def _teachers(run: RunRecord) -> Iterator[tuple[str, float]]:
    for name in run.names():
        if name.startswith(TEACHER):
            value = _last(run, name)
            if value is not None:
                yield name.replace(TEACHER, "teacher").replace("/", " "), value


def _baseline(run: RunRecord, runs: Sequence[RunRecord]) -> RunRecord | None:
    measured = [
        (found, other)
        for other in runs
        if not other.distils and other is not run and _same_text(run, other)
        if (found := _last(other, STUDENT)) is not None
    ]
    return min(measured, key=lambda pair: pair[0])[1] if measured else None


def _same_text(run: RunRecord, other: RunRecord) -> bool:
    return _held_out(run) is not None and _held_out(run) == _held_out(other)


def _held_out(run: RunRecord) -> Any:
    """Hash of the held-out text; None where it is not known."""
    found = run.data.get("validation")
    return found.get("sha256") if isinstance(found, Mapping) else None


def _last(run: RunRecord, name: str) -> float | None:
    values = run.values(name)
    return values[-1] if values else None

"""MMLU: questions with four answers, behind solved ones of the same subject.

Published as ``test/SUBJECT_test.csv`` and ``dev/SUBJECT_dev.csv`` (question, four answers, letter;
no header) and on HuggingFace as Parquet or JSON files with ``question``, ``subject``, ``choices``
and ``answer``. The prompt is the original one: a line that names the subject, then blocks of

    Question
    A. first
    B. second
    C. third
    D. fourth
    Answer: B

and the answer of a model is the letter that it finds likeliest behind the last ``Answer:``.

Source: Hendrycks et al., Measuring Massive Multitask Language Understanding (2021).
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Final, NamedTuple

from megatron_ext.errors import DataError
from megatron_ext.evaluation.language_model import LanguageModel, continuation_request
from megatron_ext.evaluation.tasks.task import (
    TaskOptions,
    TaskResult,
    first_of,
    mean,
    read_csv,
    read_records,
)

_LETTERS: Final = "ABCD"
_SHOTS: Final = 5


class Question(NamedTuple):
    """One item of MMLU."""

    subject: str
    """Name with spaces in place of underscores."""

    text: str
    choices: tuple[str, ...]
    answer: int

    def block(self) -> str:
        """The block of the prompt, without its answer."""
        lines = [
            f"{letter}. {choice}" for letter, choice in zip(_LETTERS, self.choices, strict=True)
        ]
        return "\n".join([self.text.strip(), *lines, "Answer:"])


class Mmlu:
    """MMLU over a file of one subject or several, or a folder of such files.

    Examples come from files named for ``dev`` beside those named for ``test``, or from
    ``few_shot_data``.

    Raises:
        DataError: Files cannot be read, or a subject has too few examples.
    """

    def __init__(self, options: TaskOptions) -> None:
        data, shots = options.path, options.num_fewshot
        self.num_fewshot = _SHOTS if shots is None else shots
        tests = sorted(_files(data, "test")) if data.is_dir() else [data]
        questions = [question for file in tests for question in _questions(file)]
        self._questions: list[Question] = first_of(questions, options.limit, where=data)
        self._examples: dict[str, list[Question]] = defaultdict(list)
        if self.num_fewshot:
            for file in _example_files(data, options.few_shot_data):
                for question in _questions(file):
                    self._examples[question.subject].append(question)
        for subject in sorted({question.subject for question in self._questions}):
            if len(self._examples[subject]) < self.num_fewshot:
                raise DataError(
                    f"too few solved examples of {subject}",
                    where=options.few_shot_data or data,
                    got=len(self._examples[subject]),
                    expected=f"{self.num_fewshot}, from files named for dev",
                    fix="name them with --few-shot-data, or lower --num-fewshot",
                )

    def prompt(self, question: Question) -> str:
        """The prompt of a question, which ends before the letter of the answer."""
        examples = self._examples[question.subject][: self.num_fewshot]
        subject = question.subject
        return "\n\n".join(
            [
                f"The following are multiple choice questions (with answers) about {subject}.",
                *(f"{example.block()} {_LETTERS[example.answer]}" for example in examples),
                question.block(),
            ]
        )

    def run(self, model: LanguageModel) -> TaskResult:
        """Score four letters behind each question."""
        scores = model.log_likelihoods(
            [
                continuation_request(self.prompt(question), f" {letter}", model)
                for question in self._questions
                for letter in _LETTERS
            ]
        )
        samples, right = [], defaultdict(list)
        for number, question in enumerate(self._questions):
            nats = [score.nats for score in scores[4 * number : 4 * number + 4]]
            chosen = nats.index(max(nats))
            right[question.subject].append(float(chosen == question.answer))
            samples.append(
                {
                    "subject": question.subject,
                    "question": question.text,
                    "answer": _LETTERS[question.answer],
                    "chosen": _LETTERS[chosen],
                    "nats": nats,
                }
            )
        by_subject = {subject: mean(values) for subject, values in sorted(right.items())}
        return TaskResult(
            metrics={
                "accuracy": mean([value for values in right.values() for value in values]),
                "accuracy_over_subjects": mean(list(by_subject.values())),
                **{f"accuracy/{subject}": value for subject, value in by_subject.items()},
            },
            count=len(samples),
            settings={"num_fewshot": self.num_fewshot},
            samples=samples,
        )


def _files(folder: Path, split: str) -> list[Path]:
    """Files of a split, by the names in either publication."""
    kinds = {".csv", ".parquet", ".json", ".jsonl"}
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix in kinds]
    # The HuggingFace form repeats every subject in a folder of all.
    files = [path for path in files if "all" not in path.relative_to(folder).parts[:-1]] or files
    return [
        path
        for path in files
        if path.stem.endswith(f"_{split}") or path.stem.split("-")[0] == split
    ]


def _example_files(data: Path, given: Path | None) -> list[Path]:
    if given is not None:
        return sorted(_files(given, "dev")) if given.is_dir() else [given]
    if data.is_dir():
        return sorted(_files(data, "dev"))
    subject = data.stem.removesuffix("_test")
    beside = [data.with_name(data.name.replace("test", "dev", 1))]
    beside.append(data.parent.parent / "dev" / f"{subject}_dev.csv")
    return [path for path in beside if path.is_file() and path != data]


def _questions(path: Path) -> list[Question]:
    rows: list[tuple[str, object, object, object]]
    if path.suffix == ".csv":
        subject = path.stem.removesuffix("_test").removesuffix("_dev").removesuffix("_val")
        rows = [(subject, row[0], row[1:-1], row[-1].strip()) for row in read_csv(path)]
    else:
        rows = [
            (
                row.get("subject") or path.parent.name,
                row.get("question"),
                row.get("choices"),
                row.get("answer"),
            )
            for row in read_records(path)
        ]
    return [_question(*row, where=f"{path}, record {number}") for number, row in enumerate(rows, 1)]


def _question(
    subject: str, text: object, choices: object, answer: object, *, where: str
) -> Question:
    if isinstance(answer, str):
        answer = _LETTERS.find(answer) if len(answer) == 1 else -1
    is_good = isinstance(text, str) and isinstance(choices, list) and len(choices) == 4
    if not is_good or not isinstance(answer, int) or not 0 <= answer < 4:
        raise DataError(
            "the record is not a question of MMLU",
            where=where,
            expected="a question, four choices, and the letter or number of one",
        )
    assert isinstance(choices, list)
    return Question(subject.replace("_", " "), str(text), tuple(map(str, choices)), answer)

"""GSM8K: word problems that end in a number, solved in text behind solved examples.

Published as JSON Lines with ``question`` and ``answer``, whose last line is ``#### NUMBER``; on
HuggingFace as Parquet. Prompt, ends and both ways of finding the number are those of
lm-evaluation-harness's task ``gsm8k``: strictly the number behind ``####``, flexibly the last
number of the completion.

Source: Cobbe et al., Training Verifiers to Solve Math Word Problems (2021).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

from megatron_ext.errors import DataError
from megatron_ext.evaluation.language_model import LanguageModel
from megatron_ext.evaluation.tasks.task import (
    TaskOptions,
    TaskResult,
    first_of,
    mean,
    read_records,
    settings_of,
    text_of,
)

_SHOTS: Final = 5
_NEW_TOKENS: Final = 256
_STOPS: Final = ("Question:", "</s>", "<|im_end|>")
_STRICT: Final = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE: Final = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")


class Problem(NamedTuple):
    """One item of GSM8K."""

    question: str
    answer: str


class Gsm8k:
    """GSM8K over a file of problems.

    Examples come from ``few_shot_data``, or from ``train`` beside ``test``.

    Raises:
        DataError: Files cannot be read, or there are too few examples.
    """

    def __init__(self, options: TaskOptions) -> None:
        shots = _SHOTS if options.num_fewshot is None else options.num_fewshot
        self._options = options
        self._problems: list[Problem] = first_of(
            _problems(options.path), options.limit, where=options.path
        )
        self._examples = _examples(options)[:shots] if shots else []
        if len(self._examples) < shots:
            raise DataError(
                "there are too few solved examples",
                where=options.few_shot_data or options.path,
                got=len(self._examples),
                expected=shots,
                fix="name a file of them with --few-shot-data, or lower --num-fewshot",
            )

    def prompt(self, problem: Problem) -> str:
        """The prompt of a problem, behind the solved examples."""
        solved = [f"{_question(example)} {example.answer}" for example in self._examples]
        return "\n\n".join([*solved, _question(problem)])

    def run(self, model: LanguageModel) -> TaskResult:
        """Generate solutions and compare their numbers."""
        generation = self._options.generation(max_new_tokens=_NEW_TOKENS, stop=_STOPS)
        prompts = [self.prompt(problem) for problem in self._problems]
        completions = model.generate(prompts, generation)
        samples = []
        for problem, completion in zip(self._problems, completions, strict=True):
            expected = normalised(problem.answer)
            samples.append(
                {
                    "question": problem.question,
                    "expected": expected,
                    "completion": completion,
                    "strict": normalised(strict_number(completion)) == expected,
                    "flexible": normalised(flexible_number(completion)) == expected,
                }
            )
        return TaskResult(
            metrics={
                f"exact_match/{kind}": mean([float(bool(sample[kind])) for sample in samples])
                for kind in ("strict", "flexible")
            },
            count=len(samples),
            settings={"num_fewshot": len(self._examples), **settings_of(generation)},
            samples=samples,
        )


def strict_number(completion: str) -> str:
    """The first number behind ``####``; ``[invalid]`` where there is none."""
    match = _STRICT.search(completion)
    return match[1] if match else "[invalid]"


def flexible_number(completion: str) -> str:
    """The last number-like string; ``[invalid]`` where there is none."""
    matches = _FLEXIBLE.findall(completion)
    return str(matches[-1]) if matches else "[invalid]"


def normalised(answer: str) -> str:
    """The number of a solution alone, without dollars, commas and a full stop."""
    for pattern in (",", r"\$", r"(?s).*#### ", r"\.$"):
        answer = re.sub(pattern, "", answer)
    return answer.lower()


def _question(problem: Problem) -> str:
    return f"Question: {problem.question}\nAnswer:"


def _problems(path: Path) -> list[Problem]:
    return [
        Problem(text_of(row, "question", where=path), text_of(row, "answer", where=path))
        for row in read_records(path)
    ]


def _examples(options: TaskOptions) -> list[Problem]:
    if options.few_shot_data is not None:
        return _problems(options.few_shot_data)
    beside = options.path.with_name(options.path.name.replace("test", "train", 1))
    return _problems(beside) if beside != options.path and beside.is_file() else []

"""What a run asks to measure its student by tasks; the package ``evaluation`` answers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

from megatron.core.models.gpt import GPTModel

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import ConfigError
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training.trainer import Measurement, Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentToEvaluate:
    """A student between two steps."""

    chunk: GPTModel
    """This rank's part, not wrapped, as it trains."""

    shard: VocabShard
    tokenizer: MegatronTokenizerText
    groups: ProcessGroups

    max_length: int
    """Tokens that it reads at once."""


class Evaluator(Protocol):
    """Measures a student between steps; it leaves weights, modes and random states as they were."""

    def __call__(self, student: StudentToEvaluate) -> dict[str, float]:
        """``eval/TASK/METRIC``, the same on every rank; all ranks call it together."""


def measurement(
    trainer: Trainer, evaluator: Evaluator | None, tokenizer: MegatronTokenizerText
) -> Measurement | None:
    """What measures the student by the tasks of its configuration, if there are any.

    Args:
        tokenizer: The student's.

    Raises:
        ConfigError: There are, and nobody who asks them.
    """
    if not trainer.plan.evaluation.tasks:
        return None
    if evaluator is None:
        raise ConfigError(
            "nothing asks the tasks of this run",
            where="evaluation.tasks",
            expected="an evaluator, as megatron-ext distill has one",
            fix="pass one to distill, or leave the tasks out",
        )
    student = StudentToEvaluate(
        chunk=trainer.student.chunks[-1],
        shard=trainer.step.shard,
        tokenizer=tokenizer,
        groups=trainer.groups,
        max_length=trainer.plan.student.seq_length,
    )
    return partial(evaluator, student)

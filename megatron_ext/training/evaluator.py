"""The protocol for measuring the student by tasks, which ``evaluation`` implements."""

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
    """Longest sequence, in tokens."""


class Evaluator(Protocol):
    """Measures a student between steps; it leaves weights, modes and random states as they were."""

    def __call__(self, student: StudentToEvaluate) -> dict[str, float]:
        """``eval/TASK/METRIC``, the same on every rank; all ranks call it together."""


def measurement(
    trainer: Trainer, evaluator: Evaluator | None, tokenizer: MegatronTokenizerText
) -> Measurement | None:
    """The measurement of the student by the tasks of its configuration; None without tasks.

    Args:
        tokenizer: The student's.

    Raises:
        ConfigError: There are tasks, but no evaluator.
    """
    if not trainer.plan.evaluation.tasks:
        return None
    if evaluator is None:
        raise ConfigError(
            "there is no evaluator for the tasks of this run",
            where="evaluation.tasks",
            got=", ".join(trainer.plan.evaluation.tasks),
            expected="an evaluator, such as that of megatron-ext distill",
            fix="pass one to distill, or remove the tasks",
        )
    student = StudentToEvaluate(
        chunk=trainer.student.chunks[-1],
        shard=trainer.step.shard,
        tokenizer=tokenizer,
        groups=trainer.groups,
        max_length=trainer.plan.student.seq_length,
    )
    return partial(evaluator, student)

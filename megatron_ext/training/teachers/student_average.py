"""The moving average of a student's weights, which is the model of a teacher."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.models.gpt import GPTModel

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.training.megatron_models.learning_parts import add_adapters
from megatron_ext.training.megatron_models.models import build_model_chunks, chunk_names, freeze
from megatron_ext.training.run_plan import RunPlan, TeacherPlan


class StudentAverage:
    """Exponential moving average of this rank's part of a student (mean teacher, arXiv 1703.01780).

    Of each parameter ``w`` that learns, ``a = w`` at first and ``a <- decay a + (1 - decay) w``
    after each update of the student, in fp32 whatever the run's precision. Every layout cuts both
    alike, so no rank needs another's. Parameters that do not learn are the student's own tensors;
    buffers, such as the biases of experts, are copies of its current ones.

    Args:
        name: Name of the teacher.
        chunks: Chunks as the student's, whose weights are replaced.
        student: The student's chunks, with its first weights and the parts that learn chosen.
        decay: Share of the average that an update keeps, above 0 and below 1.
    """

    def __init__(
        self, name: str, chunks: Sequence[GPTModel], student: Sequence[GPTModel], *, decay: float
    ) -> None:
        self.name = name
        self.chunks = freeze(chunks)
        self._student = list(student)
        self._decay = decay
        self._means: list[dict[str, torch.Tensor]] = []
        """By chunk and name of a parameter that learns, fp32."""
        for own, its in zip(self.chunks, self._student, strict=True):
            of_student, means = dict(its.named_parameters()), {}
            for parameter_name, weight in own.named_parameters():
                source = of_student[parameter_name]
                if not source.requires_grad:
                    weight.data = source.data
                    continue
                weight.data.copy_(source.data)
                means[parameter_name] = weight.data.float()
            self._means.append(means)
        self._copy_buffers()

    @torch.no_grad()
    def update(self) -> None:
        """Take in the student's current weights; no collectives."""
        for means, own, its in zip(self._means, self.chunks, self._student, strict=True):
            weights, sources = dict(own.named_parameters()), dict(its.named_parameters())
            for name, mean in means.items():
                mean.lerp_(sources[name].detach().float(), 1 - self._decay)
                self._round(weights[name], mean)
        self._copy_buffers()

    def sharded_state(self) -> dict[str, Any]:
        """The averages for ``dist_checkpointing``, fp32, which fit any layout."""
        names = chunk_names(self.chunks)
        state: dict[str, dict[str, Any]] = {name: {} for name in names}
        with self._in_fp32():
            for name, chunk, means in zip(names, self.chunks, self._means, strict=True):
                for key, value in chunk.sharded_state_dict().items():
                    if key in means:
                        # The parameter itself, which holds its average in here alone.
                        value.data = value.data.detach()
                        state[name][key] = value
        add_prefix_for_sharding(state, f"averages.{self.name}.")
        return state

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over a loaded ``sharded_state``, after the student has taken over its own."""
        names = chunk_names(self.chunks)
        for name, chunk, means in zip(names, self.chunks, self._means, strict=True):
            weights = dict(chunk.named_parameters())
            for key, mean in means.items():
                mean.copy_(state[name][key])
                self._round(weights[key], mean)
        self._copy_buffers()

    @torch.no_grad()
    def _copy_buffers(self) -> None:
        for own, its in zip(self.chunks, self._student, strict=True):
            of_student = dict(its.named_buffers())
            for name, buffer in own.named_buffers():
                buffer.copy_(of_student[name])

    @staticmethod
    def _round(weight: torch.nn.Parameter, mean: torch.Tensor) -> None:
        """Give the model its average, in its precision; in fp32 they are one tensor."""
        if weight.data.data_ptr() != mean.data_ptr():
            weight.data.copy_(mean)

    @contextmanager
    def _in_fp32(self) -> Iterator[None]:
        """Have the model hold the averages themselves."""
        weights = [
            (weight, weight.data, means[name])
            for chunk, means in zip(self.chunks, self._means, strict=True)
            for name, weight in chunk.named_parameters()
            if name in means
        ]
        for weight, _, mean in weights:
            weight.data = mean
        try:
            yield
        finally:
            for weight, rounded, _ in weights:
                weight.data = rounded


def student_average(
    teacher: TeacherPlan,
    run: RunPlan,
    student: Sequence[GPTModel],
    groups: ProcessGroups,
    *,
    padded_vocab_size: int,
) -> StudentAverage:
    """Build the average of a student, before that is wrapped.

    Args:
        student: Its chunks, with its first weights.
        padded_vocab_size: Rows of its whole head.
    """
    assert teacher.config.ema_decay is not None
    chunks = build_model_chunks(
        teacher.config.model,
        padded_vocab_size=padded_vocab_size,
        parallel=run.parallel,
        training=run.training,
        groups=groups,
        is_loaded=True,
        has_adapters=run.lora is not None,
    )
    if run.lora is not None:
        add_adapters(chunks, run.lora, seed=run.training.seed)
    return StudentAverage(teacher.name, chunks, student, decay=teacher.config.ema_decay)

"""A megatron-core teacher on the student's own ranks. B batch, T tokens, Vp partition, D hidden."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import nn

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses.targets import TeacherTargets
from megatron_ext.teachers.base import Teacher, TokenInputs


class MegatronTeacher:
    """Runs megatron-core's forward-only schedule over a whole global batch.

    What stays on the last stage between the teacher's schedule and the student's is the final
    hidden states, D numbers a token; the loss turns them into this rank's logits one microbatch at
    a time.

    Args:
        chunks: This rank's part of the model, frozen, in the order in which a microbatch passes it;
            several under an interleaved pipeline.
        shard: This rank's columns of the teacher's vocabulary.
    """

    def __init__(self, chunks: Sequence[GPTModel], *, shard: VocabShard) -> None:
        self.chunks = list(chunks)
        self._shard = shard
        self._schedule = get_forward_backward_func()

    def targets(self, microbatches: Sequence[TokenInputs]) -> list[TeacherTargets]:
        """Hidden-state targets of each microbatch; see ``Teacher``.

        Collectives: the schedule's sends and receives between stages and each layer's own.
        """
        batch_size, length = microbatches[0].tokens.shape
        with torch.no_grad():
            hidden_states = self._schedule(
                forward_step_func=_hidden_states_step,
                data_iterator=[iter(microbatches) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=len(microbatches),
                # megatron-core divides the length of whole rows over context-parallel ranks.
                seq_length=length * self.chunks[0].config.context_parallel_size,
                micro_batch_size=batch_size,
                forward_only=True,
                collect_non_loss_data=True,
            )
        return [
            TeacherTargets(
                kind="hidden",
                shard=self._shard,
                hidden=hidden,
                head_weight=head_weight(self.chunks[-1]),
            )
            for hidden in hidden_states
        ]


def head_weight(gpt: GPTModel) -> torch.Tensor:
    """[Vp, D] of a last stage."""
    weight: torch.Tensor = (
        gpt.shared_embedding_or_output_weight()
        if gpt.share_embeddings_and_output_weights
        else gpt.output_layer.weight
    )
    return weight


def whole_sequence(hidden: torch.Tensor, gpt: GPTModel) -> torch.Tensor:
    """[T, B, D] of what a stage computed: under sequence parallelism a rank has a part of T.

    Collectives: one all-gather over the tensor-parallel group then. Backward: none, since every
    rank has the whole gradient.
    """
    if not gpt.config.sequence_parallel:
        return hidden
    whole: torch.Tensor = gather_from_sequence_parallel_region(
        hidden, tensor_parallel_output_grad=False
    )
    return whole


def _hidden_states_step(inputs: Iterator[TokenInputs], gpt: GPTModel) -> tuple[torch.Tensor, Any]:
    batch = next(inputs)
    # megatron-core returns the final hidden states where a stage has no head to apply.
    has_head, gpt.post_process = gpt.post_process, False
    try:
        hidden = gpt(batch.tokens, batch.position_ids, batch.attention_mask)
    finally:
        gpt.post_process = has_head
    return whole_sequence(hidden, gpt) if has_head else hidden, _batch_first


def _batch_first(hidden: torch.Tensor, *, non_loss_data: bool) -> torch.Tensor:
    """[T, B, D] of megatron-core to [B, T, D]."""
    return hidden.transpose(0, 1).contiguous()


class HostWeights:
    """Weights of frozen modules, on their device inside ``on_device`` and only there.

    They are copied to the host once, into pinned memory where there is a GPU; after that they only
    go from there to the device, since they never change. Buffers, which are small, stay.

    Args:
        modules: On their device.
        kept: Parameters that stay there, too.
    """

    def __init__(self, modules: Iterable[nn.Module], *, kept: Sequence[torch.Tensor] = ()) -> None:
        stays = {id(parameter) for parameter in kept}
        # By identity: tied ones are one parameter, in several modules or places.
        found = {id(p): p for module in modules for p in module.parameters()}
        self._parameters = [p for key, p in found.items() if key not in stays]
        self._host = [_on_host(parameter) for parameter in self._parameters]
        self._free()

    @property
    def bytes(self) -> int:
        """Of the weights, which is what is copied each time."""
        return sum(weights.nbytes for weights in self._host)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the weights on the device; the host does not wait for the copy.

        What is computed with them inside need not be finished at the end: their memory is given to
        whatever comes behind it on the same stream.
        """
        for parameter, weights in zip(self._parameters, self._host, strict=True):
            parameter.data = weights.to(parameter.device, non_blocking=True)
        try:
            yield
        finally:
            self._free()

    def _free(self) -> None:
        for parameter in self._parameters:
            parameter.data = parameter.data.new_empty(0)


class OffloadedTeacher:
    """A teacher that has its weights while it predicts.

    Args:
        teacher: It; what its targets hold is not among ``weights``.
        weights: Its own.
    """

    def __init__(self, teacher: Teacher, weights: HostWeights) -> None:
        self._teacher = teacher
        self.weights = weights

    def targets(self, microbatches: Sequence[TokenInputs]) -> list[TeacherTargets]:
        """Those of the teacher; see ``Teacher``."""
        with self.weights.on_device():
            return self._teacher.targets(microbatches)


def _on_host(parameter: torch.Tensor) -> torch.Tensor:
    """A copy to read from, or on a CPU the weights themselves."""
    weights = parameter.detach()
    if weights.device.type == "cpu":
        return weights
    host = torch.empty(weights.shape, dtype=weights.dtype, device="cpu", pin_memory=True)
    return host.copy_(weights)

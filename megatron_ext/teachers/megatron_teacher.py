"""A megatron-core teacher on the student's ranks, with its weights offloaded to the host if asked.

B rows, T tokens, Vp partition, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import nn

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses.targets import TeacherTargets
from megatron_ext.teachers.base import Teacher, TokenInputs

LOGIT_CAP: Final = "logit_cap"
"""Attribute of a ``GPTModel`` whose output layer caps logits."""


class MegatronTeacher:
    """A ``Teacher`` that runs megatron-core's forward-only schedule over a whole global batch.

    Between the teacher's schedule and the student's the last stage holds the final hidden states, D
    numbers a token; the loss turns them into this rank's logits one microbatch at a time.

    Args:
        chunks: This rank's frozen model chunks in pipeline order; several under an interleaved
            pipeline.
        shard: This rank's columns of the teacher's vocabulary.
        layers: Numbers from 1 of layers below the last whose states are targets, too; the same on
            every rank, ascending.
    """

    def __init__(
        self, chunks: Sequence[GPTModel], *, shard: VocabShard, layers: Sequence[int] = ()
    ) -> None:
        self.chunks = list(chunks)
        self._shard = shard
        self._schedule = get_forward_backward_func()
        self._states: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
        """[B, T, D] of each microbatch, of the layers of this stage."""
        for chunk in self.chunks:
            keep_states(chunk, layers, partial(self._keep, chunk))

    def targets(self, microbatches: Sequence[TokenInputs]) -> list[TeacherTargets]:
        """Hidden-state targets of each microbatch; see ``Teacher``.

        Collectives: the schedule's sends and receives between stages, and those of each layer. Of a
        layer on an earlier stage one send of [B, T, D] for each microbatch, to the last stage.
        """
        for states in self._states.values():
            states.clear()
        batch_size, length = microbatches[0].tokens.shape
        with torch.no_grad():
            hidden_states = self._schedule(
                forward_step_func=_hidden_states_step,
                data_iterator=[iter(microbatches) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=len(microbatches),
                # megatron-core divides the length of whole rows by the context-parallel size.
                seq_length=length * self.chunks[0].config.context_parallel_size,
                micro_batch_size=batch_size,
                forward_only=True,
                collect_non_loss_data=True,
            )
        by_layer = self._states_on_last_stage(hidden_states)
        return [
            TeacherTargets(
                kind="hidden",
                shard=self._shard,
                hidden=hidden,
                head_weight=head_weight(self.chunks[-1]),
                logit_cap=getattr(self.chunks[-1], LOGIT_CAP, None),
                states={layer: states[number] for layer, states in by_layer.items()},
            )
            for number, hidden in enumerate(hidden_states)
        ]

    def _keep(self, chunk: GPTModel, layer: int, hidden: torch.Tensor) -> None:
        self._states[layer].append(_batch_first(whole_sequence(hidden, chunk), non_loss_data=True))

    def _states_on_last_stage(
        self, hidden_states: Sequence[torch.Tensor]
    ) -> dict[int, list[torch.Tensor]]:
        """The kept states of every layer, on the last stage; empty on the others.

        Args:
            hidden_states: Last states of each microbatch, which have the same shapes.
        """
        group = parallel_state.get_pipeline_model_parallel_group()
        stages, stage = dist.get_world_size(group), dist.get_rank(group)
        last, layers_of_chunk = stages - 1, len(self.chunks[0].decoder.layers)
        gathered: dict[int, list[torch.Tensor]] = {}
        for layer, states in self._states.items():
            owner = (layer - 1) // layers_of_chunk % stages
            if owner == last:
                gathered[layer] = list(states)
            elif stage == owner:
                for hidden in states:
                    dist.send(hidden, dist.get_global_rank(group, last), group=group)
            elif stage == last:
                gathered[layer] = [torch.empty_like(hidden) for hidden in hidden_states]
                for hidden in gathered[layer]:
                    dist.recv(hidden, dist.get_global_rank(group, owner), group=group)
            states.clear()
        return gathered if stage == last else {}


def keep_states(
    gpt: GPTModel, layers: Collection[int], keep: Callable[[int, torch.Tensor], None]
) -> None:
    """Have ``keep`` called with the number and the output [T, B, D] of each of ``layers`` that a
    chunk has, in every forward pass."""

    def hook(layer: Any, _: Any, output: Any) -> None:
        keep(layer.layer_number, output[0] if isinstance(output, tuple) else output)

    for layer in gpt.decoder.layers if layers else ():
        if layer.layer_number in layers:
            layer.register_forward_hook(hook)


def unwrapped(model: Any) -> GPTModel:
    """The chunk in what DDP and the like have wrapped around it."""
    while not isinstance(model, GPTModel):
        model = model.module
    return model


@contextmanager
def without_head(model: Any) -> Iterator[None]:
    """Make a chunk return its last hidden states while entered, as one without a head does."""
    gpt = unwrapped(model)
    has_head, gpt.post_process = gpt.post_process, False
    try:
        yield
    finally:
        gpt.post_process = has_head


def head_weight(gpt: GPTModel) -> torch.Tensor:
    """[Vp, D] output weight of a last stage."""
    weight: torch.Tensor = (
        gpt.shared_embedding_or_output_weight()
        if gpt.share_embeddings_and_output_weights
        else gpt.output_layer.weight
    )
    return weight


def whole_sequence(hidden: torch.Tensor, gpt: GPTModel) -> torch.Tensor:
    """[T, B, D] outputs of a stage, gathered over T under sequence parallelism.

    Collectives: under sequence parallelism one all-gather over the tensor-parallel group. Backward:
    none, since every rank has the whole gradient.
    """
    if not gpt.config.sequence_parallel:
        return hidden
    whole: torch.Tensor = gather_from_sequence_parallel_region(
        hidden, tensor_parallel_output_grad=False
    )
    return whole


def _hidden_states_step(inputs: Iterator[TokenInputs], gpt: GPTModel) -> tuple[torch.Tensor, Any]:
    batch = next(inputs)
    with without_head(gpt):
        hidden = gpt(batch.tokens, batch.position_ids, batch.attention_mask)
    return whole_sequence(hidden, gpt) if gpt.post_process else hidden, _batch_first


def _batch_first(hidden: torch.Tensor, *, non_loss_data: bool) -> torch.Tensor:
    """Transpose megatron-core's [T, B, D] to [B, T, D]."""
    return hidden.transpose(0, 1).contiguous()


class HostWeights:
    """Weights of frozen modules, offloaded to the host except within ``on_device``.

    They are copied to the host once, into pinned memory if there is a GPU, and from then on only to
    the device, since they never change. Buffers are small and stay on the device.

    Args:
        modules: Modules on their device.
        kept: Parameters that stay on the device.
    """

    def __init__(self, modules: Iterable[nn.Module], *, kept: Sequence[torch.Tensor] = ()) -> None:
        stays = {id(parameter) for parameter in kept}
        # By identity: a tied parameter occurs in several modules or places.
        parameters = {id(p): p for module in modules for p in module.parameters()}
        self._parameters = [p for key, p in parameters.items() if key not in stays]
        self._host = [_on_host(parameter) for parameter in self._parameters]
        self._free()

    @property
    def bytes(self) -> int:
        """Bytes of the weights, copied on each use."""
        return sum(weights.nbytes for weights in self._host)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Context in which the weights are on the device; the copy is asynchronous.

        Kernels launched inside need not be finished at the end: the freed memory is reused only by
        later work on the same stream.
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
    """A teacher whose weights are on the device only while it predicts.

    Args:
        teacher: The teacher; its targets must not refer to ``weights``.
        weights: Weights of the teacher.
    """

    def __init__(self, teacher: Teacher, weights: HostWeights) -> None:
        self._teacher = teacher
        self.weights = weights

    def targets(self, microbatches: Sequence[TokenInputs]) -> list[TeacherTargets]:
        """Targets of the teacher; see ``Teacher``."""
        with self.weights.on_device():
            return self._teacher.targets(microbatches)


def _on_host(parameter: torch.Tensor) -> torch.Tensor:
    """A host copy of a parameter; the parameter itself if it is on a CPU."""
    weights = parameter.detach()
    if weights.device.type == "cpu":
        return weights
    host = torch.empty(weights.shape, dtype=weights.dtype, device="cpu", pin_memory=True)
    return host.copy_(weights)

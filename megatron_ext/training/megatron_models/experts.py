"""Layers of experts: routers with losses and loads of a global batch, and experts that a layout
does not change.

E experts, K of them for a token, T positions and B rows of a microbatch, N tokens of the global
batch without padding. Of the logits ``x`` of a token the losses of one layer are

    z-loss            1 / N sum_t logsumexp(x_t)^2                                (arXiv 2202.08906)
    load balancing    1 / N sum_r n_r E sum_i (c_ri / (K n_r)) (s_ri / n_r)       (arXiv 2101.03961)

with ``n_r`` the tokens of row ``r``, ``c_ri`` those of them that expert ``i`` is chosen for, and
``s_ri`` the sum of its scores over the row, a softmax over all experts. Both are sums over rows
divided by one number, so no layout, microbatch or padding changes them. megatron-core 0.16 takes
the second over each microbatch (``aux_loss``), and where losses arrive divided by their counts, as
ours do, multiplies either by the tokens of one rank; so both fall by the number of tensor- and
context-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch.nn import functional

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.teachers.megatron_teacher import unwrapped
from megatron_ext.training.megatron_models.layers import RowLinear
from megatron_ext.training.microbatch import Microbatch


class Router(TopKRouter):  # type: ignore[misc]
    """megatron-core's router, with the losses above, and loads of the tokens that it trains on.

    Neither losses nor loads come from a model in evaluation mode or from a pass without gradients.
    A router whose weights are frozen measures both, but its losses have no gradient, which would
    change the layers below it instead, and its bias stays.

    Args:
        config: Configuration of the model.
        pg_collection: Process groups of the layer.
        has_bias: Whether experts have a bias when they are chosen.
        bias_update_rate: Step of that bias; None where it stays as it is.
        of_later_releases: What releases after 0.16 give.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        has_bias: bool = False,
        bias_update_rate: float | None = None,
        **of_later_releases: Any,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection, **of_later_releases)
        self.bias_update_rate = bias_update_rate
        if has_bias:
            # Not megatron-core's flag, which moves the bias before the gradient is known.
            del self.expert_bias
            self.register_buffer("expert_bias", torch.zeros(config.num_moe_experts))
        self.token_count: torch.Tensor | None = None
        """N, fp32; None before the first step."""

        self.load = torch.zeros(0)
        """[E + 2] fp64 of the step: tokens of each expert, and both losses times N."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Logits [T, B, E] of hidden states [T, B, D], in fp32: in bf16, logits a few bits apart
        would choose other experts.

        megatron-core 0.16's own cannot do without Transformer Engine.
        """
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(input.float(), self.weight.float(), bias)

    @property
    def learns(self) -> bool:
        """Whether this pass is one of a training step."""
        return self.training and torch.is_grad_enabled() and self.token_count is not None

    def begin(self, token_count: torch.Tensor) -> None:
        """Begin a step over ``token_count`` tokens."""
        self.token_count = token_count
        self.load = torch.zeros(
            self.num_experts + 2, dtype=torch.float64, device=token_count.device
        )

    def apply_z_loss(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``logits`` [T B, E], with the gradient of the z-loss."""
        if not (self.learns and self.config.moe_z_loss_coeff):
            return logits
        squares = torch.logsumexp(logits.float(), dim=-1).square()
        if padding_mask is not None:
            squares = squares.masked_fill(padding_mask, 0.0)
        return self._with_loss(logits, squares.sum(), self.config.moe_z_loss_coeff, place=-1)

    def _apply_seq_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """``probs`` with the gradient of the load-balancing loss.

        One all-reduce of [B, E] over the ranks that share the rows.
        """
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        if not (self.learns and coefficient):
            return probs
        chosen = routing_map.view(seq_length, bsz, -1).sum(dim=0).to(torch.float32)
        dist.all_reduce(chosen, group=self.tp_cp_group)
        scores = scores_for_aux_loss.view(seq_length, bsz, -1).sum(dim=0)
        # K n_r is the sum of the row's choices; a row of padding has none, and no scores.
        in_row = chosen.sum(dim=1).clamp(min=1.0)
        loss = ((chosen * scores).sum(dim=1) / in_row).sum() * self.num_experts
        return self._with_loss(probs, loss, coefficient, place=-2)

    def _with_loss(
        self, carrier: torch.Tensor, loss: torch.Tensor, coefficient: float, *, place: int
    ) -> torch.Tensor:
        assert self.token_count is not None
        self.load[place] += loss.detach()
        if not self.weight.requires_grad:
            return carrier
        carried: torch.Tensor = MoEAuxLossAutoScaler.apply(
            carrier, loss * (coefficient / self.token_count)
        )
        return carried

    def _apply_expert_bias(
        self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> None:
        """Count the tokens of every expert."""
        if not self.learns:
            return
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask.unsqueeze(-1)
        self.load[:-2] += routing_map.sum(dim=0)

    def update_bias(self) -> None:
        """Move the bias by the load of the step, which ``loads`` has summed over all ranks."""
        if self.bias_update_rate is not None and self.weight.requires_grad:
            tokens = self.load[:-2]
            step = self.bias_update_rate * torch.sign(tokens.mean() - tokens)
            self.expert_bias += step.to(self.expert_bias)


class ExpertRowLinear(RowLinear):
    """The second matrix of an expert, whose bias every rank that shares the expert has.

    The ranks' outputs are summed with their share of the bias, of which each has the whole
    gradient: the tokens of all of them. megatron-core adds it once for each rank, and sums its
    gradient over tensor-parallel ranks as if these were the replicas of an expert.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.bias is None:
            return
        self.bias.sequence_parallel = False
        # Outputs are summed by the dispatcher; a sum over one rank would forbid adding to it.
        self.explicit_expert_comm = True
        if self.tp_group.rank() == 0:
            # Counted once in the norm of the gradient, whichever tensor-parallel rank this is.
            set_tensor_model_parallel_attributes(self.bias, True, 0, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[N, D] of this rank's part of the inner width, and its share of the bias."""
        output, bias = super().forward(x)
        if bias is not None:
            bias = bias.detach() / self.tp_group.size() + (bias - bias.detach())
        return output, bias


class Experts(SequentialMLP):  # type: ignore[misc]
    """megatron-core's experts one after the other, each with first weights of its own.

    They are drawn whole by the number of the expert, and cut, so that a layout does not change
    them; megatron-core draws the same for the first expert of every rank.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: ProcessGroupCollection,
        **of_later_releases: Any,
    ) -> None:
        super().__init__(0, config, submodules, pg_collection, **of_later_releases)
        self.num_local_experts = num_local_experts
        first = pg_collection.ep.rank() * num_local_experts
        seed = int(torch.randint(1 << 40, (), device="cpu"))
        for number in range(first, first + num_local_experts):
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed + number)
                self.local_experts.append(
                    MLP(
                        self.config,
                        submodules,
                        ffn_hidden_size=config.moe_ffn_hidden_size,
                        is_expert=True,
                        tp_group=pg_collection.expt_tp,
                    )
                )


def routers(chunks: Sequence[GPTModel]) -> Iterator[Router]:
    """Routers of a model's chunks; none in a dense model."""
    for chunk in chunks:
        # Asked for at every step: a dense model has thousands of modules, and none of these.
        if chunk.config.num_moe_experts is not None:
            yield from (module for module in chunk.modules() if isinstance(module, Router))


def sum_over_replicas(chunk: GPTModel) -> None:
    """Have gradients of experts summed over the replicas of the experts.

    megatron-core sums them over those of the model where one rank has all experts, which are others
    where an expert has other ranks than the layers around it.
    """
    for module in chunk.modules():
        if isinstance(module, MoELayer):
            for weight in module.experts.parameters():
                weight.allreduce = False


def begin_step(
    chunks: Sequence[GPTModel], batches: Sequence[Microbatch], groups: ProcessGroups
) -> None:
    """Give the student's routers the tokens of a global batch; with experts one all-reduce over
    ``dp``."""
    of_chunks = list(routers(chunks))
    if not of_chunks:
        return
    count = torch.stack([batch.sides.student.lengths.sum() for batch in batches]).sum()
    count = count.to(groups.device, torch.float32)
    dist.all_reduce(count, group=groups.dp)
    for router in of_chunks:
        router.begin(count.clamp(min=1.0))


def loads(chunks: Sequence[GPTModel], layers: int) -> Mapping[str, float]:
    """Metrics of the routers of all layers, the same on every rank; empty for a dense model.

    ``max_load`` and ``min_load`` are the tokens of the busiest and of the idlest expert of any
    layer, in multiples of the mean of its layer; losses are means over layers, without their
    coefficients. One all-reduce over all ranks, after which routers know the loads of the batch.

    Args:
        chunks: This rank's part of the student.
        layers: Layers of the whole student, dense ones included.
    """
    of_chunks = list(routers(chunks))
    if not of_chunks:
        return {}
    first = of_chunks[0]
    summed = first.load.new_zeros(layers, len(first.load))
    for router in of_chunks:
        summed[router.layer_number - 1] = router.load
    dist.all_reduce(summed)
    for router in of_chunks:
        router.load = summed[router.layer_number - 1]
    frequency = first.config.moe_layer_freq
    summed = summed[frequency.index(1) if isinstance(frequency, list) else 0 :]
    assert first.token_count is not None
    tokens = summed[:, :-2]
    relative = tokens / tokens.mean(dim=1, keepdim=True).clamp(min=1.0)
    losses = summed[:, -2:].mean(dim=0) / first.token_count
    most, least, balance, z_loss = torch.stack([relative.max(), relative.min(), *losses]).tolist()
    metrics = {"experts/max_load": most, "experts/min_load": least}
    if first.get_aux_loss_coeff("seq_aux_loss"):
        metrics["experts/load_balancing_loss"] = balance
    if first.config.moe_z_loss_coeff:
        metrics["experts/z_loss"] = z_loss
    return metrics


def update_biases(chunks: Sequence[GPTModel]) -> None:
    """Move the experts' biases after a step, by the loads that ``loads`` has summed."""
    for router in routers(chunks):
        router.update_bias()


def padding_options(batch: Microbatch, model: Any) -> dict[str, torch.Tensor]:
    """The student's mask of padding, as a ``GPTModel`` with experts takes it; {} for a dense one.

    [B, S] bool, True in the padding of a row, of this rank's part of the rows. Behind the first
    stage it is also cut as sequence parallelism cuts hidden states, which megatron-core 0.16 does
    on the first stage alone.
    """
    gpt = unwrapped(model)
    if gpt.config.num_moe_experts is None:
        return {}
    lengths = batch.sides.student.lengths
    positions = torch.arange(batch.row_length, device=lengths.device)
    mask = positions >= lengths[:, None]
    if batch.context is not None:
        mask = batch.context.cut(mask)
    if gpt.config.sequence_parallel and not gpt.pre_process:
        group = gpt.pg_collection.tp
        mask = mask.chunk(group.size(), dim=1)[group.rank()].contiguous()
    return {"padding_mask": mask}

"""The model that is trained, with its optimizer and learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_ext.training.checkpoints.optimizer_state import load_optimizer, sharded_optimizer
from megatron_ext.training.forward_step import StepReport
from megatron_ext.training.megatron_models.megatron_parts import needed
from megatron_ext.training.megatron_models.models import (
    ModelChunks,
    load_weights_of,
    sharded_weights,
    wrap_in_ddp,
)
from megatron_ext.training.microbatch import MicrobatchWithTargets
from megatron_ext.training.run_plan import RunPlan
from megatron_ext.training.teachers.student_average import StudentAverage
from megatron_ext.training.vocabulary_layout import VocabularyRows


def update_if_finite(optimizer: MegatronOptimizer) -> float:
    """Clip and step as ``ChainedOptimizer.step`` does, if the gradient is finite.

    Where it is not, nothing changes: megatron-core's own step would have written NaN into the
    weights by the time it returns the norm.

    Returns:
        The global gradient norm before clipping.

    Collectives: those of ``MegatronOptimizer.get_grad_norm``, and those of the step, which every
    rank makes or none, because all of them have the same norm.
    """
    if optimizer.prepare_grads():
        return math.inf
    if needed("l2_norm").value is needed("slow_l2_norm").value:
        # megatron-core's stand-in for Apex, whose norms the host reads one by one.
        needed("l2_norm").put(_l2_norm)
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        return norm
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        parameters = inner.get_parameters()
        if parameters and inner.config.clip_grad > 0.0:
            needed("clip_by_norm").value(
                parameters,
                max_norm=inner.config.clip_grad,
                total_norm=norm,
                use_decoupled_grad=inner.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
    optimizer.step_with_ready_grads()
    return norm


def _l2_norm(
    chunk_size: int, overflow: torch.Tensor, lists: Sequence[Sequence[torch.Tensor]], *_: Any
) -> tuple[torch.Tensor, None]:
    """Norm [1] fp32 of all tensors; ``amp_C.multi_tensor_l2norm``."""
    norms = [torch.norm(tensor) for tensors in lists for tensor in tensors]
    return torch.norm(torch.stack(norms).float())[None], None


ForwardStep = Callable[[Iterator[MicrobatchWithTargets], Any], tuple[torch.Tensor, Any]]
"""A ``forward_step_func`` of megatron-core's schedules over microbatches: a ``StudentStep``."""


class Student:
    """megatron-core's DDP, optimizer and scheduler around this rank's part of the student.

    Args:
        chunks: The student's chunks on this rank, in the order in which a microbatch passes them.
        plan: The run.
        rows: Permutation of the head's rows, which checkpoints undo; None where there is none.
        averages: Averages of its weights, which checkpoints include.
    """

    def __init__(
        self,
        chunks: ModelChunks,
        plan: RunPlan,
        *,
        rows: VocabularyRows | None = None,
        averages: Sequence[StudentAverage] = (),
    ) -> None:
        self.chunks = list(chunks)
        self.averages = averages
        self._rows = rows
        self._gathers_late = plan.parallel.overlap_param_gather
        self.ddp = wrap_in_ddp(chunks, parallel=plan.parallel)
        self.optimizer = get_megatron_optimizer(
            _optimizer_config(plan), self.ddp, use_gloo_process_groups=False
        )
        self.scheduler = _scheduler(self.optimizer, plan)
        self._schedule = get_forward_backward_func()
        # megatron-core's schedules read the settings of all chunks from the first.
        schedule_config = self.chunks[0].config
        schedule_config.finalize_model_grads_func = _finalize_sums
        no_syncs = [ddp.no_sync for ddp in self.ddp]
        schedule_config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
        schedule_config.grad_scale_func = self.optimizer.scale_loss

    def forward_backward(
        self, step: ForwardStep, microbatches: Sequence[MicrobatchWithTargets]
    ) -> list[StepReport]:
        """Accumulate the gradient of one global batch.

        Returns:
            Reports of the microbatches on the last stage, [] on the others.
        """
        for ddp in self.ddp:
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        first = microbatches[0].batch
        return list(
            self._schedule(
                forward_step_func=step,
                data_iterator=[iter(microbatches) for _ in self.ddp],
                model=self.ddp,
                num_microbatches=len(microbatches),
                # megatron-core divides the length of whole rows over context-parallel ranks.
                seq_length=first.row_length,
                micro_batch_size=len(first.student.tokens),
                forward_only=False,
            )
        )

    def update(self) -> float:
        """Clip, step and move the learning rate, unless the gradient is not finite.

        Returns:
            The global gradient norm before clipping, the same on every rank.
        """
        grad_norm = update_if_finite(self.optimizer)
        if math.isfinite(grad_norm):
            self.scheduler.step(increment=1)
        return grad_norm

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return float(self.optimizer.param_groups[0]["lr"])

    def sharded_state(self, *, is_loading: bool = False) -> dict[str, Any]:
        """Weights, optimizer and scheduler for ``dist_checkpointing``, rows in the order of ids.

        Collectives: with ``overlap_param_gather`` the all-gather of the last update.
        """
        if self._gathers_late and not is_loading:
            for ddp in self.ddp:
                ddp.start_param_sync(force_sync=True)
        weights = sharded_weights(self.chunks)
        if self._rows is not None:
            weights = {
                name: self._rows.in_order_of_ids(chunk, weights[name], is_loading=is_loading)
                for name, chunk in zip(weights, self.chunks, strict=True)
            }
        return {
            **weights,
            "optimizer": sharded_optimizer(self.optimizer, weights, is_loading=is_loading),
            "scheduler": self.scheduler.state_dict(),
            **{f"average_{average.name}": average.sharded_state() for average in self.averages},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over a loaded ``sharded_state``."""
        load_weights_of(self.chunks, state)
        load_optimizer(self.optimizer, state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        for average in self.averages:
            average.load_state(state[f"average_{average.name}"])


def _finalize_sums(
    model: list[Any], num_tokens: torch.Tensor | None = None, **groups_and_flags: Any
) -> None:
    """megatron-core's gradient reductions without its division: our losses are divided already."""
    finalize_model_grads(model, None, **groups_and_flags)


def _optimizer_config(plan: RunPlan) -> MegatronOptimizerConfig:
    optimizer = plan.optimizer
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_eps=optimizer.adam_eps,
        clip_grad=optimizer.clip_grad,
        bf16=plan.training.precision == "bf16",
        use_distributed_optimizer=plan.parallel.use_distributed_optimizer,
        overlap_param_gather=plan.parallel.overlap_param_gather,
    )


def _scheduler(optimizer: Any, plan: RunPlan) -> OptimizerParamScheduler:
    """Counted in iterations; a resumed run follows the schedule of its own configuration."""
    settings, train_iters = plan.optimizer, plan.training.train_iters
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_iters,
        lr_decay_steps=train_iters,
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=train_iters,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )

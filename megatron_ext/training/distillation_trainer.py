"""``DistillationTrainer``: ``transformers.Trainer`` with the loss of a run, without Megatron.

Imports transformers, whose trainers need accelerate, too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from megatron_ext.errors import ConfigError
from megatron_ext.imports import needed_packages
from megatron_ext.training.cross_tokenizer_loss import CrossTokenizerLoss, MeasuredLoss

with needed_packages("DistillationTrainer"):
    from transformers import Trainer

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class DistillationMixin(_Base):
    """Distillation for ``transformers.Trainer`` and what derives from it.

    ``class DistillationSFTTrainer(DistillationMixin, SFTTrainer)`` distils under TRL's; give that
    ``dataset_kwargs={"skip_prepare_dataset": True}``, since ``loss.collator`` tokenizes.

    The loss of a step is that of its global batch: sums over all microbatches and processes, each
    divided once by its own count. So it does not depend on ``gradient_accumulation_steps``, nor on
    the number of processes. Logs have ``kd``, ``ce`` and what the objective measures, with the
    prefix ``eval_`` in an evaluation; one that counted nothing is left out.

    Both models are called with ``input_ids`` and ``position_ids``, which begin at 0 in each text of
    a packed row, and without a mask: transformers keeps texts apart by their positions.

    Args:
        teacher: The teacher's model; it is put into evaluation mode, without gradients, on the
            trainer's device.
        loss: The loss, with the tokenizers of both models.
        teacher_name: Name of the teacher in batches of several.
        arguments: Those of the trainer. ``data_collator`` is ``loss.collator.tensors`` unless it
            is given; ``args`` is copied, with ``remove_unused_columns`` off.

    Raises:
        ConfigError: An argument of the trainer that has no effect on this loss.
    """

    def __init__(
        self,
        *arguments: Any,
        teacher: torch.nn.Module,
        loss: CrossTokenizerLoss,
        teacher_name: str | None = None,
        **options: Any,
    ) -> None:
        if arguments[1:]:
            raise ConfigError(
                "only the model is given by its place",
                got=f"{len(arguments)} arguments",
                fix="name the others: args=..., train_dataset=...",
            )
        options.setdefault("data_collator", loss.collator.tensors)
        args = options.get("args")
        if args is not None:
            _check(args, options)
            options["args"] = copy.copy(args)
            options["args"].remove_unused_columns = False
        super().__init__(*arguments, **options)
        if args is None:
            self.args.remove_unused_columns = False
        self.label_names = ["shift_labels"]
        # The loss is divided by the counts of the whole step.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self.teacher = teacher.eval().requires_grad_(False).to(self.args.device)
        self.distillation_loss = loss
        self.teacher_name = teacher_name
        self._measured: dict[bool, dict[str, torch.Tensor]] = {True: {}, False: {}}

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> Any:
        """The batches of a step, and the counts of the terms of its loss over all processes.

        Collectives: one all-reduce of int64 [2].
        """
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        counted = [self.distillation_loss.counts(b, teacher=self.teacher_name) for b in batches]
        if not counted:
            return batches, None
        totals = torch.stack([torch.stack([c["kd"], c["ce"]]) for c in counted]).sum(dim=0)
        kd, ce = self.accelerator.reduce(totals.to(device), "sum").unbind()
        return batches, {"kd": kd, "ce": ce}

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """This microbatch's share of the step's loss, scaled for gradients that are averaged over
        processes; without counts, as in an evaluation, the mean over the batch."""
        teacher = self._teacher_inputs(inputs)
        outputs = model(
            input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False
        )
        with torch.no_grad():
            targets = self.teacher(**teacher, use_cache=False).logits
        measured = self.distillation_loss.measured(
            outputs.logits, targets, inputs, teacher=self.teacher_name, counts=num_items_in_batch
        )
        self._add(measured, is_training=model.training)
        loss = measured.loss
        if num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, None, None]:
        """The loss of a batch of an evaluation; logits are not kept."""
        prepared = self._prepare_inputs(dict(inputs))
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, prepared)
        return loss.detach(), None, None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log with the means of the metrics since the last time.

        Collectives: one gather of objects over all processes, where there are metrics to log.
        """
        prefix = _prefix(logs)
        if prefix is not None:
            # In place: an evaluation returns them, and the best model is chosen by one.
            logs |= {f"{prefix}{name}": mean for name, mean in self._means(not prefix)}
        super().log(logs, start_time)

    def _means(self, is_training: bool) -> Iterator[tuple[str, float]]:
        from accelerate.utils import gather_object

        measured, self._measured[is_training] = self._measured[is_training], {}
        own = {name: value.tolist() for name, value in measured.items()}
        totals: dict[str, list[float]] = {}
        for of_process in gather_object([own]):
            for name, (total, count) in of_process.items():
                sums = totals.setdefault(name, [0.0, 0.0])
                sums[0] += total
                sums[1] += count
        return iter((name, total / count) for name, (total, count) in totals.items() if count)

    def _add(self, measured: MeasuredLoss, *, is_training: bool) -> None:
        sums = self._measured[is_training]
        for name, (total, count) in measured.metrics.items():
            # fp64 where the device has it: counts of many steps are added up.
            dtype = torch.float32 if total.device.type == "mps" else torch.float64
            pair = torch.stack([total.detach().to(dtype), count.to(dtype)])
            sums[name] = sums[name] + pair if name in sums else pair

    def _teacher_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Ids and positions of the teacher's rows; the student's where it has its tokenizer."""
        names = [
            name.removeprefix("teachers.").removesuffix(".input_ids")
            for name in inputs
            if name.startswith("teachers.") and name.endswith(".input_ids")
        ]
        name = self.teacher_name or (names[0] if names else None)
        prefix = f"teachers.{name}." if name in names else ""
        return {key: inputs[f"{prefix}{key}"] for key in ("input_ids", "position_ids")}


class DistillationTrainer(DistillationMixin, Trainer):
    """``transformers.Trainer`` of a student that learns from a teacher with another tokenizer."""

    __doc__ = f"{__doc__}\n\n    {DistillationMixin.__doc__}"


def _check(args: Any, options: Mapping[str, Any]) -> None:
    ignored = {
        "label_smoothing_factor": bool(getattr(args, "label_smoothing_factor", 0)),
        "compute_loss_func": options.get("compute_loss_func") is not None,
        "compute_metrics": options.get("compute_metrics") is not None,
    }
    for name, is_set in ignored.items():
        if is_set:
            raise ConfigError(
                "the trainer's loss is that of the distillation, and keeps no predictions",
                got=f"{name} is set",
                fix=f"leave {name} out",
                where="DistillationTrainer",
            )
    if getattr(args, "n_gpu", 1) > 1:
        raise ConfigError(
            "one process cannot train on several GPUs here",
            got=f"{args.n_gpu} GPUs",
            fix="start a process for each: torchrun or accelerate launch; or set"
            " CUDA_VISIBLE_DEVICES",
            where="DistillationTrainer",
        )


def _prefix(logs: Mapping[str, float]) -> str | None:
    """Prefix of the names of an evaluation's metrics, empty in training; None for other logs."""
    if "loss" in logs:
        return ""
    ending = "_loss"
    named = [key[: -len(ending)] for key in logs if key.endswith(ending) and key != "train_loss"]
    return f"{named[0]}_" if named else None

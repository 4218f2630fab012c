"""Whether what teachers elsewhere send is what a run reads; before any model is built."""

from __future__ import annotations

from megatron_ext.training.config import DistillConfig
from megatron_ext.training.inputs import Inputs
from megatron_ext.training.loss_check import teacher_objective
from megatron_ext.training.serving.served_targets import served_form
from megatron_ext.training.teacher_cache.accepted_forms import check_targets


def check_served(config: DistillConfig, inputs: Inputs) -> None:
    """Check the form of each teacher elsewhere.

    Raises:
        ConfigError: An objective, or how teachers are combined, needs more than it sends.
    """
    for name, teacher in config.named_teachers.items():
        if teacher.is_elsewhere:
            form = served_form(config, name, inputs.teachers[name].tokenizer)
            objective = teacher_objective(config, name)
            check_targets(config, name, objective, form, key="serving.targets")

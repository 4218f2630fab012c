"""What of a run cannot be over context-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ext.errors import ConfigError
from megatron_ext.losses import Objective
from megatron_ext.training.config import DistillConfig


def check_context_parallel(config: DistillConfig, objectives: Mapping[str, Objective]) -> None:
    """Check that the loss can be made of parts of sequences.

    Args:
        objectives: By teacher.

    Raises:
        ConfigError: It cannot.
    """
    size = config.parallel.context_parallel_size
    if size == 1:
        return
    if config.loss.linear:
        raise ConfigError(
            "the linear form needs whole sequences, which context-parallel ranks have not",
            where="loss.linear",
            got=f"true, with parallel.context_parallel_size {size}",
            fix="set one of them back",
        )
    for name, objective in objectives.items():
        why = objective.why_no_context_parallel
        if why is not None:
            own = config.loss.of_teacher(config.named_teachers[name])
            raise ConfigError(
                f"the objective {own.objective} needs whole sequences so, which "
                "context-parallel ranks have not",
                where=f"{config.section_of(name)}.options"
                if config.named_teachers[name].options
                else "loss.options",
                got=f"{why}, with parallel.context_parallel_size {size}",
                fix="leave the option out, or set parallel.context_parallel_size to 1",
            )

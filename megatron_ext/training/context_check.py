"""What of a run cannot be over context-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from megatron_ext.errors import ConfigError
from megatron_ext.losses import AlmLoss, Objective, ULDLoss
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
        for needs_whole, why in _WHOLE:
            if needs_whole(objective):
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


_WHOLE: Final[tuple[tuple[Callable[[Objective], bool], str], ...]] = (
    (
        lambda objective: isinstance(objective, AlmLoss) and objective.merge != "none",
        "merge, of chunks that can be two ranks'",
    ),
    (
        lambda objective: isinstance(objective, ULDLoss) and objective.alignment == "position",
        "alignment position, which counts along a sample",
    ),
    (
        lambda objective: getattr(objective, "numerics", "proper") == "nemo",
        "numerics nemo, which choose columns for a microbatch",
    ),
)
"""Which objectives are no sum over chunks of what their rows, and the row after each, say."""

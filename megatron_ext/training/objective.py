"""The objective that a run names: its options, checked, and what it reads besides the logits.

A run has no other code for an objective than its row in ``_NEEDS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from megatron_ext.errors import ConfigError, LossError
from megatron_ext.losses import (
    LOSS_REGISTRY,
    AlmLoss,
    DskdLoss,
    DskdProjectors,
    GoldLoss,
    MinedLoss,
    Objective,
    PartitionKLLoss,
    ProjectedKLLoss,
    StrictTopKLoss,
    ULDLoss,
    VocabKLLoss,
)
from megatron_ext.losses.combining.cross_tokenizer import what_it_sums_over
from megatron_ext.losses.count_ahead import Over
from megatron_ext.projection.building.options import ProjectionMethod
from megatron_ext.training.config import LossConfig
from megatron_ext.training.config_file import build_config

_PROJECTORS: Final = "projectors"
PROJECTOR_STARTS: Final = ("random", "heads")
"""Values of the option ``projectors`` of ``dskd``: from the run's seed, or by pseudo-inverses of
the models' heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What an objective reads that does not follow from logits, labels and alignment."""

    projection: ProjectionMethod | None = None
    """How the projection is built, where the run is not given one; None: it needs none."""

    shard: bool = False
    """The projection itself."""

    match: bool = False
    """The tokens that both vocabularies have, by the projection."""

    min_share: float | None = None
    """Least share of a token in the match, see ``SparseProjection.partition``."""

    boundary: bool = False
    """The tokens that begin a word."""

    completions: bool = False
    """What both models can say in each chunk."""

    hidden: bool = False
    """The student's last hidden states and head."""

    same_tokenizer: bool = False
    """A teacher that reads the student's tokens."""


_PROJECTED: Final = Needs(projection="retokenized", shard=True)
_MATCHED: Final = Needs(projection="retokenized", match=True)

_NEEDS: Final[Mapping[Callable[..., Any], Callable[[Any], Needs]]] = {
    ProjectedKLLoss: lambda objective: _PROJECTED,
    VocabKLLoss: lambda objective: Needs(same_tokenizer=True),
    ULDLoss: lambda objective: Needs(),
    AlmLoss: lambda objective: Needs(boundary=objective.debias or objective.merge != "none"),
    MinedLoss: lambda objective: Needs(projection="mined", shard=True),
    StrictTopKLoss: lambda objective: _MATCHED,
    PartitionKLLoss: lambda objective: Needs(
        projection="retokenized", match=True, completions=True
    ),
    # Projectors that start from the heads match tokens as well.
    DskdLoss: lambda objective: Needs(projection="retokenized", match=True, hidden=True),
    GoldLoss: lambda objective: Needs(
        projection="retokenized", match=True, min_share=getattr(objective, "min_share", None)
    ),
}


def needs_of(objective: Objective) -> Needs:
    """What ``objective`` reads; of one that is not known here, projection and match."""
    for kind in type(objective).__mro__:
        if kind in _NEEDS:
            return _NEEDS[kind](objective)
    return Needs(projection="retokenized", shard=True, match=True)


def make_objective(
    loss: LossConfig, projectors: DskdProjectors | None = None, *, section: str = "loss"
) -> Objective:
    """The objective of ``loss`` with its options.

    Args:
        projectors: Those of ``dskd``; None for a stand-in, which only serves to check and count.
        section: Of the configuration, which has the options; for errors.

    Raises:
        UnknownNameError: There is no such objective.
        ConfigError: An option that it does not have, or a value that it cannot use.
    """
    kind: Any = LOSS_REGISTRY[loss.objective]
    values = dict(loss.options)
    where = partial(_where, section)
    if loss.temperature is not None and loss.objective != "next_token":
        if "temperature" in values:
            raise ConfigError(
                "the temperature is given twice",
                where=where(("temperature",)),
                got=f"{values['temperature']}, and loss.temperature {loss.temperature}",
                fix="remove one of them",
            )
        values["temperature"] = loss.temperature
    if kind is DskdLoss:
        projector_start(loss, section=section)
        values[_PROJECTORS] = projectors or DskdProjectors(student_hidden=1, teacher_hidden=1)
    try:
        return build_config(kind, values, where)  # type: ignore[no-any-return]
    except LossError as error:
        raise ConfigError(str(error), where=where(())) from error


def projector_start(loss: LossConfig, *, section: str = "loss") -> str:
    """Which of ``PROJECTOR_STARTS`` the options choose.

    Raises:
        ConfigError: Another.
    """
    start = loss.options.get(_PROJECTORS, PROJECTOR_STARTS[0])
    if start not in PROJECTOR_STARTS:
        raise ConfigError(
            "no such start of projectors",
            where=_where(section, (_PROJECTORS,)),
            got=repr(start),
            expected=f"one of {', '.join(PROJECTOR_STARTS)}",
        )
    return str(start)


def sums_over(loss: LossConfig) -> Over:
    """Chunks, or the student's labels."""
    return what_it_sums_over(loss.objective, loss.options)


def _where(section: str, keys: tuple[str, ...]) -> str:
    return ".".join((section, "options", *keys))

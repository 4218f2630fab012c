"""The parts of a student that learn: of its own weights, and low-rank adapters beside them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from megatron_ext.errors import ConfigError
from megatron_ext.registry import did_you_mean
from megatron_ext.training.configuration.number_checks import check_positive

PARTS: Final = ("embeddings", "layers", "norms", "experts", "routers", "head")
"""Names of ``training.trainable``."""

_OF_EXPERTS: Final = frozenset(("experts", "routers"))
"""Those of them that a dense student does not have."""

LINEAR_LAYERS: Final[dict[str, tuple[str, ...]]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
    "experts.linear_fc1": ("experts.gate_proj", "experts.up_proj"),
    "experts.linear_fc2": ("experts.down_proj",),
}
"""megatron-core's linear layers, with the layers of HuggingFace models that each one is."""

DENSE_LAYERS: Final = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Those that every token passes: of a model with experts, of attention and of shared experts."""

_FEED_FORWARD: Final = frozenset(("linear_fc1", "linear_fc2"))


@dataclass(kw_only=True, frozen=True, slots=True)
class LoraConfig:
    """Low-rank adapters of the student (LoRA, arXiv 2106.09685), which alone learn.

    A linear layer gives ``W x + alpha / rank * B A x``, with ``A`` of ``rank`` rows and ``B``,
    zero at first, of ``rank`` columns.
    """

    rank: int
    """Rank of every adapter."""

    alpha: float = 32.0
    """Strength of the adapters: their product is multiplied by ``alpha / rank``."""

    targets: tuple[str, ...] = DENSE_LAYERS
    """Linear layers with adapters: ``linear_qkv``, ``linear_proj``, ``linear_fc1`` and
    ``linear_fc2``, or HuggingFace's names; of names that are one layer here, give all. In layers of
    linear attention the first two are its products before and behind the state. In a student
    with experts the last two are of shared experts; ``experts.linear_fc1`` and
    ``experts.linear_fc2`` give every expert adapters of its own."""

    def __post_init__(self) -> None:
        check_positive(self, "rank", "alpha")
        # Frozen, and slots: the normal form is set once.
        object.__setattr__(self, "targets", _linear_layers(self.targets))

    @property
    def scale(self) -> float:
        """Factor of the adapters' products."""
        return self.alpha / self.rank


def _linear_layers(targets: Iterable[str]) -> tuple[str, ...]:
    """megatron-core's names of linear layers, in the order of a layer."""
    left = set(targets)
    chosen = []
    for layer, parts in LINEAR_LAYERS.items():
        # A model without a gate has up_proj alone; which one it is shows with its weights.
        if layer in left or left.issuperset(parts):
            chosen.append(layer)
            left -= {layer, *parts}
    if left:
        name = min(left)
        together = next((parts for parts in LINEAR_LAYERS.values() if name in parts), None)
        known = [*LINEAR_LAYERS, *(part for parts in LINEAR_LAYERS.values() for part in parts)]
        raise ConfigError(
            "a target of the adapters cannot be used",
            where="targets",
            got=name,
            expected=f"{', '.join(together)} together: they are one layer of megatron-core"
            if together
            else f"some of {', '.join(LINEAR_LAYERS)}",
            fix=None if together else did_you_mean(name, known),
        )
    if not chosen:
        raise ConfigError("there are no targets for adapters", where="targets", got="none")
    return tuple(chosen)


def check_experts(
    lora: LoraConfig | None, parts: Iterable[str] | None, *, has_experts: bool, has_dense: bool
) -> None:
    """Refuse adapters and parts beside layers that a student does not have.

    The targets that are the default are those of them that there are.

    Args:
        parts: ``training.trainable``.
        has_experts: Whether the student's layers have experts.
        has_dense: Whether they have feed-forward layers that every token passes.

    Raises:
        ConfigError: A target or a part is of layers that the student lacks.
    """
    targets = lora.targets if lora else ()
    of_experts = [name for name in targets if name.startswith("experts.")]
    named = [("lora.targets", name) for name in of_experts]
    named += [
        ("training.trainable", name) for name in sorted(_OF_EXPERTS.intersection(parts or ()))
    ]
    if named and not has_experts:
        where, name = named[0]
        raise ConfigError(
            "the student has no experts",
            where=where,
            got=name,
            fix="leave it out, or set student.num_experts",
        )
    missing = [name for name in targets if name in _FEED_FORWARD and not has_dense]
    if missing and targets != DENSE_LAYERS:
        raise ConfigError(
            "the feed-forward layers of this student are experts, and none is shared",
            where="lora.targets",
            got=missing[0],
            expected=f"experts.{missing[0]}, or the layers of attention alone",
        )


def check_parts(parts: Iterable[str] | None) -> None:
    """Refuse a ``training.trainable`` with names that are no parts, or with none.

    Raises:
        ConfigError: It has.
    """
    if parts is None:
        return
    names = list(parts)
    for name in names:
        if name not in PARTS:
            raise ConfigError(
                "no part of a student has this name",
                where="trainable",
                got=name,
                expected=f"some of {', '.join(PARTS)}",
                fix=did_you_mean(name, list(PARTS)),
            )
    if not names:
        raise ConfigError(
            "nothing of the student would learn",
            where="trainable",
            got="no part",
            fix="name parts, or leave it out",
        )


def check_tied(parts: Iterable[str] | None, *, is_tied: bool) -> None:
    """Refuse to train one of embeddings and head where they are the same weights.

    Raises:
        ConfigError: One of them is to learn and the other is not.
    """
    both = {"embeddings", "head"}
    named = both.intersection(parts or both)
    if is_tied and len(named) == 1:
        raise ConfigError(
            "embeddings and head of this student are the same weights, so that both learn or none",
            where="training.trainable",
            got=f"{min(named)} alone",
            fix="name both, or start from a student with untie_embeddings_and_output_weights",
        )

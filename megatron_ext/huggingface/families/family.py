"""What a family of HuggingFace models is: its tensors, and what its ``config.json`` leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ext.huggingface.tensor_map import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models of one architecture of transformers."""

    architecture: str
    """Class in ``architectures`` of ``config.json``."""

    model_type: str

    rules: tuple[Rule, ...]
    """Its tensors, the head included, which a model with a tied one has not."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """What all its models have in common and Llama has not, by names of ``ModelConfig``."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keys of ``config.json`` that a file may leave out, and what transformers takes then."""

    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values that megatron-core has an equal of, the usual one first; other keys do not matter."""

    ignored: tuple[str, ...] = ()
    """Ends of names of tensors that hold nothing that is trained."""

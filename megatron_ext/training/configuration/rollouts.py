"""Configuration section of rollouts: rows that go on with what the student itself samples."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ext.engines.engine import EngineConfig
from megatron_ext.errors import ConfigError
from megatron_ext.training.configuration.number_checks import check_positive


@dataclass(kw_only=True, frozen=True, slots=True)
class RolloutConfig:
    """Prompts that the student completes before each step, to learn from its own texts.

    Of a conversation the prompt is everything before its last answers; of a text, its beginning.
    """

    share: float = 0.5
    """Share of the rows of a global batch that are rollouts; the others are recorded text."""

    prompts: tuple[str, ...] = ()
    """Files of the prompts, read as ``data.train`` is; its own documents when not given."""

    prompt_characters: int | None = None
    """Characters of a text that are its prompt; the whole text when not given."""

    max_new_tokens: int = 128
    """Most tokens of a completion."""

    temperature: float = 1.0
    """Temperature of the sampling; 0 for the likeliest tokens."""

    top_p: float = 1.0
    """Probability of the most probable tokens that are sampled from (nucleus sampling)."""

    micro_batch_size: int = 8
    """Completions that are sampled together."""

    train_whitespace: bool = False
    """Whether sampled tokens of spaces and tabs alone are trained."""

    ahead: int | None = None
    """Steps ahead for which servers sample while a step trains, none of them beyond the next
    checkpoint, whose weights they would lack; 1 when not given, 0 for samples of the step alone."""

    engine: EngineConfig | None = field(default=None, metadata={"prefix": "engine-"})
    """Servers that sample; the student itself, on its own ranks, when not given. They take the
    weights of every checkpoint that the run saves."""

    def __post_init__(self) -> None:
        check_positive(self, "max_new_tokens", "micro_batch_size", "prompt_characters")
        for name, value in (("share", self.share), ("top_p", self.top_p)):
            if not 0 < value <= 1:
                raise ConfigError(
                    f"{name} must be a part of one", got=value, expected="more than 0, at most 1"
                )
        self._check_ahead()
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(
                "the temperature cannot be used",
                where="data.rollouts.temperature",
                got=self.temperature,
                expected="0 or more",
            )

    def _check_ahead(self) -> None:
        if self.ahead is not None and self.ahead < 0:
            raise ConfigError(
                "steps ahead are negative",
                where="data.rollouts.ahead",
                got=self.ahead,
                expected="0 or more",
            )
        if self.ahead and self.engine is None:
            raise ConfigError(
                "ahead of a step, the student would sample with weights older than its own",
                where="data.rollouts.ahead",
                got=self.ahead,
                expected=0,
                fix="leave it out, or have servers sample (data.rollouts.engine)",
            )

    @property
    def steps_ahead(self) -> int:
        """Steps ahead for which is sampled; 0 where the student samples itself."""
        if self.engine is None:
            return 0
        return 1 if self.ahead is None else self.ahead

"""Megatron-LM's loop asks for the whole loss on held-out text, which a cache cannot give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.megatron_lm.pretrain import HeldOutStream


def test_held_out_text_beside_a_cache_is_refused_before_the_first_step() -> None:
    config = SimpleNamespace(section_of=lambda name: name)
    trainer: Any = SimpleNamespace(cached_teachers={"teacher": object()}, config=config)
    held_out: Any = None
    with pytest.raises(ConfigError, match=r"data\.validation: .*got teacher\.cache"):
        HeldOutStream(trainer, held_out)
    trainer.cached_teachers = {}
    HeldOutStream(trainer, held_out)

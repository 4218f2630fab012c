"""Which engine a tokenizer is asked to encode batches with."""

from __future__ import annotations

from typing import get_args

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.config import Engine


def engine_choice(name: str, *, reference_only: str | None = None) -> Engine:
    """``name``, checked.

    Args:
        name: An engine.
        reference_only: The library, where it has no other engine than its own code.

    Raises:
        TokenizerError: There is no such engine, or the library does not have it.
    """
    for engine in get_args(Engine):
        if engine != name:
            continue
        if reference_only is not None and engine == "gigatoken":
            raise TokenizerError(
                f"the {reference_only} library has no fast engine",
                got="engine gigatoken",
                fix="leave engine at auto",
            )
        choice: Engine = engine
        return choice
    raise TokenizerError(
        "unknown engine", got=repr(name), expected=f"one of {', '.join(get_args(Engine))}"
    )

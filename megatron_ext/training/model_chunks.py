"""A rank's part of one model: one chunk, or several under an interleaved pipeline.

Chunk ``v`` of pipeline rank ``p`` is stage ``v * P + p`` of the model, of ``P * V`` stages. So the
first chunk of the first rank embeds tokens, and the last chunk of the last rank has the head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.models.gpt import GPTModel

ModelChunks = Sequence[GPTModel]
"""In the order in which a microbatch passes them."""


def has_head(model: Any) -> bool:
    """Whether a chunk, wrapped or not, ends in the output layer."""
    while not isinstance(model, GPTModel):
        model = model.module
    return bool(model.post_process)


def sharded_weights(chunks: ModelChunks) -> dict[str, Any]:
    """What ``dist_checkpointing`` saves and loads of a model, by megatron-core's names of chunks.

    Files know of layers, not of chunks: weights saved in one layout load in any other.
    """
    return {
        name: chunk.sharded_state_dict()
        for name, chunk in zip(chunk_names(chunks), chunks, strict=True)
    }


def load_weights_of(chunks: ModelChunks, state: Mapping[str, Any]) -> None:
    """Take over a loaded ``sharded_weights``."""
    for name, chunk in zip(chunk_names(chunks), chunks, strict=True):
        chunk.load_state_dict(state[name])


def chunk_names(chunks: ModelChunks) -> list[str]:
    """``model``; with several chunks ``model0``, ``model1`` and so on."""
    if len(chunks) == 1:
        return ["model"]
    return [f"model{index}" for index in range(len(chunks))]

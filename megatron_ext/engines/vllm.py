"""vLLM's requests and answers (``/v1/completions``), as of 0.32. T tokens, K top.

A server is started with ``--max-logprobs`` of at least the K that is asked for, and with
``--logprobs-mode processed_logprobs`` where it samples at another temperature than 1.
``VLLM_SERVER_DEV_MODE=1`` lets it load the student's weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.engines.engine import AskedPrompt, Completion, Sampling, Scores

_PATH = "/v1/completions"

PromptRow = Mapping[str, Mapping[str, Any]]
"""``logprob`` and ``rank`` by id: of the K likeliest tokens, and of the one that stands there."""


def prompt_scores(rows: Sequence[PromptRow | None], ids: Sequence[int], top_k: int) -> Scores:
    """The scores in a text's ``prompt_logprobs``.

    Ranks count from 1. A token of the text that is not among the K has an entry beside theirs,
    whose rank counts all tokens that are no less likely, itself included.

    Args:
        rows: [T] entries; those of the first token are none.
        ids: [T]
        top_k: K

    Raises:
        ValueError: The rows are not of these ids, or have fewer tokens.
    """
    if len(rows) != len(ids) or not ids:
        raise ValueError(f"{len(rows)} prompt_logprobs of {len(ids)} tokens")
    log_probs, top = [], []
    for at in range(1, len(ids)):
        row = rows[at] or {}
        if str(ids[at]) not in row:
            raise ValueError(f"prompt_logprobs of token {at} have no entry for its id {ids[at]}")
        log_probs.append(float(row[str(ids[at])]["logprob"]))
        if top_k:
            ranked = [(e["rank"], -e["logprob"], int(i)) for i, e in row.items() if e["rank"]]
            top.append(sorted(ranked)[:top_k])
            if len(top[-1]) < top_k or top[-1][-1][0] > top_k:
                raise ValueError(f"fewer than {top_k} prompt_logprobs of token {at}")
    shape = (len(log_probs), top_k)
    return Scores(
        np.array(log_probs, np.float32),
        np.array([[i for _, _, i in row] for row in top], np.int64).reshape(shape),
        np.array([[-value for _, value, _ in row] for row in top], np.float32).reshape(shape),
    )


class Vllm:
    """The ``Dialect`` of vLLM."""

    def sampling(
        self, model: str, prompt: AskedPrompt, sampling: Sampling, seed: int
    ) -> tuple[str, Mapping[str, Any]]:
        """``Dialect.sampling``."""
        return _PATH, {
            "model": model,
            "prompt": prompt.ids,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": seed,
            "stop_token_ids": sorted(prompt.stop_ids),
            "ignore_eos": True,
            "add_special_tokens": False,
            "skip_special_tokens": False,
            "logprobs": 0,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
        }

    def completion(self, answer: Any) -> Completion:
        """``Dialect.completion``."""
        (choice,) = answer["choices"]
        ids = [int(token) for token in choice["token_ids"]]
        return Completion(ids, [float(value) for value in choice["logprobs"]["token_logprobs"]])

    def scoring(self, model: str, ids: list[int], top_k: int) -> tuple[str, Mapping[str, Any]]:
        """``Dialect.scoring``."""
        return _PATH, {
            "model": model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": top_k,
            "add_special_tokens": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

    def scores(self, answer: Any, ids: list[int], top_k: int) -> Scores:
        """``Dialect.scores``."""
        (choice,) = answer["choices"]
        if choice["prompt_token_ids"] != ids:
            raise ValueError("prompt_token_ids are not those that were sent")
        return prompt_scores(choice["prompt_logprobs"], ids, top_k)

    def loading(self, folder: Path) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """``Dialect.loading``."""
        return (
            (
                "/collective_rpc",
                {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}},
            ),
            ("/reset_prefix_cache", {}),
        )

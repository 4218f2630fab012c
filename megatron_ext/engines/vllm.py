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
        """``Dialect.scores``: ranks count from 1, and a token beyond them is named beside them."""
        (choice,) = answer["choices"]
        if choice["prompt_token_ids"] != ids:
            raise ValueError("prompt_token_ids are not those that were sent")
        rows: list[Mapping[str, Mapping[str, float]]] = choice["prompt_logprobs"][1:]
        if len(rows) != len(ids) - 1:
            raise ValueError(f"{len(rows)} prompt_logprobs of {len(ids)} tokens")
        top = [sorted(row.items(), key=lambda item: item[1]["rank"])[:top_k] for row in rows]
        if any(len(row) != top_k for row in top):
            raise ValueError(f"fewer than {top_k} prompt_logprobs of a token")
        shape = (len(rows), top_k)
        return Scores(
            np.array(
                [row[str(i)]["logprob"] for row, i in zip(rows, ids[1:], strict=True)], np.float32
            ),
            np.array([[int(i) for i, _ in row] for row in top], np.int64).reshape(shape),
            np.array([[it["logprob"] for _, it in row] for row in top], np.float32).reshape(shape),
        )

    def loading(self, folder: Path) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """``Dialect.loading``."""
        return (
            (
                "/collective_rpc",
                {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}},
            ),
            ("/reset_prefix_cache", {}),
        )

"""SGLang's requests and answers (``/generate``), as of 0.5. T tokens, K top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.engines.engine import AskedPrompt, Completion, Sampling, Scores

_PATH = "/generate"


class Sglang:
    """The ``Dialect`` of SGLang, whose lists are of ``[log-probability, id, text]``."""

    def sampling(
        self, model: str, prompt: AskedPrompt, sampling: Sampling, seed: int
    ) -> tuple[str, Mapping[str, Any]]:
        """``Dialect.sampling``; the seed holds where the server runs deterministically."""
        return _PATH, {
            "input_ids": prompt.ids,
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "sampling_seed": seed,
                "stop_token_ids": sorted(prompt.stop_ids),
                "ignore_eos": True,
                "skip_special_tokens": False,
                "no_stop_trim": True,
            },
            "return_logprob": True,
            "logprob_start_len": -1,
        }

    def completion(self, answer: Any) -> Completion:
        """``Dialect.completion``."""
        rows = answer["meta_info"]["output_token_logprobs"]
        ids = [int(row[1]) for row in rows]
        if "output_ids" in answer and [int(i) for i in answer["output_ids"]] != ids:
            raise ValueError("output_ids are not those of output_token_logprobs")
        return Completion(ids, [float(row[0]) for row in rows])

    def scoring(self, model: str, ids: list[int], top_k: int) -> tuple[str, Mapping[str, Any]]:
        """``Dialect.scoring``."""
        return _PATH, {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": top_k,
        }

    def scores(self, answer: Any, ids: list[int], top_k: int) -> Scores:
        """``Dialect.scores``; the first token has none."""
        meta = answer["meta_info"]
        rows = meta["input_token_logprobs"]
        if [int(row[1]) for row in rows] != ids:
            raise ValueError("input_token_logprobs are not of the ids that were sent")
        top = meta["input_top_logprobs"][1:] if top_k else [[]] * (len(ids) - 1)
        if any(len(row) < top_k for row in top):
            raise ValueError(f"fewer than {top_k} input_top_logprobs of a token")
        shape = (len(ids) - 1, top_k)
        return Scores(
            np.array([float(row[0]) for row in rows[1:]], np.float32),
            np.array([[int(it[1]) for it in row[:top_k]] for row in top], np.int64).reshape(shape),
            np.array([[it[0] for it in row[:top_k]] for row in top], np.float32).reshape(shape),
        )

    def loading(self, folder: Path) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """``Dialect.loading``."""
        return (("/update_weights_from_disk", {"model_path": str(folder)}),)

"""vLLM's ``prompt_logprobs`` in files of JSON, as of 0.32. T tokens.

A record is one of:

- a ``RequestOutput`` of ``LLM.generate`` as an object of its attributes: ``prompt_token_ids`` [T]
  and ``prompt_logprobs``, a list of T entries, none for the first, or the lists of a
  ``FlatLogprobs``;
- an answer of the server to ``/v1/completions`` (each of ``choices``) or ``/v1/chat/completions``
  (the answer itself), asked with ``prompt_logprobs`` and ``return_token_ids``;
- a line that ``vllm run-batch`` writes: such an answer under ``response.body``.

vLLM scores prompts before any processing for sampling: its log-probabilities are of the whole
vocabulary at temperature 1, unless ``logprobs_mode`` has it record logits.

Source: vLLM 0.32, ``vllm/logprobs.py``, ``vllm/outputs.py``, ``vllm/entrypoints/openai``, and
``_get_prompt_logprobs_dict`` of ``vllm/v1/worker/gpu_model_runner.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from megatron_ext.engines.vllm import PromptRow, prompt_scores
from megatron_ext.errors import DataError
from megatron_ext.teachers.recorded_text import RecordedText

_MOST_MASS: Final = 1 + 1e-3
"""vLLM computes in fp32: sums of probabilities are off by less than 1e-4."""


class VllmRecording:
    """The ``RecordingFormat`` of vLLM."""

    most_mass = _MOST_MASS

    def texts(self, record: Any, top_k: int | None) -> list[RecordedText]:
        """``RecordingFormat.texts``."""
        try:
            found = [_text(part, top_k) for part in _parts(record)]
        except DataError:
            raise
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                "the record is not one of vLLM's prompt_logprobs",
                got=f"{type(error).__name__}: {error}",
                fix="see docs/teachers.md for what is read, and for --top-k",
            ) from error
        return found


def _parts(record: Any) -> Iterator[Mapping[str, Any]]:
    """The objects of a record that have ``prompt_logprobs``.

    Raises:
        DataError: There is none, or it is a request that failed.
    """
    if record.get("error") is not None:
        raise DataError("the record is of a request that failed", got=record["error"])
    if "response" in record:
        record = record["response"]["body"]
    parts = [record] if record.get("prompt_logprobs") else record.get("choices", [])
    if not parts or not all(part.get("prompt_logprobs") for part in parts):
        raise DataError(
            "the record has no prompt_logprobs",
            got=f"keys {list(record)[:12]}",
            fix="ask with prompt_logprobs of the number of tokens to keep",
        )
    for part in parts:
        if not part.get("prompt_token_ids"):
            raise DataError(
                "the record has no prompt_token_ids, so nothing says what it is of",
                fix="ask with return_token_ids",
            )
        yield part


def _text(part: Mapping[str, Any], top_k: int | None) -> RecordedText:
    ids = [int(token) for token in part["prompt_token_ids"]]
    rows = part["prompt_logprobs"]
    if isinstance(rows, Mapping):
        rows = _unflattened(rows)
    count = min(map(_ranked, rows[1:]), default=1) if top_k is None else top_k
    return RecordedText(np.array(ids, np.int64), prompt_scores(rows, ids, count))


def _ranked(row: PromptRow) -> int:
    """Number of a position's likeliest tokens: the last rank before one is missing."""
    ranks = {entry["rank"] for entry in row.values()}
    return next(count for count in range(len(ranks) + 1) if count + 1 not in ranks)


def _unflattened(flat: Mapping[str, Any]) -> list[PromptRow]:
    """The entries of each position of a ``FlatLogprobs``, of which the last of a token holds."""
    bounds: Sequence[tuple[int, int]] = list(
        zip(flat["start_indices"], flat["end_indices"], strict=True)
    )
    ids, values, ranks = flat["token_ids"], flat["logprobs"], flat["ranks"]
    return [
        {str(ids[at]): {"logprob": values[at], "rank": ranks[at]} for at in range(start, stop)}
        for start, stop in bounds
    ]

"""The registry of tasks by name, and the task of bits per byte."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

from megatron_ext.evaluation.language_model import LanguageModel, rolling_requests
from megatron_ext.evaluation.tasks.code import HUMANEVAL_STOPS, MBPP_STOPS, CodeTask
from megatron_ext.evaluation.tasks.gsm8k import Gsm8k
from megatron_ext.evaluation.tasks.mmlu import Mmlu
from megatron_ext.evaluation.tasks.task import (
    Task,
    TaskOptions,
    TaskResult,
    first_of,
    read_records,
    read_text,
    text_of,
)
from megatron_ext.registry import Registry


class BitsPerByte:
    """Bits per byte of texts: ``sum(-log2 p(token)) / bytes``, over all tokens and UTF-8 bytes.

    A ``.txt`` file is one text; other files have one in each record. The number does not depend on
    the tokenizer, so that models compare.

    Raises:
        DataError: The texts cannot be read.
    """

    def __init__(self, options: TaskOptions) -> None:
        path = options.path
        texts = [text for text in _texts(path, options.text_field) if text]
        self._texts: list[str] = first_of(texts, options.limit, where=path)

    def run(self, model: LanguageModel) -> TaskResult:
        """Score all windows of all texts."""
        windows = [list(rolling_requests(text, model)) for text in self._texts]
        scores = iter(model.log_likelihoods([window for of in windows for window in of]))
        nats = [-sum(next(scores).nats for _ in of) for of in windows]
        sizes = [len(text.encode("utf-8")) for text in self._texts]
        tokens = sum(len(window.continuation) for of in windows for window in of)
        return TaskResult(
            metrics={
                "bits_per_byte": sum(nats) / math.log(2) / sum(sizes),
                "nats_per_token": sum(nats) / tokens,
                "bytes_per_token": sum(sizes) / tokens,
            },
            count=len(self._texts),
            settings={"window": model.max_length},
            samples=[
                {"bytes": size, "bits_per_byte": of / math.log(2) / size}
                for size, of in zip(sizes, nats, strict=True)
            ],
        )


def _texts(path: Path, field: str) -> list[str]:
    if path.suffix == ".txt" or path.name.endswith(".txt.gz"):
        return [read_text(path)]
    return [text_of(record, field, where=path) for record in read_records(path)]


TASKS: Registry[Callable[[TaskOptions], Task]] = Registry("task")

TASKS.register("bits_per_byte", BitsPerByte)
TASKS.register("mmlu", Mmlu)
TASKS.register("gsm8k", Gsm8k)
TASKS.register("humaneval_plus", partial(CodeTask, stops=HUMANEVAL_STOPS))
TASKS.register("mbpp_plus", partial(CodeTask, stops=MBPP_STOPS))

"""Bits per byte of texts: how well a model knows them, whatever its tokenizer is.

``sum(-log2 p(token)) / bytes``, over every token of every text and the bytes of its UTF-8.
"""

from __future__ import annotations

import math
from pathlib import Path

from megatron_ext.evaluation.language_model import LanguageModel
from megatron_ext.evaluation.records import read_records, read_text, text_of
from megatron_ext.evaluation.tasks.task import TaskOptions, TaskResult, first_of
from megatron_ext.evaluation.text_requests import rolling_requests


class BitsPerByte:
    """Texts of a ``.txt`` file, which is one, or of the records of another.

    Raises:
        DataError: They cannot be read.
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

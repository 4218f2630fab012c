"""``EngineConnection``: targets of a teacher that an inference server runs. B rows, T positions."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.engines.engine import Scores
from megatron_ext.engines.server import InferenceServer
from megatron_ext.errors import DataError, LossError
from megatron_ext.teachers.base import TokenRows
from megatron_ext.teachers.formed_targets import Fields, filler, from_records, to_records
from megatron_ext.teachers.recorded_text import RecordedText, check_recorded
from megatron_ext.teachers.target_form import TargetForm

_MOST_MASS: Final = 1.01
"""Sum of a prediction's probabilities up to which a server's rounding explains what exceeds 1."""


class _Asked(NamedTuple):
    """A microbatch whose texts a server scores."""

    rows: TokenRows
    texts: list[tuple[int, int]]
    """First position of each text in the concatenated rows, and its number of labels."""

    ids: list[list[int]]
    """Of each text, with its last label."""

    scores: Callable[[], list[Scores]]


class EngineConnection:
    """Requests and answers of one replica of a student, as ``Connection`` has them.

    Args:
        server: The server.
        form: ``label`` or ``topk``. The server gives no boundaries of words: objectives that read
            them are refused before.

    Attributes:
        received_bytes: Bytes of the targets.
        received_tokens: Positions whose targets were received.
        waited_s: Seconds spent waiting for answers.
    """

    def __init__(self, server: InferenceServer, form: TargetForm) -> None:
        self._server, self._form = server, form
        self._numbers = itertools.count()
        self._asked: dict[int, list[_Asked]] = {}
        self.received_bytes = self.received_tokens = 0
        self.waited_s = 0.0

    def ask(self, rows: Sequence[TokenRows]) -> int:
        """Request the targets of microbatches; returns the number for ``answer``, at once."""
        number = next(self._numbers)
        self._asked[number] = [self._begin(each) for each in rows]
        return number

    def answer(self, number: int) -> list[Fields]:
        """Wait for the fields [B, T, ...] of each microbatch of a request; on the host.

        Raises:
            DistributedError: The server does not answer, or answers nonsense.
            LossError: It predicts NaN.
        """
        started = time.perf_counter()
        try:
            return [self._fields(asked) for asked in self._asked.pop(number)]
        finally:
            self.waited_s += time.perf_counter() - started

    def head(self) -> torch.Tensor:
        """Refuse: a server does not give its head.

        Raises:
            LossError: Always.
        """
        raise LossError("an engine does not give its head", fix="take targets topk or label")

    def close(self) -> None:
        """End the connections."""
        self._server.close()

    def _begin(self, rows: TokenRows) -> _Asked:
        assert rows.labels is not None
        tokens, labels = rows.tokens.ravel().tolist(), rows.labels.ravel()
        begins = rows.position_ids == 0
        begins[:, 0] = True
        starts = [*begins.ravel().nonzero()[:, 0].tolist(), len(tokens)]
        texts, ids = [], []
        for start, stop in itertools.pairwise(starts):
            trained = (labels[start:stop] != IGNORE_INDEX).nonzero()[:, 0]
            if len(trained):
                count = int(trained[-1]) + 1
                texts.append((start, count))
                ids.append([*tokens[start : start + count], int(labels[start + count - 1])])
        top_k = self._form.count if self._form.kind == "topk" else 0
        return _Asked(rows, texts, ids, self._server.score(ids, top_k))

    def _fields(self, asked: _Asked) -> Fields:
        shape = asked.rows.tokens.shape
        fields = filler(self._form, shape.numel())
        scores = asked.scores()
        if scores:
            for ids, its_scores in zip(asked.ids, scores, strict=True):
                self._check(np.array(ids), its_scores)
            places = torch.from_numpy(
                np.concatenate([np.arange(start, start + count) for start, count in asked.texts])
            )
            received = self._received(scores)
            for name, values in received.items():
                fields[name][places] = values
            self.received_bytes += len(places) * self._form.bytes_per_token
        self.received_tokens += shape.numel()
        return {name: values.unflatten(0, shape) for name, values in fields.items()}

    def _check(self, ids: NDArray[np.int64], scores: Scores) -> None:
        """Refuse numbers that are no log-probabilities, such as logits, and ids beyond V."""
        if self._form.kind == "label":
            own = scores.log_probs
            scores = Scores(own, ids[1:, None], own[:, None])
        try:
            check_recorded(
                RecordedText(ids, scores),
                self._form.vocab_size,
                most_mass=_MOST_MASS,
                tail="exact",
            )
        except DataError as error:
            raise self._server.unreadable(str(error)) from error

    def _received(self, scores: Sequence[Scores]) -> Fields:
        """Fields of all scored positions, in the form's precision."""
        log_probs = torch.from_numpy(np.concatenate([each.log_probs for each in scores]))
        fields = {"label_log_probs": log_probs}
        if self._form.kind == "label":
            fields["boundary_log_probs"] = torch.zeros_like(log_probs)
        else:
            fields |= {
                "topk_ids": torch.from_numpy(np.concatenate([each.top_ids for each in scores])),
                "topk_logits": torch.from_numpy(
                    np.concatenate([each.top_log_probs for each in scores])
                ),
                # Log-probabilities are logits whose sum is known.
                "log_normaliser": torch.zeros_like(log_probs),
            }
        return from_records(to_records(fields, self._form), self._form)

"""The windows of a run's texts, looked up by what a recorded text begins with.

T tokens of a recorded text, L labels of a window.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.data.packed_dataset import PackedTextDataset
from megatron_ext.data.side import Segment
from megatron_ext.training.teachers.block_recorder import Block
from megatron_ext.training.teachers.shard_file import KEY_BYTES, window_key

_ID: Final = np.dtype("<i4")
_MOST_COMPARED: Final = 20_000
"""Windows that a recorded text without one is compared with."""

Ids = NDArray[np.int64]


class RunWindow(NamedTuple):
    """A window of the run, without the tokens that a recording of it repeats."""

    key: bytes
    """Key of its records in a cache."""

    length: int
    """L"""

    needed: int
    """N, labels up to the last trained one: positions whose predictions are needed."""

    last_label: int
    """Label of the last of these."""

    trained: NDArray[np.bool_] | None
    """[N] mask of labels; None for all."""

    dataset: PackedTextDataset
    document: int
    """Number of the document in ``dataset.documents``."""

    @property
    def place(self) -> str:
        """``file:row`` of the document."""
        return self.dataset.documents.place(self.document)

    def is_continued_in(self, ids: Ids) -> bool:
        """Whether the last label follows in a text that begins with the window's inputs, whose
        recorded probability then is the label's."""
        return len(ids) > self.needed and int(ids[self.needed]) == self.last_label

    def labels(self, ids: Ids) -> Ids:
        """Labels [N], ``IGNORE_INDEX`` where there is none.

        Args:
            ids: Tokens that begin with the window's inputs.
        """
        labels = np.append(ids[1 : self.needed], self.last_label)
        return labels if self.trained is None else np.where(self.trained, labels, IGNORE_INDEX)


class _ReadWindow(NamedTuple):
    """A window, and its inputs up to the last trained label."""

    window: RunWindow
    inputs: NDArray[np.int32]


class RunWindows:
    """All windows of the teacher in a run's training text, each once.

    Args:
        blocks: The text.
        teacher: Name of the teacher.

    Attributes:
        untrained: Windows without a trained label, of which nothing has to be recorded.
        keys: Keys of all others.

    Raises:
        MegatronExtError: A document cannot be read.
    """

    def __init__(self, blocks: Sequence[Block], teacher: str) -> None:
        self._blocks, self._teacher = blocks, teacher
        self._by_inputs: dict[bytes, list[RunWindow]] = {}
        self.untrained: list[RunWindow] = []
        self.keys: set[bytes] = set()
        for window, inputs in _read(blocks, teacher):
            if not window.needed:
                self.untrained.append(window)
            elif window.key not in self.keys:
                self.keys.add(window.key)
                (digest,) = _prefix_digests(inputs, [window.needed]).values()
                self._by_inputs.setdefault(digest, []).append(window)
        counts = {window.needed for windows in self._by_inputs.values() for window in windows}
        self._counts = sorted(counts)

    def of_text(self, ids: Ids, rows: int) -> list[RunWindow]:
        """The windows that a text is of: it begins with their inputs, has all their predictions,
        and goes on with their last label or ends there.

        Args:
            ids: [T]
            rows: Predictions of the text.
        """
        most = min(len(ids), rows)
        counts = [count for count in self._counts if count <= most]
        digests = _prefix_digests(ids, counts).values()
        return [
            window
            for digest in digests
            for window in self._by_inputs.get(digest, ())
            if window.is_continued_in(ids) or len(ids) <= window.needed + 1
        ]

    def missing(self, found: set[bytes]) -> Iterator[RunWindow]:
        """The windows whose keys were not found."""
        for windows in self._by_inputs.values():
            yield from (window for window in windows if window.key not in found)

    def nearest(self, ids: Ids, rows: int) -> str:
        """A clause about the window that shares most ids with a text that begins with none."""
        best, shared = None, 0
        for window, inputs in islice(_read(self._blocks, self._teacher), _MOST_COMPARED):
            length = _shared(inputs, ids)
            if best is None or length > shared:
                best, shared = _ReadWindow(window, inputs), length
        if best is None or not shared:
            first = "none" if best is None else ", ".join(map(str, best.inputs[:4].tolist()))
            return f"ids that begin with {ids[:4].tolist()}, where the run's begin with {first} ..."
        window, inputs = best
        if shared == len(inputs) or shared == len(ids):
            return (
                f"{rows} predictions of the text at {window.place}, of whose {window.needed} "
                f"tokens the last has the id {window.last_label}"
            )
        return (
            f"{shared} ids as at {window.place}, and then {ids[shared]} where the tokenizer gives "
            f"{inputs[shared]}"
        )


def window_texts(blocks: Sequence[Block], teacher: str) -> Iterator[list[int]]:
    """The ids of each window to be recorded, once: its inputs up to the last label, and that.

    Raises:
        MegatronExtError: A document cannot be read.
    """
    seen: set[bytes] = set()
    for window, inputs in _read(blocks, teacher):
        if window.needed and window.key not in seen:
            seen.add(window.key)
            yield [*inputs.tolist(), window.last_label]


def _read(blocks: Sequence[Block], teacher: str) -> Iterator[_ReadWindow]:
    """All windows of the text, with repetitions."""
    for block in blocks:
        dataset = block.dataset
        index = dataset.collator.side_index(teacher)
        side = dataset.collator.sides[index]
        texts, _ = dataset.aligned_texts(0, block.number)
        for document, text in texts.items():
            for piece in dataset.pieces(text):
                segment = Segment.of(piece, index, side)
                if segment.label_count:
                    yield _window(segment, dataset, document)


def _window(segment: Segment, dataset: PackedTextDataset, document: int) -> _ReadWindow:
    inputs = np.concatenate(segment.inputs(), dtype=np.int32)
    labels = np.concatenate(segment.labels(), dtype=np.int64)
    trained = np.flatnonzero(labels != IGNORE_INDEX)
    count = int(trained[-1]) + 1 if len(trained) else 0
    is_all = len(trained) == count
    window = RunWindow(
        key=window_key(segment),
        length=len(labels),
        needed=count,
        last_label=int(labels[count - 1]) if count else IGNORE_INDEX,
        trained=None if is_all else labels[:count] != IGNORE_INDEX,
        dataset=dataset,
        document=document,
    )
    return _ReadWindow(window, inputs[:count])


def _prefix_digests(ids: NDArray[np.integer], counts: Sequence[int]) -> dict[int, bytes]:
    """Hashes of the first ids, by their number; ``counts`` ascend."""
    content = ids.astype(_ID, copy=False).tobytes()
    digest, at, digests = hashlib.blake2b(digest_size=KEY_BYTES), 0, {}
    for count in counts:
        digest.update(content[at * _ID.itemsize : count * _ID.itemsize])
        digests[count], at = digest.copy().digest(), count
    return digests


def _shared(one: NDArray[np.integer], other: NDArray[np.integer]) -> int:
    """Number of first ids that are the same."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length

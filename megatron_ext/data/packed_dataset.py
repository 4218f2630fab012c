"""``PackedTextDataset``: documents packed into full rows; and a reader that detects dead workers.

D documents, P pieces, K sides.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, Dataset

from megatron_ext.data.aligner import AlignedText, Content, PackedSample, cut
from megatron_ext.data.collator import CrossTokenizerCollator
from megatron_ext.data.reading_order import BlockOrder
from megatron_ext.documents.documents import Documents
from megatron_ext.errors import ConversationError, MegatronExtError, TokenizerError, UntrainedError

_CUT: Final = (
    "nothing of the conversation is trained once it is cut to the models' sequence lengths"
)


class RefusedDocument(NamedTuple):
    """A document that a tokenizer or a template refuses, or of which nothing is trained."""

    place: str
    """``file:row``."""

    reason: str


@dataclass(frozen=True, slots=True)
class PackedBlock:
    """The samples of a block in order, with what was left out."""

    samples: tuple[PackedSample, ...]

    dropped_bytes: int
    """Bytes of its documents in no sample: a stretch that cannot be cut exceeds a row, or a model
    has no token for it."""

    refused: tuple[RefusedDocument, ...] = ()
    """Documents that were left out whole; their bytes are among ``dropped_bytes``."""

    retokenized: int = 0
    """Documents stored as ids of the student's vocabulary to whose text its tokenizer gives other
    ids; the samples hold the latter."""


class PackedTextDataset(Dataset[PackedBlock]):
    """Blocks of documents, packed by the tokens of the student and of every teacher.

    An item is the block with key (epoch, number). Its documents are tokenized when it is read and
    packed together, so the corpus need not be tokenized in advance. A document longer than a row is
    cut where all models can be cut. Each byte is in exactly one sample of an epoch or counted in
    ``dropped_bytes``. A block is a function of its key, independent of ranks and workers.
    ``PackedBatches`` reads blocks with workers and yields batches.

    Args:
        documents: The corpus.
        collator: Source of the tokenizers, row lengths and cache.
        seed: Seed of the order of documents.
        shuffle: Shuffle runs of documents, and the documents of a block.
        block_bytes: Least bytes of the documents packed together. More fill rows better and mix
            documents more; fewer take less memory and give the first batch sooner.
        run_documents: Neighbouring documents that are read together.
        pack: Fill rows with several texts; otherwise each text, or piece of one, has its own row.
        refuse_bad: Raise the error of a document that cannot be read; otherwise leave it out and
            list it in the block's ``refused``, as conversations are of which nothing is trained.

    Raises:
        ConfigError: A value that cannot be used.
    """

    def __init__(
        self,
        documents: Documents,
        collator: CrossTokenizerCollator,
        *,
        seed: int = 1234,
        shuffle: bool = True,
        block_bytes: int = 1 << 22,
        run_documents: int = 64,
        pack: bool = True,
        refuse_bad: bool = True,
    ) -> None:
        self.documents = documents
        self.collator = collator
        self._pack, self._refuse_bad = pack, refuse_bad
        self._shape = {"block_bytes": block_bytes, "run_documents": run_documents}
        self.order = BlockOrder(
            sizes=documents.sizes,
            seed=seed,
            shuffle=shuffle,
            block_bytes=block_bytes,
            run_documents=run_documents,
        )

    @property
    def identity(self) -> dict[str, object]:
        """Plain values on which the samples depend, except for the tokenizers."""
        return {
            "documents": self.documents.sha256,
            "seed": self.order.seed,
            "shuffle": self.order.shuffle,
            **self._shape,
            **({} if self._pack else {"pack": False}),
            "lengths": [side.length for side in self.collator.sides],
        }

    def block_count(self, epoch: int) -> int:
        """Number of blocks of an epoch."""
        return self.order.block_count(epoch)

    def __getitem__(self, key: tuple[int, int]) -> PackedBlock:
        """Read, align and pack a block.

        Args:
            key: Epoch, and number of the block in it.

        Raises:
            DataError: A file has changed.
            TokenizerError: A document that a tokenizer cannot take, with file and row.
        """
        aligned, refused = self.aligned_texts(*key)
        pieces_of = {number: self.pieces(text) for number, text in aligned.items()}
        pieces = [piece for own in pieces_of.values() for piece in own]
        refused = [
            *refused,
            *(
                RefusedDocument(self.documents.place(number), _CUT)
                for number, own in pieces_of.items()
                if not own and aligned[number].is_conversation
            ),
        ]
        rows = self._rows(pieces)
        if self.order.shuffle:
            # Packing begins with the longest pieces.
            self.order.generator(*key).shuffle(rows)
        taken = sum(piece.byte_count for piece in pieces)
        whole = int(self.documents.sizes[self.order.documents(*key)].sum())
        return PackedBlock(
            tuple(PackedSample(tuple(pieces[index] for index in row)) for row in rows),
            max(whole - taken, 0),
            tuple(refused),
            sum(self._is_retokenized(number, text) for number, text in aligned.items()),
        )

    def aligned_texts(
        self, epoch: int, block: int
    ) -> tuple[dict[int, AlignedText], list[RefusedDocument]]:
        """The documents of a block by number, in order, and those that are refused.

        Raises:
            DataError: As ``__getitem__``.
            TokenizerError: As ``__getitem__``.
        """
        numbers = self.order.documents(epoch, block).tolist()
        # Read in file order, which is fastest.
        contents, refused = self._contents(sorted(numbers))
        aligned, unaligned = self._aligned({n: contents[n] for n in numbers if n in contents})
        return aligned, [*refused, *unaligned]

    def pieces(self, text: AlignedText) -> list[AlignedText]:
        """The pieces of a document that fit the rows of all models."""
        return cut(text, [side.capacity for side in self.collator.sides])

    def _is_retokenized(self, number: int, text: AlignedText) -> bool:
        """Whether the student's ids differ from the stored ids of the document."""
        kept = self.documents.student_ids(number)
        return kept is not None and not np.array_equal(kept, text.student_ids)

    def _rows(self, pieces: list[AlignedText]) -> list[list[int]]:
        """The pieces of each row, as indices."""
        if not self._pack:
            return [[index] for index in range(len(pieces))]
        lengths = np.array([self._lengths(piece) for piece in pieces], np.int64)
        limits = np.array([side.length for side in self.collator.sides], np.int64)
        return pack_rows(lengths.reshape(-1, len(limits)), limits)

    def _lengths(self, piece: AlignedText) -> list[int]:
        """Positions of a piece on each side."""
        return [
            side.segment_length(count, is_end=piece.is_end)
            for side, count in zip(self.collator.sides, piece.token_counts, strict=True)
        ]

    def _contents(self, numbers: list[int]) -> tuple[dict[int, Content], list[RefusedDocument]]:
        contents, refused = {}, []
        for number in numbers:
            try:
                contents[number] = self.documents.content(number)
            except (ConversationError, TokenizerError) as error:
                refused.append(self._refused(number, error))
        return contents, refused

    def _aligned(
        self, contents: dict[int, Content]
    ) -> tuple[dict[int, AlignedText], list[RefusedDocument]]:
        """Aligned texts by document number, and the refused documents."""
        align = self.collator.aligner.align
        # Conversations are rendered one at a time: one that is refused repeats no other.
        if all(isinstance(content, str) for content in contents.values()):
            with suppress(MegatronExtError):
                return dict(zip(contents, align(list(contents.values())), strict=True)), []
        aligned, refused = {}, []
        for number, content in contents.items():
            try:
                (aligned[number],) = align([content])
            except MegatronExtError as error:
                refused.append(self._refused(number, error))
        return aligned, refused

    def _refused(self, number: int, error: MegatronExtError) -> RefusedDocument:
        place = self.documents.place(number)
        # Data in which messages have weights may have such records, which nothing is wrong with.
        if self._refuse_bad and not isinstance(error, UntrainedError):
            raise type(error)(str(error), where=place) from error
        return RefusedDocument(place, str(error))


_OPEN_ROWS = 64
"""Most open rows; the oldest is closed when a new one is opened."""


def pack_rows(lengths: NDArray[np.int64], capacities: NDArray[np.int64]) -> list[list[int]]:
    """First-fit-decreasing packing: each piece, longest first, into the first row with room.

    Args:
        lengths: [P, K] positions of each piece on each side.
        capacities: [K] positions of a row; none of ``lengths`` is larger.

    Returns:
        The pieces of each row.
    """
    rows: list[list[int]] = []
    room: NDArray[np.int64] = np.zeros((0, len(capacities)), np.int64)
    first_open = 0
    longest = (lengths / capacities).max(axis=1)
    for index in np.argsort(-longest, kind="stable").tolist():
        fits = (room >= lengths[index]).all(axis=1)
        row = int(fits.argmax()) if fits.any() else -1
        if row < 0:
            rows.append([])
            room = np.concatenate([room, capacities[None]])
            if len(room) > _OPEN_ROWS:
                room, first_open = room[1:], first_open + 1
            row = len(room) - 1
        rows[first_open + row].append(index)
        room[row] -= lengths[index]
    return rows


_POLL_S: Final = 0.5


class DeadWorkerError(Exception):
    """A worker process has died; the message says how."""


class BlockWorkers(Iterator[PackedBlock]):
    """The blocks of a ``DataLoader`` with workers, in order, with a watch for dead workers.

    torch notices a dead worker only while the others send nothing, and never if the worker died in
    the middle of transferring a block: the reader then waits for the rest of it for ever. So a
    thread reads, and the caller's thread watches the processes.
    """

    def __init__(self, loader: DataLoader[PackedBlock]) -> None:
        with _deaf_to_signals():
            self._blocks: Any = iter(loader)
        _unwatch(self._blocks)

    def __next__(self) -> PackedBlock:
        """The next block.

        Raises:
            DeadWorkerError: A worker has died; only ``close`` may be called then.
            Exception: Raised by a worker.
        """
        self._check_alive()
        read = _Read(self._blocks)
        while not read.ended(_POLL_S):
            self._check_alive()
        if read.error is not None:
            self._check_alive()
            raise read.error
        assert read.block is not None
        return read.block

    def close(self) -> None:
        """Kill all workers, which also ends a thread that still waits for one."""
        for worker in self._blocks._workers:
            worker.kill()
        for worker in self._blocks._workers:
            worker.join(5)
        # The reader's pipe closes once no process, this one included, can write to it.
        with suppress(OSError, AttributeError):
            self._blocks._worker_result_queue._writer.close()

    def _check_alive(self) -> None:
        for worker in self._blocks._workers:
            if not worker.is_alive():
                raise DeadWorkerError(_how_it_ended(worker.pid, worker.exitcode))


@contextmanager
def _deaf_to_signals() -> Iterator[None]:
    """Start processes that no SIGINT or SIGTERM of a group reaches, from their first moment on.

    They end with this process, which takes a signal that arrives meanwhile behind the block.
    """
    # Starting it would end the block early, until Python 3.12.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _unwatch(blocks: Any) -> None:
    """Disable torch's own reaction to a dead worker.

    Its SIGCHLD handler raises wherever the main thread happens to be, even within an optimizer
    step, if workers are forked from this process.
    """
    if blocks._worker_pids_set:
        _remove_worker_pids(id(blocks))
        blocks._worker_pids_set = False


class _Read(threading.Thread):
    """Thread that reads one block."""

    def __init__(self, blocks: Iterator[PackedBlock]) -> None:
        super().__init__(daemon=True)
        self.block: PackedBlock | None = None
        self.error: BaseException | None = None
        self._blocks = blocks
        self.start()

    def run(self) -> None:
        try:
            self.block = next(self._blocks)
        except BaseException as error:
            self.error = error

    def ended(self, seconds: float) -> bool:
        """Whether the thread has ended, after waiting up to ``seconds``."""
        self.join(seconds)
        return not self.is_alive()


def _how_it_ended(pid: int | None, code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"worker {pid} was ended by {signal.Signals(-code).name}"
    return f"worker {pid} ended with exit code {code}"

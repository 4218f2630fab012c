"""One vocabulary in gigatoken, and its results as flat arrays. N tokens of all texts, D texts.

Facts about gigatoken 0.10 that this module works around:

* It always reads the added tokens that it was given, so it is given none that text may not spell.
* A byte-level tokenizer caches the words it has seen, per thread and without a limit.
* A SentencePiece tokenizer does so where texts are encoded one by one, which is twice as fast as a
  batch call: that begins with empty caches, and again for each MiB if it is parallel.
* A batch call takes a millisecond whatever it holds, a call for one text a few microseconds. But
  the latter holds Python's lock, and fails while the former runs in the same tokenizer.
* A parallel call cuts texts of more than 2 MiB. The proof for whole texts would have to be repeated
  for each cut; such a text is encoded whole instead.
* Its thread pool does not survive a fork; calls in a child process stay on one thread.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import TokenizerError
from megatron_ext.imports import needed_packages
from megatron_ext.tokenizers.token_ids import IdArray

Offsets = NDArray[np.int64]
"""[D + 1] where the ids of each text begin; the last entry is N."""

FlatIds = tuple[IdArray, Offsets]
"""Concatenated ids [N] of all texts, and their offsets [D + 1]."""


def flat_ids(rows: Iterable[Sequence[int] | IdArray]) -> FlatIds:
    """Concatenate the ids of texts."""
    arrays = [np.asarray(row, np.int32) for row in rows]
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([len(row) for row in arrays], out=offsets[1:])
    return np.concatenate([np.zeros(0, np.int32), *arrays]), offsets


def join(parts: Sequence[FlatIds]) -> FlatIds:
    """Concatenate the texts of all parts; a single part is not copied."""
    if len(parts) == 1:
        return parts[0]
    ids: list[NDArray[np.int32]] = [np.zeros(0, np.int32)]
    offsets = [np.zeros(1, np.int64)]
    total = 0
    for part_ids, bounds in parts:
        ids.append(part_ids[bounds[0] : bounds[-1]])
        offsets.append(bounds[1:] - bounds[0] + total)
        total += len(ids[-1])
    return np.concatenate(ids), np.concatenate(offsets)


def interleave(rest: FlatIds, aside: FlatIds, at: Sequence[int]) -> FlatIds:
    """The texts of ``rest``, with those of ``aside`` inserted at the indices ``at``.

    Args:
        rest: D - A texts.
        aside: A texts.
        at: Index of each text of ``aside`` among all D, ascending [A].
    """
    parts: list[FlatIds] = []
    done = 0
    for taken, index in enumerate(at):
        # ``taken`` texts before this one came from aside.
        parts += [
            (rest[0], rest[1][done : index - taken + 1]),
            (aside[0], aside[1][taken : taken + 2]),
        ]
        done = index - taken
    return join([*parts, (rest[0], rest[1][done:])])


_LONG = 1 << 21
"""Bytes from which a parallel call may cut a text."""
_LEAST_SHARE = 1 << 22
"""Bytes of text from which a thread of its own pays, since its caches are empty."""
_FEW = 1 << 16
"""Bytes up to which encoding texts one by one is faster than a batch call."""
_CACHED_PER_THREAD = 1 << 30
"""Bytes of text after which the word cache of one thread is worth dropping."""
_PROCESS = os.getpid()


class GigatokenEngine:
    """Encoder of UTF-8 documents in which special tokens are ordinary text.

    Args:
        make: Makes a ``gigatoken.Tokenizer``.
        composes: The tokenizer normalises text to NFC.
        names: Strings that gigatoken encodes differently from the library.
        ids: Library id of each of gigatoken's ids [R]; None where they are the same.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        composes: bool = False,
        names: Sequence[str] = (),
        ids: IdArray | None = None,
    ) -> None:
        self._tokenizer = make()
        backend = type(self._tokenizer.backend).__name__
        self._is_sentencepiece = backend == "SentencePieceTokenizer"
        # The closure holds a large model: keep it only where another tokenizer may be made.
        self._make = make if self._is_sentencepiece else None
        self._ids = ids
        self._cached_bytes = 0
        self.composes = composes
        self.names = tuple(names)

    @property
    def reads_classes(self) -> bool:
        """Whether it cuts text by Unicode classes: letters, digits, spaces."""
        return not self._is_sentencepiece

    @property
    def is_worn(self) -> bool:
        """Whether the word caches may have grown so large that a new engine is cheaper."""
        is_bounded = hasattr(_import_gigatoken(), "set_max_cache_bytes")
        caches = 1 if self._is_sentencepiece else _threads()
        return not is_bounded and self._cached_bytes > _CACHED_PER_THREAD * caches

    def encode(self, documents: Sequence[bytes]) -> FlatIds:
        """Ids of each of D documents, which must be valid UTF-8.

        Returns:
            ids [N] int32, an array of gigatoken's own where one call was enough, and offsets
            [D + 1] int64.
        """
        if not documents:
            return np.zeros(0, np.int32), np.zeros(1, np.int64)
        if self._is_sentencepiece:
            ids, offsets = self._encode_in_shares(documents)
        elif sum(map(len, documents)) <= _FEW:
            ids, offsets = self._encode_few(documents)
        else:
            ids, offsets = self._encode_in_runs(documents)
        return ids if self._ids is None else self._ids[ids], offsets

    def _encode_few(self, documents: Sequence[bytes]) -> FlatIds:
        """Encode texts one by one, unless another thread's batch call is running."""
        try:
            return self._encode_each(documents, self._tokenizer)
        except RuntimeError as error:
            if "borrowed" not in str(error):
                raise
            return self._encode_in_runs(documents)

    def _encode_in_runs(self, documents: Sequence[bytes]) -> FlatIds:
        """Encode runs of documents, in parallel where that does not cut them."""
        self._cached_bytes += sum(map(len, documents))
        runs = groupby(documents, key=lambda document: len(document) >= _LONG)
        # None leaves the choice to gigatoken: parallel, except in a worker process.
        return join(
            [_call(self._tokenizer, list(run), False if is_long else None) for is_long, run in runs]
        )

    def _encode_in_shares(self, documents: Sequence[bytes]) -> FlatIds:
        """A call on each thread for its share of a large batch; else texts one by one."""
        threads = _threads()
        shares = _shares(documents, threads)
        if len(shares) == 1:
            return self._encode_each(documents, self._tokenizer if threads == 1 else self._beside)
        with ThreadPoolExecutor(len(shares)) as pool:
            return join(list(pool.map(lambda share: _call(self._tokenizer, share, False), shares)))

    def _encode_each(self, documents: Sequence[bytes], tokenizer: Any) -> FlatIds:
        self._cached_bytes += sum(map(len, documents))
        rows = list(map(tokenizer.encode, documents))
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return _signed(np.concatenate(rows)), offsets

    @cached_property
    def _beside(self) -> Any:
        """A second tokenizer, which encodes texts one by one while batch calls run."""
        assert self._make is not None
        return self._make()


def _call(tokenizer: Any, documents: Sequence[bytes], parallel: bool | None) -> FlatIds:
    """Ids of many documents by one batch call."""
    ragged = tokenizer.encode_batch(documents, parallel=parallel).layout
    return _signed(np.asarray(ragged.content.data)), np.asarray(ragged.offsets.data, np.int64)


def _signed(ids: NDArray[np.uint32]) -> IdArray:
    """A signed view of ``ids``, which are below 2**31."""
    return ids.view(np.int32)


@contextmanager
def building(where: object) -> Iterator[Any]:
    """The gigatoken module, to build a tokenizer with; its failures become one error.

    Raises:
        MissingDependencyError: gigatoken is not installed.
        TokenizerError: gigatoken cannot build the tokenizer.
    """
    gigatoken = _import_gigatoken()
    try:
        yield gigatoken
    except TokenizerError:
        raise
    except BaseException as error:
        # A failed assertion in gigatoken is a PanicException, which is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TokenizerError(
            "gigatoken cannot build the tokenizer", got=reason, where=where
        ) from error


def _import_gigatoken() -> Any:
    with needed_packages("the engine gigatoken"):
        # Results come in awkward's arrays.
        import_module("awkward")
        return import_module("gigatoken")


def _shares(documents: Sequence[bytes], threads: int) -> list[Sequence[bytes]]:
    """Runs of about equally many bytes, one for each thread that pays, none empty."""
    ends = np.cumsum([len(document) for document in documents])
    count = max(1, min(threads, int(ends[-1]) // _LEAST_SHARE))
    targets = ends[-1] * np.arange(1, count) // count
    cuts = [0, *np.searchsorted(ends, targets, side="right").tolist(), len(documents)]
    return [documents[begin:end] for begin, end in pairwise(cuts) if begin < end]


def _threads() -> int:
    """Number of threads of one call: the cores, or 1 in a child process, which shares them."""
    if os.getpid() != _PROCESS or multiprocessing.parent_process() is not None:
        # A forked child, or a worker of a pool.
        return 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

"""One vocabulary in gigatoken, and how its result becomes arrays.

Facts about gigatoken 0.10 that this module works around:

* It always reads the added tokens that it was given, so it is given none that text may not spell.
* A byte-level tokenizer caches the words it has seen, per thread and without a limit.
* A SentencePiece tokenizer does so where texts are encoded one by one, on one thread. A call for
  many begins with empty caches, and again for each MiB of a parallel call; it takes twice as long.
  Its calls are independent, so large batches are cut here, into as few as there are threads.
* A parallel call cuts texts of more than 2 MiB. What is proven of whole texts would have to be
  proven of each cut; such a text is encoded whole instead.
* Its thread pool does not survive a fork; calls in a child process stay on one thread.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from itertools import groupby
from typing import Any

import numpy as np

from megatron_ext.errors import MissingDependencyError, TokenizerError
from megatron_ext.tokenizers.base import IdArray
from megatron_ext.tokenizers.engine.flat_ids import FlatIds, join

_LONG = 1 << 21
"""Bytes from which a parallel call may cut a text."""
_CHUNK = (1 << 21, 1 << 25)
"""Least and most bytes of a SentencePiece chunk: caches fill slowly, and threads end together."""
_CACHED_PER_THREAD = 1 << 30
"""Bytes of text after which the word cache of one thread is worth dropping."""
_PROCESS = os.getpid()


class GigatokenEngine:
    """Encodes UTF-8 documents in which special tokens are ordinary text.

    Args:
        tokenizer: A ``gigatoken.Tokenizer``.
        composes: It normalises text to NFC.
        names: What it reads otherwise than the library where a text spells it.
        ids: Id [R] of each of gigatoken's ids; None where they are the same.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        composes: bool = False,
        names: Sequence[str] = (),
        ids: IdArray | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._is_sentencepiece = type(tokenizer.backend).__name__ == "SentencePieceTokenizer"
        self._ids = ids
        self._cached_bytes = 0
        self.composes = composes
        self.names = tuple(names)

    @property
    def reads_classes(self) -> bool:
        """Whether it cuts text by what is a letter, a digit or a space."""
        return not self._is_sentencepiece

    @property
    def is_worn(self) -> bool:
        """Whether the word caches may have grown so large that a new engine is cheaper."""
        is_bounded = hasattr(_import_gigatoken(), "set_max_cache_bytes")
        return not is_bounded and self._cached_bytes > _CACHED_PER_THREAD * _threads()

    def encode(self, documents: Sequence[bytes]) -> FlatIds:
        """Ids of each of D documents, which must be valid UTF-8.

        Returns:
            ids [N] int32, an array of gigatoken's own where one call was enough, and offsets
            [D + 1] int64.
        """
        if not documents:
            return np.zeros(0, np.int32), np.zeros(1, np.int64)
        encode = self._encode_in_chunks if self._is_sentencepiece else self._encode_in_runs
        ids, offsets = encode(documents)
        return ids if self._ids is None else self._ids[ids], offsets

    def _encode_in_runs(self, documents: Sequence[bytes]) -> FlatIds:
        """A parallel call for each run of documents that it does not cut, another for the rest."""
        self._cached_bytes += sum(map(len, documents))
        runs = groupby(documents, key=lambda document: len(document) >= _LONG)
        # None leaves the choice to gigatoken: parallel, except in a worker process.
        return join([self._call(list(run), False if is_long else None) for is_long, run in runs])

    def _encode_in_chunks(self, documents: Sequence[bytes]) -> FlatIds:
        """A call for each chunk on a thread of its own, or one for each document."""
        threads = _threads()
        chunks = [documents] if threads == 1 else list(_chunks(documents, threads))
        if len(chunks) > 1:
            with ThreadPoolExecutor(threads) as pool:
                return join(list(pool.map(lambda chunk: self._call(chunk, False), chunks)))
        self._cached_bytes += sum(map(len, documents))
        rows = list(map(self._tokenizer.encode, documents))
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return np.concatenate(rows).view(np.int32), offsets

    def _call(self, documents: Sequence[bytes], parallel: bool | None) -> FlatIds:
        ragged = self._tokenizer.encode_batch(documents, parallel=parallel).layout
        ids = np.asarray(ragged.content.data)
        # Ids are below 2**31: the same bits, read as signed, are the same numbers.
        return ids.view(np.int32), np.asarray(ragged.offsets.data, np.int64)


@contextmanager
def building(where: object) -> Iterator[Any]:
    """The gigatoken module, to build a tokenizer with; what goes wrong there is one clear error.

    Raises:
        MissingDependencyError: gigatoken is not installed.
        TokenizerError: It cannot build the tokenizer.
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
    for package in ("gigatoken", "awkward"):
        try:
            import_module(package)
        except ImportError:
            # Results come in awkward's arrays.
            raise MissingDependencyError(
                package, extra="fast", feature="the engine gigatoken"
            ) from None
    return import_module("gigatoken")


def _chunks(documents: Sequence[bytes], threads: int) -> Iterator[Sequence[bytes]]:
    """Runs of documents of about the same number of bytes."""
    ends = np.cumsum([len(document) for document in documents])
    least, most = _CHUNK
    size = max(least, min(most, -(-int(ends[-1]) // threads)))
    begin = 0
    while begin < len(documents):
        done = int(ends[begin - 1]) if begin else 0
        stop = int(np.searchsorted(ends, done + size)) + 1
        yield documents[begin:stop]
        begin = stop


def _threads() -> int:
    """Threads of one call: as many as there are cores, unless other processes share these."""
    if os.getpid() != _PROCESS or multiprocessing.parent_process() is not None:
        # A forked child, or a worker of a pool.
        return 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

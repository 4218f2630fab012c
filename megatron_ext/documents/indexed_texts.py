"""``IndexedTexts``: the documents of an indexed dataset, decoded. D documents, N ids."""

from __future__ import annotations

import hashlib
import logging
from array import array
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ext.documents.documents import CorpusReport
from megatron_ext.documents.id_tokenizers import KEY
from megatron_ext.documents.index import Arrays, Notes, cached_arrays
from megatron_ext.documents.indexed_file import IndexedFile
from megatron_ext.errors import DataError, TokenizerError
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.token_bytes import TokenBytes
from megatron_ext.tokenizers.token_ids import IdArray

RawIds = NDArray[np.integer[Any]]
_FORMAT: Final = 1
"""Version of the arrays; raising it rebuilds every index."""
_log = logging.getLogger(__name__)


class Measured(NamedTuple):
    """Content of documents without the BOS and EOD around them."""

    sizes: NDArray[np.int64]
    """[D] bytes of the text."""

    has_content: NDArray[np.bool_]
    """[D] whether a document holds a byte or a control token."""


class IdDecoder:
    """Decodes documents by the bytes of each id; picklable.

    A leading BOS and a trailing EOD are removed, because a run adds its own, and so is the space
    that a SentencePiece vocabulary puts before every text.

    Args:
        tokenizer: Tokenizer that made the ids.
    """

    def __init__(self, tokenizer: MegatronTokenizerText) -> None:
        self.tokenizer = tokenizer

    def content(self, ids: IdArray) -> IdArray:
        """``ids`` [N] of a document without a leading BOS and a trailing EOD."""
        bos, eod = self.tokenizer.bos_id, self.tokenizer.eod
        if bos is not None and len(ids) and ids[0] == bos:
            ids = ids[1:]
        if eod is not None and len(ids) and ids[-1] == eod:
            ids = ids[:-1]
        return ids

    def text(self, content: IdArray) -> str:
        """The text that a document's ``content`` [N] spells.

        Raises:
            TokenizerError: The content holds a control token, or its bytes are not UTF-8.
        """
        controls = np.flatnonzero(self._is_control[content])
        if len(controls):
            token_id = int(content[controls[0]])
            raise TokenizerError(
                "the document holds a control token",
                got=f"{self.tokenizer.id_to_token(token_id)!r}, id {token_id}, as its token "
                f"{controls[0] + 1}",
                expected="ids of text, and at most an EOD behind them",
            )
        spelled = self._table.join(content).tobytes()
        if len(content) and self._begins_with_added_space(content[:1])[0]:
            spelled = spelled[1:]
        try:
            return spelled.decode()
        except UnicodeDecodeError as error:
            raise TokenizerError(
                "the ids of the document spell no UTF-8",
                got=f"0x{spelled[error.start]:02x} at byte {error.start} of {len(spelled)}",
            ) from None

    def first_unknown(self, ids: RawIds) -> int | None:
        """Position in ``ids`` of the first id outside the vocabulary; None if there is none."""
        is_unknown = (ids < 0) | (ids >= len(self._table))
        return int(is_unknown.argmax()) if is_unknown.any() else None

    def measure(self, ids: RawIds, bounds: NDArray[np.int64]) -> Measured:
        """Measures of the documents between ``bounds`` [D + 1] of valid ``ids`` [N]."""
        begins, ends = bounds[:-1].copy(), bounds[1:].copy()
        for token_id, edges, shift in (
            (self.tokenizer.bos_id, begins, 1),
            (self.tokenizer.eod, ends, -1),
        ):
            filled = np.flatnonzero(begins < ends)
            at = edges[filled] - (shift < 0)
            if token_id is not None:
                edges[filled[ids[at] == token_id]] += shift
        sizes = _sums(self._table.lengths[ids], begins, ends)
        filled = np.flatnonzero(begins < ends)
        sizes[filled] -= self._begins_with_added_space(ids[begins[filled]])
        has_control = _sums(self._is_control[ids], begins, ends) > 0
        return Measured(sizes, (sizes > 0) | has_control)

    def _begins_with_added_space(self, first: RawIds) -> NDArray[np.bool_]:
        """Whether texts that begin with these ids begin with the space SentencePiece adds."""
        return self._table.starts_with_space[first] & self._adds_space

    @cached_property
    def _adds_space(self) -> bool:
        spaced = np.flatnonzero(self._table.starts_with_space)
        if not len(spaced):
            return False
        first = int(spaced[0])
        return int(self.tokenizer.byte_ends([first])[0]) < int(self._table.lengths[first])

    @cached_property
    def _table(self) -> TokenBytes:
        return TokenBytes.of(self.tokenizer)

    @cached_property
    def _is_control(self) -> NDArray[np.bool_]:
        """[V] ids that no ordinary text gives."""
        ids = range(self.tokenizer.vocab_size)
        return np.fromiter(map(self.tokenizer.is_control, ids), np.bool_, len(ids))

    def __getstate__(self) -> dict[str, Any]:
        # Rebuilding the tables is quicker than sending them.
        return {"tokenizer": self.tokenizer}


def _sums(
    values: NDArray[Any], begins: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.int64]:
    """[D] sums of ``values`` [N] over the ranges ``[begins, ends)``."""
    totals = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
    sums: NDArray[np.int64] = totals[ends] - totals[begins]
    return sums


class IndexedTexts:
    """The documents of a ``.bin`` with its ``.idx``; see ``Documents``.

    The first use reads all ids once and caches the bytes of each document. Empty documents are left
    out and counted. A document whose ids spell no text keeps its number; reading it raises.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.
        tokenizer: Tokenizer that made the ids.
        are_the_students: Whether the student has the same vocabulary.
        cache_dir: Folder of the sizes; None for a hidden folder beside the files.

    Raises:
        DataError: The files cannot be read, hold no text, or hold an id outside the vocabulary.
    """

    def __init__(
        self,
        prefix: str,
        tokenizer: MegatronTokenizerText,
        *,
        are_the_students: bool,
        cache_dir: str | Path | None = None,
    ) -> None:
        self._file = IndexedFile(prefix)
        self._decoder = IdDecoder(tokenizer)
        self._are_the_students = are_the_students
        beside = Path(self._file.prefix).parent / ".text_cache"
        key = {
            "kind": "indexed",
            "format": _FORMAT,
            "file": [self._file.prefix, *map(list, self._file.stamps)],
            "tokenizer": [tokenizer.fingerprint(), tokenizer.bos_id, tokenizer.eod],
        }
        folder = beside if cache_dir is None else Path(cache_dir)
        self._index = cached_arrays(folder, key, self._build)
        if not self.report.documents:
            raise DataError(
                "the dataset holds no text",
                got=f"{self.report.empty_rows} empty documents",
                where=self._file.prefix,
            )
        _log.info("%s: %s", self._file.prefix, self.report)

    def __len__(self) -> int:
        return len(self._index["number"])

    def content(self, index: int) -> str:
        """One document, decoded.

        Raises:
            IndexError: There is no such document.
            DataError: The files have changed.
            TokenizerError: Its ids spell no text.
        """
        return self._decoder.text(self._content(index))

    def place(self, index: int) -> str:
        """``file:document``, counted from 1."""
        return f"{self._file.prefix}.bin:{self._number(index) + 1}"

    def student_ids(self, index: int) -> IdArray | None:
        """The ids of a document if the student has their vocabulary, else None."""
        return self._content(index) if self._are_the_students else None

    @property
    def has_student_ids(self) -> bool:
        """Whether the student has the vocabulary of the ids."""
        return self._are_the_students

    @property
    def sizes(self) -> NDArray[np.int64]:
        """[D] bytes that the ids of each document spell."""
        return self._index["size"]

    @property
    def report(self) -> CorpusReport:
        """Counts of the documents read and left out."""
        return CorpusReport(**self._index.notes["report"])

    @property
    def sha256(self) -> str:
        """Hash of the vocabulary and of all ids, independent of the paths of the files."""
        return str(self._index.notes["sha256"])

    def _content(self, index: int) -> IdArray:
        return self._decoder.content(self._file.document(self._number(index)))

    def _number(self, index: int) -> int:
        """Number of a document in the files, from 0, empty ones included."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return int(self._index["number"][index])

    def _build(self) -> tuple[Arrays, Notes]:
        numbers, sizes, counts = array("q"), array("q"), array("q")
        digest = hashlib.sha256(self._decoder.tokenizer.fingerprint().encode())
        for block in self._file.blocks():
            unknown = self._decoder.first_unknown(block.ids)
            if unknown is not None:
                document = block.first + int(block.bounds.searchsorted(unknown, side="right"))
                raise DataError(
                    "an id is outside the vocabulary that is said to have made it",
                    where=f"{self._file.prefix}.bin:{document}",
                    got=int(block.ids[unknown]),
                    expected=f"0 to {self._decoder.tokenizer.vocab_size - 1}",
                    fix=f"set {KEY} to the tokenizer that made the dataset",
                )
            measured = self._decoder.measure(block.ids, block.bounds)
            kept = np.flatnonzero(measured.has_content)
            numbers.extend((block.first + kept).tolist())
            sizes.extend(measured.sizes[kept].tolist())
            counts.extend(np.diff(block.bounds).tolist())
            digest.update(block.ids.astype("<i4").tobytes())
        digest.update(np.array(counts, "<i8").tobytes())
        arrays = {"number": np.array(numbers, np.int64), "size": np.array(sizes, np.int64)}
        report = {
            "rows": len(self._file),
            "documents": len(numbers),
            "bytes": int(arrays["size"].sum()),
            "empty_rows": len(self._file) - len(numbers),
        }
        return arrays, {"report": report, "sha256": digest.hexdigest()}

"""The documents of an indexed dataset as texts by number. D documents."""

from __future__ import annotations

import hashlib
import logging
from array import array
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import DataError
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.token_ids import IdArray
from megatron_ext.training.cross_tokenizer.corpus.report import CorpusReport
from megatron_ext.training.data.indexed.id_decoder import IdDecoder
from megatron_ext.training.data.indexed.id_tokenizers import KEY
from megatron_ext.training.data.indexed.indexed_file import IndexedFile
from megatron_ext.training.sft.cache import Arrays, Notes, cached_arrays

_FORMAT: Final = 1
"""Of the arrays; another one makes every index anew."""

_log = logging.getLogger(__name__)


class IndexedTexts:
    """The documents of a ``.bin`` with its ``.idx``; see ``Documents``.

    The first use reads all ids once and keeps how many bytes each document has. Empty documents are
    left out and counted. A document of ids that spell no text has a number all the same: reading it
    raises.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.
        tokenizer: What made the ids.
        are_the_students: Whether the student has the same vocabulary.
        cache_dir: Where the sizes are kept; a hidden folder beside the files with None.

    Raises:
        DataError: The files cannot be read, hold an id that the tokenizer does not have, or no
            text.
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
            DataError: The files have changed since.
            TokenizerError: Its ids spell no text.
        """
        return self._decoder.text(self._content(index))

    def place(self, index: int) -> str:
        """``file:document``, counted from 1."""
        return f"{self._file.prefix}.bin:{self._number(index) + 1}"

    def student_ids(self, index: int) -> IdArray | None:
        """The ids of a document that the student's vocabulary made, else None."""
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
        """What became of the documents of the files."""
        return CorpusReport(**self._index.notes["report"])

    @property
    def sha256(self) -> str:
        """Hash of the vocabulary and of all ids, wherever the files are."""
        return str(self._index.notes["sha256"])

    def _content(self, index: int) -> IdArray:
        return self._decoder.content(self._file.document(self._number(index)))

    def _number(self, index: int) -> int:
        """Of a document in the files, from 0."""
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

"""Documents of Arrow, Parquet, JSON and plain files, read one at a time by number. D documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from megatron_ext.conversation.records import ConversationRecord
from megatron_ext.documents.documents import CorpusReport
from megatron_ext.documents.index import corpus_index
from megatron_ext.documents.reader import READ_IN_PLACE, RecordReader, changed
from megatron_ext.documents.record_fields import RecordFields
from megatron_ext.documents.records import check_fields
from megatron_ext.documents.source_file import find_sources
from megatron_ext.errors import DataError


class CorpusNames(NamedTuple):
    """What a user calls the arguments of a corpus: a configuration has keys of its own."""

    data_files: str = "data_files"
    text_key: str = "text_key"
    messages_key: str = "messages_key"
    conversations: str = "conversations=True"


_ARGUMENTS: Final = CorpusNames()


class ArrowTextDataset(Dataset[dict[str, Any] | ConversationRecord]):
    """The documents of a corpus: a map-style data set that holds none of them in memory.

    It reads Arrow (IPC files and streams), Parquet, JSON lines and lists, compressed or not, each
    row a document, and plain text, each file a document. The first use reads all of it once and
    keeps where each document is; files of which a row cannot be read alone (compressed ones, JSON
    lists, plain text) are copied into the cache then. Rows that hold no text are left out and
    counted in ``report``.

    An item is ``{"text": str, "index": int}``, as ``CrossTokenizerCollator`` takes it; of
    conversations, a ``ConversationRecord``. A ``PackedTextDataset`` over it packs documents into
    full rows.

    Args:
        data_files: A file, a folder, a glob pattern, or several.
        text_key: Field that holds the text.
        conversations: Each row is a conversation, in any schema of ``conversation.records``; of
            JSON lines, Parquet and Arrow.
        messages_key: Field that holds its turns; told of each record with None.
        cache_dir: Where the index is kept; a hidden folder beside the first file with None.
        strict: Let the first row that is empty or holds no text end the run.
        refuse_bad: Let the first that holds no text do so, and leave empty ones out.
        called: What a user calls the arguments, for errors.

    Raises:
        DataError: There is no such file, it is damaged, or no row holds a text; with ``strict``,
            a row is empty or bad (with file and row).
        MissingDependencyError: A package that reads this kind of file is not installed.
    """

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        *,
        text_key: str = "text",
        conversations: bool = False,
        messages_key: str | None = None,
        cache_dir: str | Path | None = None,
        strict: bool = False,
        refuse_bad: bool = False,
        called: CorpusNames = _ARGUMENTS,
    ) -> None:
        names = [data_files] if isinstance(data_files, str | Path) else data_files
        files = find_sources([str(name) for name in names], fix=f"check {called.data_files}").files
        fields = RecordFields((text_key,), "text", called.text_key, called.conversations)
        if conversations:
            fields = RecordFields(
                (messages_key or "messages",),
                "conversation",
                called.messages_key,
                are_default=messages_key is None,
            )
        check_fields(files, fields)
        beside = Path(files[0].path).parent / ".text_cache"
        self.cache_dir = beside if cache_dir is None else Path(cache_dir)
        self._index = corpus_index(
            files, fields, cache_folder=self.cache_dir, strict=strict, refuse_bad=refuse_bad
        )
        self._fields = fields
        self._records = RecordReader(files, fields)

    def __len__(self) -> int:
        return len(self._index["row"])

    def __getitem__(self, index: int) -> dict[str, Any] | ConversationRecord:
        content = self.content(index)
        return {"text": content, "index": index} if isinstance(content, str) else content

    def content(self, index: int) -> str | ConversationRecord:
        """One document.

        Raises:
            IndexError: There is no such document.
            DataError: Its file has changed since.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        file, row = self._place(index)
        start, size = int(self._index["start"][index]), int(self._index["size"][index])
        if self._records.files[file].kind not in READ_IN_PLACE:
            return self._index["texts"][start : start + size].tobytes().decode()
        record = self._records.record(file, row, start)
        try:
            document: str | ConversationRecord = self._fields.values_of(record)[0]
        except DataError as error:
            raise changed(self._records.files[file]) from error
        return document

    def place(self, index: int) -> str:
        """``file:row`` of a document."""
        return self._records.place(*self._place(index))

    def student_ids(self, index: int) -> None:
        """None: the documents are kept as text."""

    @property
    def has_student_ids(self) -> bool:
        """False: the documents are kept as text."""
        return False

    @property
    def sizes(self) -> NDArray[np.int64]:
        """[D] UTF-8 bytes of each document; of a conversation, of what its messages say."""
        return self._index["size"]

    @property
    def report(self) -> CorpusReport:
        """What became of the rows."""
        return CorpusReport(**self._index.notes["report"])

    @property
    def sha256(self) -> str:
        """Hash of the documents in their order, wherever their files are."""
        return str(self._index.notes["sha256"])

    @property
    def identity(self) -> str:
        """Hash of what the documents depend on: the files with size and time, and the field."""
        return self._index.folder.name

    def _place(self, index: int) -> tuple[int, int]:
        """File and row of a document."""
        return int(self._index["file"][index]), int(self._index["row"][index])

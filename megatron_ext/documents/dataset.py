"""``ArrowTextDataset``: documents of Arrow, Parquet, JSON and text files by number. D documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from megatron_ext.conversation.records import ConversationRecord
from megatron_ext.documents.documents import CorpusReport
from megatron_ext.documents.index import corpus_index
from megatron_ext.documents.reader import READ_IN_PLACE, RecordReader, changed
from megatron_ext.documents.record_fields import MOST_RECORD_BYTES, RecordFields
from megatron_ext.documents.records import check_fields
from megatron_ext.documents.source_file import find_sources
from megatron_ext.errors import DataError, arguments_elsewhere


class CorpusNames(NamedTuple):
    """Names of the arguments of a corpus in error messages, such as configuration keys."""

    data_files: str = "data_files"
    text_key: str = "text_key"
    messages_key: str = "messages_key"
    conversations: str = "conversations=True"


_ARGUMENTS: Final = CorpusNames()


@arguments_elsewhere(
    {
        "arrow_files": "is data_files=",
        "characters_per_sample": "is PackedTextDataset, which packs by tokens",
        **dict.fromkeys(("subset", "split"), "is not needed: data_files= names the files"),
        **dict.fromkeys(
            ("split_validation_size", "val_split", "seed"),
            "is none: name files of validation apart, in a run data.validation",
        ),
    },
    project="NeMo RL",
)
class ArrowTextDataset(Dataset[dict[str, Any] | ConversationRecord]):
    """Map-style data set of the documents of a corpus; none of them is held in memory.

    It reads Arrow (IPC files and streams), Parquet, JSON lines and lists, compressed or not, each
    row a document, and plain text, each file a document. The first use reads all files once and
    indexes the place of each document; the text of files without random access to rows (compressed
    ones, JSON lists, plain text) is copied into the cache then. Rows that hold no text are left out
    and counted in ``report``.

    An item is ``{"text": str, "index": int}``, as ``CrossTokenizerCollator`` takes it, or a
    ``ConversationRecord``. A ``PackedTextDataset`` packs the documents into full rows.

    Args:
        data_files: A file, a folder, a glob pattern, or several.
        text_key: Field that holds the text.
        conversations: Read each row as a conversation, in any schema of ``conversation.records``;
            for JSON lines, Parquet and Arrow.
        messages_key: Field that holds the turns; None to detect it in each record.
        cache_dir: Folder of the index; None for a hidden folder beside the first file.
        strict: Raise at the first row that is empty or bad (holds no text).
        refuse_bad: Raise at the first bad row, and leave empty ones out.
        most_bytes: Bytes that a row may have; one with more is bad.
        called: Names of the arguments in error messages.

    Raises:
        DataError: A file is missing or damaged, or no row holds a text; with ``strict``,
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
        most_bytes: int = MOST_RECORD_BYTES,
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
        fields = replace(fields, most_bytes=most_bytes)
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
        """``file:row`` of a document, counted from 1."""
        return self._records.place(*self._place(index))

    def student_ids(self, index: int) -> None:
        """None: the documents are kept as text."""

    @property
    def has_student_ids(self) -> bool:
        """False: the documents are kept as text."""
        return False

    @property
    def sizes(self) -> NDArray[np.int64]:
        """[D] UTF-8 bytes of each document; of a conversation, of the text of its messages."""
        return self._index["size"]

    @property
    def report(self) -> CorpusReport:
        """Counts of the rows read and left out."""
        return CorpusReport(**self._index.notes["report"])

    @property
    def sha256(self) -> str:
        """Hash of the documents in order, independent of the paths of their files."""
        return str(self._index.notes["sha256"])

    @property
    def identity(self) -> str:
        """Hash of the files (path, size, time of change) and of the field that is read."""
        return self._index.folder.name

    def _place(self, index: int) -> tuple[int, int]:
        """File and row of a document."""
        return int(self._index["file"][index]), int(self._index["row"][index])

"""Input files: expansion of names, detection of the kind, slices, and plain text files."""

from __future__ import annotations

import glob
import gzip
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Literal

from megatron_ext.documents.record_fields import (
    BadRecord,
    RecordBlock,
    RecordFields,
    check_record_size,
)
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.registry import with_near_path

SourceKind = Literal[
    "json-lines",
    "json-lines-gzip",
    "json-document",
    "json-document-gzip",
    "parquet",
    "arrow",
    "text",
    "text-gzip",
]

_KIND_OF_SUFFIX: dict[str, SourceKind] = {
    ".jsonl": "json-lines",
    ".ndjson": "json-lines",
    ".json": "json-lines",
    ".jsonl.gz": "json-lines-gzip",
    ".ndjson.gz": "json-lines-gzip",
    ".json.gz": "json-lines-gzip",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
    ".md": "text",
    ".txt.gz": "text-gzip",
    ".md.gz": "text-gzip",
}

_ABOUT_DATA: Final = re.compile(
    r"(readme|licen[cs]e|notice|citation|changelog)(\.md|\.txt)"
    r"|(dataset_infos?|dataset_dict)\.json",
    re.IGNORECASE,
)
"""Names of files about the data beside them: those of repositories, and those that HuggingFace's
datasets library writes, with a ``state.json`` beside each ``dataset_info.json``."""

_HEAD_BYTES: Final = 1 << 12
_LIST_OVER_LINES: Final = re.compile(rb"(\xef\xbb\xbf)?\s*\[[ \t\r]*\n")
"""Start of a JSON list with its bracket on a line alone, which is never a line of JSON lines."""
_DOCUMENT_OF: Final[Mapping[SourceKind, SourceKind]] = {
    "json-lines": "json-document",
    "json-lines-gzip": "json-document-gzip",
}
"""Kind of a JSON lines file that turns out to be one list."""
_LIST_OF_RECORDS: Final = re.compile(rb"(\xef\xbb\xbf)?\s*\[[ \t\r]*\{")
"""Start of a list on one line; also of JSON lines whose records are lists, see ``_is_list``."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One input file; compares equal while its size and time of change stay."""

    path: str
    kind: SourceKind
    size: int
    modified: int
    """Time of the last change, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """The input files in order, and the skipped files of folders, which are of no known kind."""

    files: tuple[SourceFile, ...]
    skipped: tuple[str, ...]


_OTHER_COMPRESSIONS: Final = (".zst", ".bz2", ".xz", ".lz4", ".zip", ".7z", ".tar.gz", ".tgz")


def source_kind(path: str | os.PathLike[str]) -> SourceKind:
    """Kind of a file by its name; plain text where the name does not tell.

    Raises:
        DataError: The name tells of a compression other than gzip, or of an archive.
    """
    kind = _known_kind(os.fspath(path))
    if kind is not None:
        return kind
    lower = os.fspath(path).lower()
    if lower.endswith(_OTHER_COMPRESSIONS):
        raise DataError(
            "an archive, or a compression that is not read",
            where=path,
            expected="a file as it is, or with gzip (.gz)",
            fix="unpack it",
        )
    return "text-gzip" if lower.endswith(".gz") else "text"


def find_sources(
    inputs: Sequence[str],
    *,
    is_own: Callable[[Path], bool] = lambda path: False,
    fix: str = "check --input",
) -> SourceFiles:
    """The files that ``inputs`` name: files, folders (searched through) and glob patterns.

    The files of a folder or pattern are sorted by name. ``README.md`` and other files about the
    data are skipped there beside files of records. A file of an unknown kind is read as text, but
    skipped in a folder, where hidden files are left out.

    Args:
        inputs: Paths and patterns.
        is_own: Whether a file of a folder is an output of this run, which is left out.
        fix: Advice in the error about a name that matches nothing.

    Raises:
        DataError: A name matches nothing, or a file cannot be read, is named twice or is an
            archive.
    """
    named: list[tuple[Path, SourceKind]] = []
    skipped: list[str] = []
    for name in inputs:
        if os.path.lexists(name) and not os.path.isdir(name):
            named.append((Path(name), source_kind(name)))
            continue
        found: dict[Path, SourceKind | None] = {}
        for path in _expand(name, fix):
            if path.is_dir():
                found |= {file: _known_kind(file.name) for file in _walk(path) if not is_own(file)}
            else:
                found[path] = source_kind(path)
        kinds = {file: kind for file, kind in found.items() if kind is not None}
        data = {file: kind for file, kind in kinds.items() if not _is_about_data(file)}
        if not set(data.values()) - {"text", "text-gzip"}:
            # Texts, or nothing but such names.
            data = kinds
        named += data.items()
        skipped += [str(file) for file in found if file not in data]
    files = tuple(source_file(path, kind) for path, kind in named)
    _check(inputs, files, skipped, fix)
    return SourceFiles(files, tuple(skipped))


def _is_about_data(file: Path) -> bool:
    is_state = file.name == "state.json" and file.with_name("dataset_info.json").exists()
    return is_state or _ABOUT_DATA.fullmatch(file.name) is not None


def _known_kind(name: str) -> SourceKind | None:
    lower = name.lower()
    return next((kind for end, kind in _KIND_OF_SUFFIX.items() if lower.endswith(end)), None)


def _expand(name: str, fix: str) -> list[Path]:
    """The paths that one name stands for; an existing file is never read as a pattern."""
    if os.path.lexists(name):
        return [Path(name)]
    found = sorted(glob.glob(name, recursive=True)) if glob.has_magic(name) else []
    if not found:
        what = "the pattern matches no file" if glob.has_magic(name) else "there is no such file"
        raise DataError(what, where=name, fix=with_near_path(fix, name))
    return [Path(path) for path in found]


def _walk(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """The files below a folder; links to a folder above are not followed."""
    above |= {folder.resolve()}
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if not entry.is_dir():
            yield entry
        elif entry.resolve() not in above:
            yield from _walk(entry, above)


def source_file(path: Path, kind: SourceKind) -> SourceFile:
    """Describe an existing, readable file.

    A JSON lines file that turns out to be one list of records gets the kind of a JSON document.

    Raises:
        DataError: The file is missing, unreadable, or a pipe, which cannot be read twice.
    """
    try:
        if not path.is_dir() and not stat.S_ISREG(path.stat().st_mode):
            raise DataError("the input is not a regular file", where=path, fix="write it to a file")
        # Opened to check the permission to read.
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            if kind in _DOCUMENT_OF and _is_list(stream, kind):
                kind = _DOCUMENT_OF[kind]
    except OSError as error:
        raise DataError(
            "the input cannot be read",
            where=path,
            got=error.strerror,
            fix=with_near_path("check the path and its permissions", path),
        ) from error
    return SourceFile(os.path.abspath(path), kind, status.st_size, status.st_mtime_ns)


def _is_list(raw: IO[bytes], kind: SourceKind) -> bool:
    """Whether a file is one JSON list of records rather than one record a line."""
    is_packed = kind == "json-lines-gzip"
    stream: IO[bytes] | gzip.GzipFile = gzip.GzipFile(fileobj=raw) if is_packed else raw
    try:
        head = stream.read(_HEAD_BYTES)
        if _LIST_OVER_LINES.match(head):
            return True
        if not _LIST_OF_RECORDS.match(head):
            return False
        stream.seek(len(head) - len(head.lstrip(b"\xef\xbb\xbf \t\r\n")))
        # JSON lines whose records are lists close the bracket on the first line.
        last = b""
        for part in iter(lambda: stream.readline(_HEAD_BYTES), b""):
            last = part.rstrip()[-1:] or last
            if part.endswith(b"\n"):
                break
        goes_on = last != b"]"
        rest = iter(lambda: stream.readline(_HEAD_BYTES), b"")
        return goes_on or not any(line.strip() for line in rest)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        # The reader reports damage with its line.
        return False


def _check(
    inputs: Sequence[str], files: tuple[SourceFile, ...], skipped: list[str], fix: str
) -> None:
    if not files:
        raise DataError(
            "the input holds no file of a known kind",
            where=", ".join(inputs),
            got=f"{len(skipped)} other file{'s' if len(skipped) != 1 else ''}",
            expected=", ".join(_KIND_OF_SUFFIX),
        )
    seen: set[str] = set()
    for file in files:
        if file.path in seen:
            raise DataError("the file is named twice", where=file.path, fix=fix)
        seen.add(file.path)


@dataclass(frozen=True, slots=True)
class InputSlice:
    """A part of one file.

    The lines of a JSON lines file that begin in the bytes ``[start, stop)``, the row groups
    ``[start, stop)`` of a Parquet file, or the whole of any other file.
    """

    path: str
    kind: SourceKind
    start: int
    stop: int
    size: int
    """Bytes of the file that the slice stands for."""


def check_text_fields(path: str, fields: RecordFields) -> None:
    """Check that one text is all that is asked of a file without fields.

    Raises:
        ConfigError: Several fields, or conversations, are asked for.
    """
    if fields.content == "conversation":
        raise ConfigError(
            "plain text holds no conversations",
            where=path,
            expected="JSON lines or Parquet",
            fix="name files of records as the input",
        )
    if len(fields.keys) > 1:
        raise ConfigError(
            "plain text has no fields",
            where=path,
            got=f"the keys {', '.join(fields.keys)}",
            fix=f"leave {fields.flag} out, or name files of records as the input",
        )


def read_text_file(piece: InputSlice, fields: RecordFields) -> Iterator[RecordBlock]:
    """The whole text of a file as one record.

    Raises:
        ConfigError: ``check_text_fields`` refuses the file.
        DataError: The file cannot be read.
    """
    check_text_fields(piece.path, fields)
    block = RecordBlock.empty(fields)
    block.line_count, block.size = 1, piece.size
    text = whole_text(piece, fields.most_bytes)
    if isinstance(text, BadRecord):
        block.bad.append(text)
    else:
        block.add(1, [text])
    yield block


def whole_text(piece: InputSlice, most_bytes: int | None = None) -> str | BadRecord:
    """All text of a file without a byte-order mark, or a bad record where it is not UTF-8 or too
    long.

    Args:
        most_bytes: Bytes of the text; None: any number.

    Raises:
        DataError: The file cannot be read.
    """
    is_packed = piece.kind.endswith("-gzip")
    try:
        with gzip.open(piece.path) if is_packed else open(piece.path, "rb") as stream:
            content = stream.read(-1 if most_bytes is None else most_bytes + 1)
        if most_bytes is not None:
            check_record_size(len(content), most_bytes)
        return content.decode("utf-8-sig")
    except DataError as error:
        what = error
    except UnicodeDecodeError as error:
        what = DataError("the text is not UTF-8", got=f"{error.reason} at byte {error.start}")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        what = DataError("the compressed file is cut off or damaged", got=error)
    except OSError as error:
        raise DataError("the input cannot be read", where=piece.path, got=error.strerror) from error
    return BadRecord.of(None, what)

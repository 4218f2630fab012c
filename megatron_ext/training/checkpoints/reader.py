"""Reading of a checkpoint's files; nothing that is in a checkpoint is run.

``.metadata``, the index of torch's distributed checkpoints, is a pickle, and so are ``common.pt``
and the objects and tensors in ``.distcp`` files. The index is read by an unpickler that knows
torch's classes for it and nothing else, everything else with ``weights_only``. What is checked is
what is used: the index and ``common.pt`` are read once.
"""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
import struct
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, Final

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint._nested_dict import (  # type: ignore[attr-defined]
    set_element,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron_ext.errors import CheckpointError
from megatron_ext.training.checkpoints.manifest import DAMAGE_FIX, Manifest, is_inside

COMMON_FILE: Final = "common.pt"
INDEX_FILE: Final = ".metadata"
FORMAT_FILE: Final = "metadata.json"
_FORMAT: Final = "torch_dist"
_FORMAT_KEYS: Final = {
    *(field.name for field in dataclasses.fields(CheckpointingConfig)),
    # Written by megatron-core up to 0.18.
    *("common_backend", "common_backend_version"),
}
_EXTRA_STATE: Final = "_extra_state"
_ARCHIVE_READER: Final = "PytorchStreamReader"
_STRANGE: Final = "use a checkpoint from a source that you trust"

_CLASSES: Final[dict[tuple[str, str], type]] = {
    (cls.__module__, cls.__qualname__): cls
    for module, names in (
        (metadata, [*metadata.__all__, "_MEM_FORMAT_ENCODING"]),
        (filesystem, ["_StorageInfo", "_StoragePrefix"]),
        (
            planner,
            ["SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"],
        ),
    )
    for name in names
    if isinstance(cls := getattr(module, name, None), type)
}
"""Classes that an index is made of, by module and name."""

_BUILTINS: Final[dict[tuple[str, str], Any]] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): OrderedDict,
    **{
        (module, cls.__name__): cls
        for module in ("pathlib", "pathlib._local")
        for cls in (Path, PosixPath, WindowsPath, PurePath, PurePosixPath, PureWindowsPath)
    },
}
"""Other names in an index."""

READING_ERRORS: Final = (
    pickle.UnpicklingError,
    struct.error,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ImportError,
    EOFError,
    RuntimeError,
    OSError,
    MemoryError,
    OverflowError,
    AssertionError,
)
"""Errors of reading bytes that were damaged; RecursionError is a RuntimeError."""


class _IndexUnpickler(pickle._Unpickler):
    """An unpickler that finds the names of an index, and no others.

    The one in Python, as torch's for weights: that in C makes a table as long as the largest number
    a file gives to an object, and so takes all memory for a few bytes.
    """

    def __init__(self, path: Path, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """The class or function of an allowed name.

        Raises:
            CheckpointError: Any other name.
        """
        found = _CLASSES.get((module, name)) or _BUILTINS.get((module, name))
        if found is None and module == "torch":
            value = getattr(torch, name, None) if name.isidentifier() else None
            found = value if isinstance(value, torch.dtype) else None
        if found is None:
            raise _foreign(self._path, f"{module}.{name}")
        return found

    def persistent_load(self, pid: Any) -> Any:
        """Refuse: an index refers to nothing."""
        raise _foreign(self._path, "a reference to an object outside")


def _foreign(path: Path, name: str) -> CheckpointError:
    shown = name.encode("unicode_escape").decode()[:200]
    return CheckpointError(
        "the file is refused: it holds more than a checkpoint's data",
        where=path,
        got=shown,
        fix=_STRANGE,
    )


def _unreadable(path: Path, error: BaseException | str) -> CheckpointError:
    text = str(error) or type(error).__name__
    line = text.splitlines()[0].encode("unicode_escape").decode()[:200]
    return CheckpointError("the file cannot be read", where=path, got=line, fix=DAMAGE_FIX)


@contextmanager
def _unchanged_classes(path: Path) -> Iterator[None]:
    """Undo what a pickle sets on the classes themselves, and refuse it."""
    before = {cls: dict(vars(cls)) for cls in _CLASSES.values()}
    try:
        yield
    finally:
        changed = [cls for cls, known in before.items() if dict(vars(cls)) != known]
        for cls in changed:
            for name in vars(cls).keys() - before[cls].keys():
                type.__delattr__(cls, name)
            for name, value in before[cls].items():
                if vars(cls)[name] is not value:
                    type.__setattr__(cls, name, value)
        if changed:
            raise _foreign(path, f"a change of {changed[0].__name__}")


def read_index(manifest: Manifest) -> Metadata:
    """The index of a checkpoint.

    Raises:
        CheckpointError: It is missing, damaged, or holds anything but torch's classes of an index.
    """
    path = manifest.folder / INDEX_FILE
    content = manifest.read(INDEX_FILE)
    try:
        with _unchanged_classes(path):
            return _checked(path, _IndexUnpickler(path, content).load())
    except CheckpointError:
        raise
    except READING_ERRORS as error:
        raise _unreadable(path, error) from error


def _checked(path: Path, index: Any) -> Metadata:
    if type(index) is not Metadata or not isinstance(index.storage_data, dict):
        raise _unreadable(path, f"a {type(index).__name__}, not the index of a checkpoint")
    if not isinstance(index.state_dict_metadata, dict):
        raise _unreadable(path, "an index without tensors")
    for place, stored in index.storage_data.items():
        if type(place) is not MetadataIndex or type(stored) is not _StorageInfo:
            raise _unreadable(path, f"a place by {type(place).__name__}")
        if not is_inside(stored.relative_path):
            raise _foreign(path, f"the file name {stored.relative_path!r}")
    return index


def check_format(manifest: Manifest) -> None:
    """Check that a checkpoint is in the one format that is read.

    Raises:
        CheckpointError: It is not, or says nothing of it.
    """
    path = manifest.folder / FORMAT_FILE
    content = manifest.read(FORMAT_FILE)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(found, dict) or not found.keys() <= _FORMAT_KEYS:
        raise _unreadable(path, f"{content[:100]!r}, not the format of a checkpoint")
    backend = found.get("sharded_backend")
    if backend != _FORMAT:
        raise CheckpointError(
            "the checkpoint is in a format that is not read",
            where=path,
            got=repr(backend)[:100],
            expected=_FORMAT,
        )


def read_common(manifest: Manifest) -> dict[str, Any]:
    """The state that all ranks share: tensors and plain values.

    Raises:
        CheckpointError: The file is missing, damaged, or holds any other class.
    """
    path = manifest.folder / COMMON_FILE
    content = manifest.read(COMMON_FILE)
    common = _load_plain(path, io.BytesIO(content))
    if not isinstance(common, dict):
        raise _unreadable(path, f"a {type(common).__name__}, not a mapping")
    return common


def _load_plain(path: Path, content: io.BytesIO) -> Any:
    """``torch.load`` of tensors and plain values."""
    try:
        with _plain(path):
            return torch.load(content, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except READING_ERRORS as error:
        raise _unreadable(path, error) from error


@contextmanager
def _plain(path: Path) -> Iterator[None]:
    """Name the file and the class that ``weights_only`` refuses."""
    try:
        yield
    except pickle.UnpicklingError as error:
        if name := _refused_name(error):
            raise _foreign(path, name) from error
        raise _unreadable(path, "no tensors and plain values") from error
    except RuntimeError as error:
        if _ARCHIVE_READER not in str(error):
            raise
        raise _unreadable(path, "no archive of tensors") from error


def _refused_name(error: pickle.UnpicklingError) -> str | None:
    """The class that ``weights_only`` refused, from its message."""
    for mark in ("Unsupported global: GLOBAL ", "Trying to load unsupported GLOBAL "):
        _, found, rest = str(error).partition(mark)
        if found:
            return rest.split()[0]
    return None


class CheckpointReader(FileSystemReader):
    """torch's reader of one checkpoint, for an index that was read already.

    Args:
        manifest: The checkpoint.

    Raises:
        CheckpointError: Its index cannot be read.
    """

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(str(manifest.folder))
        self._folder = manifest.folder
        self._index = read_index(manifest)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index."""
        if self._index.storage_meta is None:
            self._index.storage_meta = StorageMeta()
        self._index.storage_meta.load_id = self.load_id
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read tensors as torch does, and objects as plain values."""
        objects = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        for item in objects:
            stored = self.storage_data[item.storage_index]
            path = self._folder / stored.relative_path
            with path.open("rb") as file:
                content = io.BytesIO(self._slice_file(file, stored).read(stored.length))
            _keep(planner, item.dest_index.fqn, _load_plain(path, content))
        of_files: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            if item.type != LoadItemType.BYTE_IO:
                name = self.storage_data[item.storage_index].relative_path
                of_files.setdefault(name, []).append(item)
        for name, items in of_files.items():
            with _plain(self._folder / name):
                super().read_data(LoadPlan(items), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _keep(planner: Any, name: str, value: Any) -> None:
    """Store a loaded object, as torch's ``DefaultLoadPlanner.load_bytes`` does.

    Transformer Engine unpickles the extra state of its layers, which is that of FP8 alone: they are
    given none.
    """
    if _EXTRA_STATE in name and isinstance(value, list):
        value = [None] * len(value)
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[name], value)
    else:
        planner.state_dict[name] = value

"""The folder of a HuggingFace checkpoint: its tensors, read from file headers, and its side files.

Only ``config.json``, the index and the headers of safetensors files are read; torch is not loaded,
and nothing that could run code is opened. The side files are all files but weights: configuration,
tokenizer, chat template. A checkpoint of ours keeps a copy of them, from which an export restores
them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from megatron_ext import files
from megatron_ext.errors import CheckpointError, refused_by_system
from megatron_ext.files import copy_files
from megatron_ext.huggingface.stored_tensors import StoredTensor, joined
from megatron_ext.huggingface.text_part import text_config, text_names, wraps_text
from megatron_ext.registry import with_near_path
from megatron_ext.tokenizers.metadata import METADATA_FILE
from megatron_ext.tokenizers.tokenizer_files import TEMPLATE_FOLDER, template_files

CONFIG_FILE: Final = "config.json"
WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
METADATA_KEY: Final = "__metadata__"

_LARGEST_HEADER: Final = 100 << 20
"""Limit of the safetensors library itself."""
_LENGTH_BYTES: Final = 8


@dataclass(frozen=True)
class CheckpointFiles:
    """A folder with ``config.json`` and safetensors files.

    Of a checkpoint that reads images too, it is the text model's configuration and tensors, where
    that is of a family (``text_part``).

    Args:
        folder: The folder.
    """

    folder: Path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The contents of ``config.json``.

        Raises:
            CheckpointError: The file is missing, or no JSON object; or of a checkpoint that reads
                images, whose tensors cannot be read.
        """
        if not self._wraps_text:
            return self._whole_config
        return text_config(self._whole_config, self._all_tensors if self.has_weights else None)

    @property
    def has_weights(self) -> bool:
        """Whether there are files of tensors."""
        return any((self.folder / name).is_file() for name in (INDEX_FILE, WEIGHTS_FILE))

    @cached_property
    def _whole_config(self) -> Mapping[str, Any]:
        return read_json(self.folder / CONFIG_FILE)

    @property
    def _wraps_text(self) -> bool:
        return wraps_text(self._whole_config)

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors by name.

        Raises:
            CheckpointError: There are no safetensors files, one is missing, truncated or malformed,
                the index does not agree with the files, or the parts of a quantised tensor do not
                fit each other.
        """
        if not (self.folder / CONFIG_FILE).is_file() or not self._wraps_text:
            return self._all_tensors
        return {name: self._all_tensors[stored] for stored, name in text_names(self._all_tensors)}

    @cached_property
    def _all_tensors(self) -> Mapping[str, StoredTensor]:
        file = self.folder / CONFIG_FILE
        config = self._whole_config if file.is_file() else {}
        return joined(self.stored, config.get("quantization_config"), where=file)

    @cached_property
    def stored(self) -> Mapping[str, StoredTensor]:
        """All tensors as the files have them, of quantised ones the parts.

        Raises:
            CheckpointError: As ``tensors``.
        """
        index = self.folder / INDEX_FILE
        if index.is_file():
            return self._indexed(index)
        single = self.folder / WEIGHTS_FILE
        if single.is_file():
            return read_header(single)
        pickled = sorted(path.name for path in self.folder.glob("*.bin"))
        raise CheckpointError(
            "the folder has no weights in safetensors files",
            where=self.folder,
            got=f"{pickled[0]}, a pickle, which could run code" if pickled else "none",
            expected=f"{WEIGHTS_FILE}, or {INDEX_FILE} with its files",
            fix="save the model again with save_pretrained of transformers"
            if pickled
            else "download the folder again, with its weights",
        )

    @property
    def weight_files(self) -> set[Path]:
        """Files with tensors of ``tensors``, or with parts of these."""
        names: Iterable[str] = self.stored
        if self._wraps_text:
            names = (name for name, _ in text_names(self.stored))
        return {self.stored[name].file for name in names}

    def _indexed(self, index: Path) -> dict[str, StoredTensor]:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(name, str) and name == os.path.basename(name) and name not in ("", "..")
            for name in weight_map.values()
        ):
            raise CheckpointError(
                "the index does not say which file has which tensor",
                where=index,
                expected="weight_map, tensors to names of files beside it",
            )
        headers = {name: read_header(self.folder / name) for name in sorted({*weight_map.values()})}
        for name, file in weight_map.items():
            if name not in headers[file]:
                raise CheckpointError(
                    f"a file has not the tensor that {INDEX_FILE} says is in it",
                    where=self.folder / file,
                    expected=name,
                    fix="download that file again",
                )
        return {name: headers[file][name] for name, file in weight_map.items()}


def is_checkpoint_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a folder has a ``config.json`` that names an architecture."""
    file = Path(path) / CONFIG_FILE
    if not file.is_file():
        return False
    try:
        config = files.read_json(file)
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and ("architectures" in config or "model_type" in config)


def check_checkpoint_folder(folder: Path) -> None:
    """Check that a folder is one of HuggingFace, by its ``config.json``.

    Raises:
        CheckpointError: It is not.
    """
    if not is_checkpoint_folder(folder):
        is_there = folder.is_dir()
        raise CheckpointError(
            "the model is no HuggingFace folder",
            where=folder,
            got=f"no {CONFIG_FILE} with an architecture" if is_there else "no such folder",
            expected=f"{CONFIG_FILE}, weights and tokenizer",
            fix="export a run or a checkpoint with megatron-ext export-hf"
            if is_there
            else with_near_path("correct the path", folder),
        )


def read_json(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        CheckpointError: The file is missing, or holds something else.
    """
    try:
        values = files.read_json(file)
    except OSError as error:
        raise CheckpointError("cannot read the file", where=file, got=error.strerror) from error
    except ValueError as error:
        raise CheckpointError("the file is not JSON", where=file, got=error) from error
    if not isinstance(values, dict):
        raise CheckpointError("the file holds no JSON object", where=file)
    return values


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read the tensors of a safetensors file from its header alone.

    Raises:
        CheckpointError: The file is missing, no safetensors file, or truncated.
    """
    with refused_by_system(
        "cannot read a file of the checkpoint",
        where=file,
        fix="download it again",
        kind=CheckpointError,
    ):
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            text = stream.read(length) if length <= min(size, _LARGEST_HEADER) else b""
    try:
        header = files.parse_json(text)
        header.pop(METADATA_KEY, None)
        tensors = {
            name: StoredTensor(file=file, name=name, dtype=row["dtype"], shape=tuple(row["shape"]))
            for name, row in header.items()
        }
        end = max((row["data_offsets"][1] for row in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            "the file is not a safetensors file, or is cut short",
            where=file,
            got=f"{size} bytes",
            fix="download it again",
        ) from error
    if _LENGTH_BYTES + length + end != size:
        raise CheckpointError(
            "the file is not as long as its header says",
            where=file,
            got=f"{size} bytes",
            expected=f"{_LENGTH_BYTES + length + end}",
            fix="download it again",
        )
    return tensors


SIDE_FOLDER: Final = "huggingface"
"""Folder of the side files in a run and in its checkpoints."""

GENERATION_FILE: Final = "generation_config.json"


def generation_stops(folder: str | Path) -> frozenset[int]:
    """Ids with which a model ends a text, by the generation configuration in its folder or in that
    of a run; none without one.

    Raises:
        CheckpointError: A file that is no generation configuration.
    """
    for path in (Path(folder, GENERATION_FILE), Path(folder, SIDE_FOLDER, GENERATION_FILE)):
        if path.is_file():
            found = read_json(path).get("eos_token_id")
            ids = found if isinstance(found, list) else [] if found is None else [found]
            if not all(type(token) is int for token in ids):
                raise CheckpointError(
                    "a generation configuration does not name its stop tokens",
                    where=str(path),
                    got=repr(found),
                    expected="an id or a list of ids as eos_token_id",
                )
            return frozenset(ids)
    return frozenset()


TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
)


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """The files of a HuggingFace tokenizer in a folder, by their relative paths."""
    named = {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}
    return named | {f"{TEMPLATE_FOLDER}/{file.name}": file for file in template_files(folder)}


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has files of a tokenizer, or one of any library that was saved there."""
    return any((folder / name).is_file() for name in (*TOKENIZER_FILES, METADATA_FILE))


_COMMON_SIDE_FILES: Final = (CONFIG_FILE, GENERATION_FILE, *TOKENIZER_FILES)

_OF_WEIGHTS: Final = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"),
    *(".index.json", ".npz"),
)
"""Suffixes of files that hold weights or an index of them."""

_OF_OTHER_WEIGHTS: Final = ("README.md", "adapter_config.json", "trainer_state.json")
"""Files that describe only the weights that they came with."""

_LARGEST: Final = 1 << 26
"""Most bytes of a side file with an unknown name."""


def side_files(folder: Path) -> dict[str, Path]:
    """The side files of a HuggingFace folder, or of a checkpoint's copy of one, by relative path.

    All files but weights and other large ones: tokenizers have files of many names.
    """
    beside = {
        path.name: path
        for path in sorted(folder.iterdir())
        if path.is_file() and (path.name in _COMMON_SIDE_FILES or _is_small(path))
    }
    return beside | tokenizer_files(folder)


def _is_small(path: Path) -> bool:
    is_of_weights = path.name.endswith(_OF_WEIGHTS) or path.name in _OF_OTHER_WEIGHTS
    return not (is_of_weights or path.name.startswith(".") or path.stat().st_size > _LARGEST)


def kept_folder(start: Path) -> Path | None:
    """Folder of the side files of a checkpoint, HuggingFace's or ours; None without any."""
    if is_checkpoint_folder(start):
        return start
    copies = start / SIDE_FOLDER
    return copies if is_checkpoint_folder(copies) else None


def copy_side_files(start: Path, target: Path) -> None:
    """Copy the side files of a checkpoint to ``target``, atomically, unless it exists.

    The temporary folder begins with a dot; one left by an interrupted copy is replaced.
    """
    source = kept_folder(start)
    if source is None or target.exists():
        return
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    copy_files(side_files(source), partial)
    if wraps_text(read_json(source / CONFIG_FILE)):
        # What is trained is the text model alone.
        text = json.dumps(CheckpointFiles(source).config, indent=2, ensure_ascii=False)
        (partial / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
    partial.rename(target)

"""Models by their names on the HuggingFace hub: the local folder, downloaded once.

Only configuration, tokenizer and weights in safetensors files are fetched; nothing that could run
code. A folder in the hub's cache is used without a request, so that ranks agree and a resumed run
reads the same files.
"""

from __future__ import annotations

import os
import re
from fnmatch import fnmatch
from functools import cache
from glob import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from megatron_ext import files
from megatron_ext.errors import CheckpointError
from megatron_ext.huggingface.checkpoint_files import (
    INDEX_FILE,
    TOKENIZER_FILES,
    WEIGHTS_FILE,
    is_checkpoint_folder,
)
from megatron_ext.registry import with_near_path
from megatron_ext.tokenizers.tokenizer_files import TEMPLATE_FOLDER

_NAME: Final = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII
)
_NO_OWNERS: Final = ("models", "datasets", "spaces", "docs")
"""Pages of the hub, so names that no owner on it can have."""

_FETCHED: Final = (
    *("config.json", "generation_config.json", *TOKENIZER_FILES, "*.tiktoken"),
    *("model*.safetensors", INDEX_FILE),
)
_SECONDS_TO_ANSWER: Final = 5.0


def hub_model(path: str, *, where: str) -> Path | None:
    """The local folder of a model that is named as on the hub, or None for a path.

    ``OWNER/NAME`` or ``OWNER/NAME@REVISION``, with a branch, a tag or a commit, is such a name,
    unless the path or a folder OWNER exists, or OWNER is a page of the hub, such as ``models``:
    then it is a path, if perhaps a misspelled one. Asks the hub, or downloads, at most once in a
    process.

    Args:
        where: What names the model, for errors.

    Raises:
        CheckpointError: The hub does not have the model or cannot be reached, or the model has no
            weights in safetensors files; or the hub's library is not installed.
    """
    named = _NAME.fullmatch(path)
    if named is None or ".." in path or os.path.exists(path) or _is_local(path):
        return None
    if find_spec("huggingface_hub") is None:
        raise CheckpointError(
            "the hub cannot be asked without the package huggingface_hub",
            where=where,
            got=f"{path}, which does not exist here",
            fix='correct it, or for a name on the hub: pip install "megatron-ext[huggingface]"',
        )
    return _local_folder(named["name"], named["revision"], where)


def _is_local(path: str) -> bool:
    """Whether the first part of a path is a folder here, or cannot be an owner on the hub."""
    first = path.partition("/")[0]
    return first in _NO_OWNERS or os.path.exists(first)


@cache
def _local_folder(name: str, revision: str | None, where: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    try:
        cached = Path(
            snapshot_download(name, revision=revision, allow_patterns=[], local_files_only=True)
        )
        if _is_complete(cached):
            return cached
    except Exception:
        # Not in the cache; releases of the library raise exceptions of different libraries.
        pass
    try:
        # Asked first, because this call has a timeout.
        info = HfApi().model_info(name, revision=revision, timeout=_SECONDS_TO_ANSWER)
        found = {sibling.rfilename for sibling in info.siblings or []}
        if not found & {WEIGHTS_FILE, INDEX_FILE}:
            raise _without_safetensors(name, found, where)
        wanted = [file for file in found if _is_wanted(file)]
        folder = snapshot_download(
            name, revision=info.sha or revision, allow_patterns=sorted(map(escape, wanted))
        )
    except CheckpointError:
        raise
    except Exception as error:
        raise _not_fetched(name, revision, where, error) from error
    return Path(folder)


def _is_wanted(file: str) -> bool:
    """Whether a file of the hub, by its relative path, is fetched: no folder but of templates."""
    folder, _, name = file.rpartition("/")
    patterns = ("*.jinja",) if folder == TEMPLATE_FOLDER else () if folder else _FETCHED
    return any(fnmatch(name, pattern) for pattern in patterns)


def _is_complete(folder: Path) -> bool:
    """Whether a folder has a configuration and all of its weights."""
    if not is_checkpoint_folder(folder):
        return False
    if (folder / WEIGHTS_FILE).is_file():
        return True
    try:
        weight_map = files.read_json(folder / INDEX_FILE)["weight_map"]
        return all((folder / name).is_file() for name in set(weight_map.values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _without_safetensors(name: str, found: set[str], where: str) -> CheckpointError:
    pickled = sorted(file for file in found if file.endswith((".bin", ".pt", ".pth")))
    return CheckpointError(
        "the model on the hub has no weights in safetensors files",
        where=where,
        got=f"{name} with {pickled[0]}, a pickle, which could run code" if pickled else name,
        expected=f"{WEIGHTS_FILE} or {INDEX_FILE}",
        fix="name a revision with safetensors files, OWNER/NAME@REVISION",
    )


def _not_fetched(name: str, revision: str | None, where: str, error: Exception) -> CheckpointError:
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    version = f" --revision {revision}" if revision else ""
    return CheckpointError(
        "no checkpoint found",
        where=where,
        got=f"{name}, which does not exist here; the hub: {reason}",
        expected="a HuggingFace folder, a run, its checkpoints or one iteration in them, or the "
        "name of a model on the hub",
        fix=with_near_path(
            f"correct it, or fetch the model where there is a network: hf download {name}{version}",
            name,
        ),
    )

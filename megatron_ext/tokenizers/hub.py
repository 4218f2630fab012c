"""Tokenizers on the HuggingFace hub: their files in its cache, fetched where they are missing."""

from __future__ import annotations

import os
import re
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

from megatron_ext.errors import TokenizerError

# One or two words. What ends like a tokenizer file is a path that somebody misspelled.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_FILE_ENDING = re.compile(r"\.(json|model|tiktoken|txt|jinja|vocab|bin)$")
# A tokenizer is read from the first of these that it has.
_VOCABULARIES = (("tokenizer.json",), ("tekken.json", "tokenizer.model", "*.tiktoken"))
_CONFIG = "tokenizer_config.json"
_BESIDE = (_CONFIG, "chat_template.jinja")
_SECONDS_TO_ANSWER = 5.0


def is_hub_name(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` could be a name on the hub: ``gpt2`` or ``organisation/model``."""
    name = os.fspath(path)
    return bool(_NAME.fullmatch(name)) and not _FILE_ENDING.search(name) and ".." not in name


def local_files(name: str) -> Path:
    """The folder on this machine with the files of a tokenizer that is on the hub.

    What the hub's cache holds with its configuration is taken without asking the network, so that
    ranks agree and a run that resumes reads what it began with. The rest is fetched; any number of
    processes may do so at once, for the hub's library locks and renames what it writes.

    Raises:
        TokenizerError: The hub does not have it or cannot be reached, or its library is missing.
    """
    if not is_hub_name(name):
        raise _not_found(name, None)
    if find_spec("huggingface_hub") is None:
        raise _not_found(name, "the package huggingface_hub is not installed")
    cached = _cached_folder(name)
    if cached is not None and _is_complete(cached):
        return cached
    try:
        return _fetch(name)
    except Exception as error:
        # Each release of the library raises the exceptions of another network library.
        if cached is not None and _vocabulary_in([file.name for file in cached.iterdir()]):
            return cached
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise _not_found(name, reason) from error


def _cached_folder(name: str) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        # No patterns: the library need not judge what is missing.
        return Path(snapshot_download(name, allow_patterns=[], local_files_only=True))
    except Exception:
        # As above; whatever is wrong with the cache, fetching says it better.
        return None


def _is_complete(folder: Path) -> bool:
    """Whether both files are there: other tools cache the first one alone."""
    return all((folder / name).is_file() for name in (*_VOCABULARIES[0], _CONFIG))


def _fetch(name: str) -> Path:
    """Fetch the files of the first vocabulary that there is, with what lies beside it."""
    from huggingface_hub import HfApi, snapshot_download

    # Asked first because this call, unlike the other, can be told how long to wait.
    files = HfApi().model_info(name, timeout=_SECONDS_TO_ANSWER).siblings or []
    vocabulary = _vocabulary_in([file.rfilename for file in files])
    if vocabulary is None:
        raise LookupError("there is no tokenizer in it")
    return Path(snapshot_download(name, allow_patterns=[*vocabulary, *_BESIDE]))


def _vocabulary_in(names: list[str]) -> tuple[str, ...] | None:
    top = [name for name in names if "/" not in name]
    return next(
        (v for v in _VOCABULARIES if any(fnmatch(name, p) for name in top for p in v)), None
    )


def _not_found(name: str, reason: object) -> TokenizerError:
    return TokenizerError(
        "the tokenizer does not exist",
        got=reason,
        expected="a file or a directory on this machine, or a name on the HuggingFace hub",
        where=name,
    )

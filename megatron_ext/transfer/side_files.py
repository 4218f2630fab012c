"""Files beside the weights: configuration, generation config and the new tokenizer's files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import numpy as np

from megatron_ext.errors import CheckpointError, MegatronExtError
from megatron_ext.files import copy_files
from megatron_ext.huggingface import checkpoint_files
from megatron_ext.huggingface.checkpoint_files import CONFIG_FILE
from megatron_ext.tokenizers import MegatronTokenizerText, TokenizerConfig, build_tokenizer
from megatron_ext.tokenizers.assets import PROMPT_FILE
from megatron_ext.tokenizers.base import ByteTokenizer
from megatron_ext.tokenizers.metadata import METADATA_FILE
from megatron_ext.tokenizers.tokenizer_files import TEMPLATE_FOLDER
from megatron_ext.transfer.row_sources import RowSources

_EOS: Final = "eos_token_id"

_OF_OLD_IDS: Final = (
    *("bad_words_ids", "begin_suppress_tokens", "decoder_start_token_id", "force_words_ids"),
    *("forced_bos_token_id", "forced_decoder_ids", "forced_eos_token_id", "sequence_bias"),
    *("suppress_tokens", "prompt_lookup_num_tokens_ids"),
)
"""Keys of a generation config that name ids of the old vocabulary."""


class NewIds(NamedTuple):
    """Ids for ``config.json`` and the generation config."""

    roles: dict[str, int | None]
    """BOS, EOS and padding."""

    stops: list[int]
    """Ids that end a generated text: EOS, and what the old stop tokens became."""

    lost_stops: list[int]
    """Old stop ids that no new token stands for."""


def new_ids(tokenizer: ByteTokenizer, sources: RowSources, generation: Mapping[str, Any]) -> NewIds:
    """Ids of the new vocabulary for the roles, and for the stop tokens of the old configuration."""
    given = generation.get(_EOS)
    old_stops = [] if given is None else given if isinstance(given, list) else [given]
    of_old = {int(old): new for new, old in enumerate(sources.copied) if sources.is_control[new]}
    became = [of_old.get(stop) for stop in old_stops]
    stops = [stop for stop in became if stop is not None]
    if tokenizer.eos_id is not None:
        stops.insert(0, tokenizer.eos_id)
    roles = {
        "bos_token_id": tokenizer.bos_id,
        _EOS: tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    # The old end of a text is the new one by its role, whatever it is copied from.
    lost = [old for old, new in zip(old_stops[1:], became[1:], strict=True) if new is None]
    return NewIds(roles, list(dict.fromkeys(stops)), lost)


def new_generation(generation: Mapping[str, Any], ids: NewIds) -> tuple[dict[str, Any], list[str]]:
    """The generation config of the new vocabulary, and the keys that were left out."""
    dropped = [key for key in _OF_OLD_IDS if generation.get(key) is not None]
    kept = {key: value for key, value in generation.items() if key not in _OF_OLD_IDS}
    stops: int | list[int] | None = ids.roles[_EOS]
    if isinstance(generation.get(_EOS), list) and ids.stops:
        stops = ids.stops
    return {**kept, **ids.roles, _EOS: stops}, dropped


def tokenizer_files(tokenizer: MegatronTokenizerText, folder: Path) -> dict[str, Path]:
    """Files of the tokenizer and other tokenizer files of its folder, by name."""
    saved = (METADATA_FILE, PROMPT_FILE)
    beside = {name: folder / name for name in saved if (folder / name).is_file()}
    beside |= checkpoint_files.tokenizer_files(folder)
    named = {
        name if name.startswith(TEMPLATE_FOLDER) else file.name: file
        for name, file in tokenizer.files().items()
    }
    return beside | named


def check_copies(
    tokenizer: MegatronTokenizerText,
    folder: Path,
    files: Mapping[str, Path],
    config: Mapping[str, Any],
) -> None:
    """Check that copies of the files beside a model's configuration give the same tokenizer.

    Raises:
        CheckpointError: They give another tokenizer, or none.
    """
    with TemporaryDirectory() as copy:
        copy_files(files, Path(copy))
        (Path(copy) / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
        try:
            found = build_tokenizer(TokenizerConfig(model=copy)).fingerprint()
        except MegatronExtError as error:
            found = str(error).replace(copy, "the copy")
    if found != tokenizer.fingerprint():
        raise CheckpointError(
            "a copy of the new tokenizer's files is not the tokenizer",
            where=folder,
            got=found,
            expected=f"the vocabulary {tokenizer.fingerprint()[:12]}",
            fix="write it to a folder of its own first: tokenizer.save_pretrained(folder)",
        )


def names_of(tokenizer: ByteTokenizer, ids: np.ndarray) -> list[str]:
    """Names of some tokens, or their ids where they have none."""
    return [tokenizer.id_to_token(int(i)) or str(int(i)) for i in ids]

"""What a HuggingFace folder holds besides weights: configuration, generation, tokenizer, template.

A checkpoint of ours keeps these as they were, in a folder of that name beside its tokenizer, and an
export puts them back.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from megatron_ext.huggingface.checkpoint_files import CONFIG_FILE, is_checkpoint_folder

SIDE_FOLDER: Final = "huggingface"
"""Name of the folder in a run and in its checkpoints."""

GENERATION_FILE: Final = "generation_config.json"
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


def side_files(folder: Path) -> list[Path]:
    """Those that are there, in a HuggingFace folder or in what a checkpoint kept of one."""
    names = (CONFIG_FILE, GENERATION_FILE, *TOKENIZER_FILES)
    return [folder / name for name in names if (folder / name).is_file()]


def kept_folder(start: Path) -> Path | None:
    """Where a checkpoint, of HuggingFace or of ours, has them; None where it has none."""
    if is_checkpoint_folder(start):
        return start
    kept = start / SIDE_FOLDER
    return kept if is_checkpoint_folder(kept) else None


def copy_side_files(start: Path, target: Path) -> None:
    """Copy them from a checkpoint to a new folder, which appears whole; nothing where it is there.

    A folder of which the copy was cut short begins with a dot and is replaced.
    """
    source = kept_folder(start)
    if source is None or target.exists():
        return
    part = target.with_name(f".{target.name}.partial")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for file in side_files(source):
        shutil.copyfile(file, part / file.name)
    part.rename(target)

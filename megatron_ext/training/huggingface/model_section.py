"""What a configuration leaves out of a model whose weights come from HuggingFace."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ext.huggingface.any_model import any_model_settings
from megatron_ext.huggingface.checkpoint_files import CheckpointFiles
from megatron_ext.huggingface.model_settings import model_settings
from megatron_ext.huggingface.side_files import TOKENIZER_FILES, kept_folder
from megatron_ext.training.checkpoint_folder import latest_checkpoint


def with_huggingface_models(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a ``DistillConfig``, with models and tokenizers that follow from folders.

    A model is taken from the folder that ``hf`` names, or that its weights come from: of
    HuggingFace, or a checkpoint of ours that was. What is given stays. So does what is no mapping,
    for those who check it. Of a teacher that transformers runs only sizes are taken.

    Raises:
        CheckpointError: The folder is of a model that megatron-core has not, where that runs it.
    """
    filled = _with_model(values, "student", values.get("initial_checkpoint"))
    teacher = values.get("teacher")
    if isinstance(teacher, Mapping):
        filled["teacher"] = _with_model(teacher, "model", teacher.get("checkpoint"))
    teachers = values.get("teachers")
    if isinstance(teachers, Mapping):
        filled["teachers"] = {
            name: _with_model(its, "model", its.get("checkpoint"))
            if isinstance(its, Mapping)
            else its
            for name, its in teachers.items()
        }
    elif isinstance(teachers, list):
        filled["teachers"] = [
            _with_model(its, "model", its.get("checkpoint")) if isinstance(its, Mapping) else its
            for its in teachers
        ]
    return filled


def _with_model(section: Mapping[str, Any], key: str, checkpoint: object) -> dict[str, Any]:
    """A section with its model, under ``key``, and its tokenizer filled in."""
    model, filled = section.get(key), dict(section)
    given = {} if model is None else model
    if not isinstance(given, Mapping):
        return filled
    folder = _folder(given.get("hf") or checkpoint)
    if folder is None:
        return filled
    files = CheckpointFiles(folder)
    is_run_by_transformers = section.get("library") == "huggingface"
    settings = any_model_settings(files) if is_run_by_transformers else model_settings(files)
    filled[key] = {**{k: v for k, v in settings.items() if v is not None}, **given}
    tokenizer = section.get("tokenizer")
    has_one = any((folder / name).is_file() for name in TOKENIZER_FILES)
    is_open = tokenizer is None or (isinstance(tokenizer, Mapping) and "model" not in tokenizer)
    if has_one and is_open:
        filled["tokenizer"] = {**(tokenizer or {}), "model": str(folder)}
    return filled


def _folder(path: object) -> Path | None:
    """The folder with the ``config.json`` of a model, where there is one."""
    if not isinstance(path, str):
        return None
    folder = Path(path)
    kept = kept_folder(folder)
    if kept is None and folder.is_dir():
        latest = latest_checkpoint(folder)
        kept = kept_folder(latest) if latest else None
    return kept

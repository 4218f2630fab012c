"""The tokenizer that a checkpoint was trained with, and checks of the one it is used with.

A checkpoint of ours contains its tokenizer and its fingerprint; a HuggingFace folder has a number
of rows, and the files of its tokenizer or none.
"""

from __future__ import annotations

import filecmp
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from megatron_ext.conversation.message import DEFAULT_TEMPLATE
from megatron_ext.errors import CheckpointError, MegatronExtError, TokenizerError
from megatron_ext.huggingface.checkpoint_files import (
    TOKENIZER_FILES,
    CheckpointFiles,
    has_tokenizer,
    is_checkpoint_folder,
    kept_folder,
)
from megatron_ext.huggingface.model_settings import any_model_settings
from megatron_ext.tokenizers import (
    MegatronTokenizer,
    MegatronTokenizerText,
    TokenizerConfig,
    build_tokenizer,
)
from megatron_ext.tokenizers.assets import file_names
from megatron_ext.tokenizers.token_bytes import TokenBytes
from megatron_ext.tokenizers.tokenizer_files import TEMPLATE_FILE, TEMPLATE_FOLDER
from megatron_ext.training.run_folder import TOKENIZER_FOLDER
from megatron_ext.training.run_plan import TeacherPlan


class KeptTokenizer:
    """The tokenizer of one of our checkpoints, which may hold HuggingFace's files of it too.

    Args:
        checkpoint: One iteration's folder.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint

    @cached_property
    def tokenizer(self) -> MegatronTokenizerText | None:
        """The tokenizer; None where the checkpoint has none.

        Raises:
            TokenizerError: Its files are not whole.
        """
        folder = self._checkpoint / TOKENIZER_FOLDER
        return MegatronTokenizer.from_pretrained(folder) if folder.is_dir() else None

    @property
    def vocab_size(self) -> int | None:
        """Number of its ids."""
        return None if self.tokenizer is None else self.tokenizer.vocab_size

    @cached_property
    def is_of_huggingface(self) -> bool:
        """Whether the checkpoint's HuggingFace files are of this tokenizer."""
        kept = kept_folder(self._checkpoint)
        if kept is None or not has_tokenizer(kept):
            return False
        if self.tokenizer is None:
            return True
        try:
            theirs = build_tokenizer(TokenizerConfig(model=str(kept)))
        except TokenizerError:
            # The library cannot be told from the folder alone, as for files of tiktoken.
            return self._has_files_in(kept)
        has_same_templates = theirs.chat_templates == self.tokenizer.chat_templates
        return has_same_templates and theirs.fingerprint() == self.tokenizer.fingerprint()

    def _has_files_in(self, folder: Path) -> bool:
        """Whether every file of the tokenizer is in a folder, by whatever name."""
        assert self.tokenizer is not None
        files = list(file_names(self.tokenizer))
        others = [other for other in folder.iterdir() if other.is_file()]
        return bool(files) and all(
            any(filecmp.cmp(file, other, shallow=False) for other in others) for file in files
        )

    def files(self) -> dict[str, bytes]:
        """Files and chat templates of the tokenizer, by the names that transformers reads.

        All that was saved with it where transformers reads no such tokenizer.
        """
        if self.tokenizer is None:
            return {}
        names = {
            file: name
            for file, name in file_names(self.tokenizer).items()
            if Path(name).parent.name != TEMPLATE_FOLDER
        }
        if not names or not {*names.values()} <= {*TOKENIZER_FILES}:
            folder = self._checkpoint / TOKENIZER_FOLDER
            saved = [path for path in folder.rglob("*") if path.is_file()]
            return {path.relative_to(folder).as_posix(): path.read_bytes() for path in saved}
        files = {name: file.read_bytes() for file, name in names.items()}
        for name, source in self.tokenizer.chat_templates.items():
            is_default = name == DEFAULT_TEMPLATE
            place = TEMPLATE_FILE if is_default else f"{TEMPLATE_FOLDER}/{name}.jinja"
            files[place] = source.encode()
        return files


_COMMON_FILE: Final = "common.pt"


def checkpoint_record(checkpoint: Path) -> Mapping[str, Any]:
    """The record of the run that saved a checkpoint; empty for one of another program.

    Args:
        checkpoint: One iteration's folder.

    Raises:
        CheckpointError: A file of it is missing, or cannot be opened.
    """
    import torch

    try:
        # Plain values alone: no code from a checkpoint is run.
        common = torch.load(checkpoint / _COMMON_FILE, weights_only=True, map_location="cpu")
    except FileNotFoundError as error:
        raise CheckpointError(
            "the checkpoint cannot be read",
            where=checkpoint,
            got=f"no {_COMMON_FILE}",
            fix="copy it again: a file of it is missing",
        ) from error
    except OSError as error:
        raise CheckpointError(
            "the checkpoint cannot be read",
            where=checkpoint / _COMMON_FILE,
            got=error.strerror or error,
        ) from error
    except Exception:
        # Bytes that were damaged raise anything; whoever loads the checkpoint says so.
        return {}
    run = common.get("run") if isinstance(common, dict) else None
    return run if isinstance(run, Mapping) else {}


_ADDED: Final = 64
"""Most ids without a row that added tokens explain; Gemma 3 has one."""

_PADDING: Final = 1024
"""Rows without an id that padding explains in any model: Command R has 971, BLOOM 200."""

_LARGE_PADDING: Final = 2560
"""Those that padding explains where they are at most ``1 / _LARGE_SHARE`` of all rows:
DeepSeekMoE has 2,385 of 102,400, gpt-oss 1,069 of 201,088."""

_LARGE_SHARE: Final = 32


def row_misfit(vocab_size: int, rows: int) -> str | None:
    """Why a tokenizer of ``vocab_size`` ids cannot be that of a model; None where it can be.

    Args:
        rows: Rows of the model's embedding, without the padding of a layout.
    """
    text = f"{vocab_size:,} ids for a model with {rows:,} rows"
    if vocab_size - rows > _ADDED:
        return text
    explained = max(_PADDING, min(_LARGE_PADDING, rows // _LARGE_SHARE))
    if rows - vocab_size > explained:
        return (
            f"{text}, of which {rows - vocab_size:,} are without an id, and padding explains "
            f"{explained:,} at most"
        )
    return None


def check_same_tokenizer(checkpoint: Path, tokenizer: MegatronTokenizerText) -> None:
    """Check that a checkpoint of ours was saved with this vocabulary, if it has a fingerprint.

    Raises:
        CheckpointError: It was saved with another one.
    """
    if _saved_with(checkpoint) not in (None, tokenizer.fingerprint()):
        raise _error(checkpoint, tokenizer, _of_other_hash(checkpoint, tokenizer))


def teacher_doubts(teacher: TeacherPlan, tokenizer: MegatronTokenizerText) -> list[str]:
    """``tokenizer_doubts`` of a teacher of a run."""
    return tokenizer_doubts(
        teacher.checkpoint,
        tokenizer,
        allow_other=teacher.config.allow_other_tokenizer,
        switch=f"set {teacher.section}.allow_other_tokenizer",
    )


def tokenizer_doubts(
    checkpoint: Path, tokenizer: MegatronTokenizerText, *, allow_other: bool, switch: str
) -> list[str]:
    """Warnings about a tokenizer that may not be the model's; none where it is.

    Equal ids of both tokenizers must be the same text, or both control tokens, and the model must
    have as many rows as ids, apart from padding (``row_misfit``). A few more ids in either, other
    names of control tokens, and anything that cannot be compared are warnings.

    Args:
        checkpoint: One iteration's folder, or one of HuggingFace.
        tokenizer: The tokenizer that the model is used with.
        allow_other: Warn in place of an error.
        switch: What a user does to allow another tokenizer, as an imperative clause.

    Raises:
        CheckpointError: The model was trained with another tokenizer, or has too few rows or too
            many.
    """
    reason, doubts = _compared_with_own(checkpoint, tokenizer)
    rows = _rows(checkpoint)
    if rows is not None:
        reason = reason or row_misfit(tokenizer.vocab_size, rows)
        missing = tokenizer.vocab_size - rows
        if missing > 0 and (reason is None or allow_other):
            doubts.append(f"the model has no rows for the last {missing:,} ids: theirs are zero")
    if reason is None:
        return doubts
    if not allow_other:
        raise _error(checkpoint, tokenizer, reason, switch)
    return [f"another tokenizer than the model's is allowed: {reason}", *doubts]


def _compared_with_own(
    checkpoint: Path, tokenizer: MegatronTokenizerText
) -> tuple[str | None, list[str]]:
    """The reason why the tokenizer is not the checkpoint's, None where it is; and warnings."""
    saved_with = None if is_checkpoint_folder(checkpoint) else _saved_with(checkpoint)
    if saved_with == tokenizer.fingerprint():
        return None, []
    unknown = "no tokenizer comes with the checkpoint"
    try:
        own = _own_tokenizer(checkpoint, tokenizer)
    except MegatronExtError as error:
        own, unknown = None, f"the checkpoint's own tokenizer cannot be read ({error})"
    if own is not None:
        return _compared(own, tokenizer)
    if saved_with is not None:
        return _of_other_hash(checkpoint, tokenizer), []
    return None, [f"{unknown}: whether the model was trained with this one is not known"]


def _own_tokenizer(
    checkpoint: Path, configured: MegatronTokenizerText
) -> MegatronTokenizerText | None:
    """The tokenizer that comes with a checkpoint; None where there is none.

    Raises:
        MegatronExtError: It cannot be read.
    """
    if not is_checkpoint_folder(checkpoint):
        return KeptTokenizer(checkpoint).tokenizer
    if not has_tokenizer(checkpoint):
        return None
    path = None if configured.path is None else Path(configured.path).resolve()
    if path is not None and checkpoint.resolve() in (path, path.parent):
        return configured
    return build_tokenizer(TokenizerConfig(model=str(checkpoint)))


def _compared(
    own: MegatronTokenizerText, configured: MegatronTokenizerText
) -> tuple[str | None, list[str]]:
    if own.fingerprint() == configured.fingerprint():
        return None, []
    theirs, given = TokenBytes.of(own).tokens(), TokenBytes.of(configured).tokens()
    shared = min(len(theirs), len(given))
    others = [i for i in range(shared) if theirs[i] != given[i]]
    if others:
        return (
            f"{len(others):,} of {shared:,} ids mean something else, such as {others[0]}: "
            f"{configured.id_to_token(others[0])!r}, in the model {own.id_to_token(others[0])!r}"
        ), []
    doubts = []
    renamed = [
        i
        for i in range(shared)
        if theirs[i] is None and own.id_to_token(i) != configured.id_to_token(i)
    ]
    if renamed:
        doubts.append(
            f"{len(renamed):,} control tokens have other names than in the checkpoint's tokenizer, "
            f"such as {renamed[0]}: {configured.id_to_token(renamed[0])!r}, there "
            f"{own.id_to_token(renamed[0])!r}"
        )
    if len(theirs) != len(given):
        doubts.append(
            f"the tokenizer has {len(given):,} ids, and the checkpoint's own {len(theirs):,}"
        )
    return None, doubts


def _rows(checkpoint: Path) -> int | None:
    """Rows of a model's embedding without the padding of a layout; None where they are not known.

    A run makes the rows of its own tokenizer, so that its checkpoints need no comparison; an import
    has those of the folder that it was made from.
    """
    if is_checkpoint_folder(checkpoint):
        return int(any_model_settings(CheckpointFiles(checkpoint))["vocab_size"])
    config = checkpoint_record(checkpoint).get("config", {})
    rows = None if "training" in config else config.get("student", {}).get("vocab_size")
    return None if rows is None else int(rows)


def _saved_with(checkpoint: Path) -> str | None:
    """The fingerprint of the tokenizer that a checkpoint of ours was saved with, if recorded."""
    fingerprint = checkpoint_record(checkpoint).get("tokenizer_fingerprint")
    return None if fingerprint is None else str(fingerprint)


def _of_other_hash(checkpoint: Path, tokenizer: MegatronTokenizerText) -> str:
    given, saved = tokenizer.fingerprint(), str(_saved_with(checkpoint))
    return f"vocabulary {given[:12]}, in the model {saved[:12]}"


def _error(
    checkpoint: Path, tokenizer: MegatronTokenizerText, reason: str, switch: str | None = None
) -> CheckpointError:
    return CheckpointError(
        "the model was trained with another tokenizer",
        where=checkpoint,
        got=f"{tokenizer.path or tokenizer.library}: {reason}",
        expected="the tokenizer that it was trained with",
        fix="configure that one" + (f", or {switch} if another one is meant" if switch else ""),
    )

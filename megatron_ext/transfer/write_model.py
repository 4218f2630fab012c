"""Writer of HuggingFace checkpoints with the vocabulary of another tokenizer.

Tensors are streamed: one file of them is in memory at a time. The embedding, and a head of its own,
get the rows of ``shares``; everything else is copied. A tied head is the embedding, so the rule of
the input holds for both, unless the model is untied.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from megatron_ext.constants import __version__
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.huggingface.checkpoint_files import (
    CONFIG_FILE,
    GENERATION_FILE,
    CheckpointFiles,
    StoredTensor,
    read_json,
    side_files,
)
from megatron_ext.huggingface.families import FAMILIES, HEAD
from megatron_ext.huggingface.model_settings import family_of
from megatron_ext.huggingface.tensor_files import (
    TensorPlan,
    TensorReader,
    check_target,
    shards,
    write_checkpoint,
)
from megatron_ext.projection import SparseProjection
from megatron_ext.tokenizers import MegatronTokenizerText, TokenizerConfig, build_tokenizer
from megatron_ext.transfer.digits import digit_scheme, keep_digits
from megatron_ext.transfer.hypernetwork import Hypernetwork, rows_fingerprint
from megatron_ext.transfer.matching_pursuit import grown_rows, pursued_shares
from megatron_ext.transfer.row_sources import RowSources, row_sources
from megatron_ext.transfer.shares import (
    Shares,
    TransferMethod,
    VocabularyPart,
    new_rows,
    piece_shares,
    projection_shares,
)
from megatron_ext.transfer.side_files import (
    check_copies,
    names_of,
    new_generation,
    new_ids,
    tokenizer_files,
)

REPORT_FILE: Final = "transfer.json"
HEAD_NAME: Final = HEAD.parts[0].name
_DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """Options of a transfer."""

    method: TransferMethod = "fvt"
    donor: Path | None = None
    """Folder of a model with the new vocabulary, for ``omp``."""

    hypernet: Path | None = None
    """Folder of a hypernetwork that was trained for the model, for ``hypernet``."""

    k: int = 64
    """Anchors of each row of ``omp``."""

    calibrates_norms: bool = False
    """Whether rows that are no copies get the mean norm of the old ones."""

    unties: bool = False
    """Whether a tied head becomes a matrix of its own, by the rule of heads."""

    pad_to_multiple_of: int = 1
    """The model's rows are a multiple of this; rows beyond the ids are zero."""

    projection: Path | None = None
    """File with the shares of old tokens in new ones, in place of a method's."""

    keeps_digits: bool = False
    """Whether numbers are cut as the old tokenizer cuts them; changes the new tokenizer."""

    max_shard_bytes: int = 5 * 10**9

    def __post_init__(self) -> None:
        if (self.method == "omp") != (self.donor is not None):
            raise ConfigError(
                "omp reads a donor, and no other method does",
                where="--donor",
                got=f"--method {self.method} and {self.donor or 'no donor'}",
                fix="name a model with the new vocabulary, or another method",
            )
        if (self.method == "hypernet") != (self.hypernet is not None):
            raise ConfigError(
                "hypernet reads a hypernetwork, and no other method does",
                where="--hypernet",
                got=f"--method {self.method} and {self.hypernet or 'no hypernetwork'}",
                fix="name one of transfer train-hypernet, or another method",
            )
        if self.hypernet is not None and self.calibrates_norms:
            raise ConfigError(
                "a hypernetwork predicts norms, too",
                where="--calibrate-norms",
                got="--method hypernet",
                fix="leave it out",
            )
        if self.pad_to_multiple_of < 1:
            raise ConfigError(
                "rows cannot be padded to that",
                where="--pad-to-multiple-of",
                got=self.pad_to_multiple_of,
                expected="1 or more",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReport:
    """What the rows of a new vocabulary are; written beside the model."""

    method: str
    old_vocabulary: str
    new_vocabulary: str
    """Fingerprints of the tokenizers."""

    old_ids: int
    old_rows: int
    """Rows of the old model, padding included."""

    new_ids: int
    new_rows: int
    copied: int
    """Tokens with the row that their bytes, name or role had."""

    combined: int
    """Tokens whose rows are combinations of old ones."""

    means: list[str]
    """Tokens that are the mean of all."""

    is_tied: bool
    """Whether one matrix is embedding and head."""

    stop_ids: list[int]
    lost_stop_ids: list[int]
    """Old stop tokens that no new token stands for."""

    dropped_generation_keys: list[str]
    """Keys of the generation config that named old ids."""

    unusual_rows: list[str] = field(default_factory=list)
    """Tokens of ``omp`` that are far longer in the model than in the donor."""

    builder: str = f"megatron-ext {__version__}"


def transfer_model(
    model: Path,
    tokenizer_folder: Path,
    output: Path,
    options: TransferOptions | None = None,
    *,
    wrap: Callable[[list[str]], Any] = list,
) -> TransferReport:
    """Write ``model`` with the vocabulary of another tokenizer to a new folder.

    Peak memory: the tensors of one output file, one old and one new matrix of the vocabulary, and
    the donor's.

    Args:
        model: Folder of a model of a supported family.
        tokenizer_folder: Folder of the new tokenizer; its files are copied.
        output: New or empty folder; renamed into place when complete.
        options: Method, donor, padding.
        wrap: Called with the names of tensors as they are written, for a progress bar.

    Raises:
        CheckpointError: The model or the donor cannot be read, has fewer rows than tokens, or the
            output cannot be written; or copied files do not give the same tokenizer.
        ConfigError: A donor of another vocabulary, or with too few anchors.
        TokenizerError: A tokenizer cannot be read.
    """
    options = TransferOptions() if options is None else options
    check_target(output)
    if not tokenizer_folder.is_dir():
        raise ConfigError(
            "the new tokenizer's files are copied",
            where="--tokenizer",
            got=tokenizer_folder,
            expected="their folder",
        )
    files = CheckpointFiles(model)
    family_of(files)
    new, old = (
        build_tokenizer(TokenizerConfig(model=str(path))) for path in (tokenizer_folder, model)
    )
    sources = row_sources(new, old)
    stated: Shares | None = None
    if options.projection is not None:
        projection = SparseProjection.load(options.projection, new, old)
        sources, stated = projection_shares(projection, sources)
    with TensorReader(files) as reader:
        tensors = _NewTensors(files, reader, sources=sources, stated=stated, options=options)
        tensors.check(old.vocab_size, new)
        generation = _json_of(model / GENERATION_FILE)
        ids = new_ids(new, sources, generation or files.config)
        values, dropped = new_generation(generation or {}, ids)
        eos = ids.stops if isinstance(files.config.get("eos_token_id"), list) else None
        config = {
            **files.config,
            "vocab_size": tensors.height,
            **ids.roles,
            **({"eos_token_id": eos} if eos else {}),
            **({"tie_word_embeddings": False} if tensors.adds_head else {}),
        }
        copies = tokenizer_files(new, tokenizer_folder)
        check_copies(new, tokenizer_folder, copies, config)
        report = TransferReport(
            method=options.method,
            old_vocabulary=old.fingerprint(),
            new_vocabulary=new.fingerprint(),
            old_ids=old.vocab_size,
            old_rows=tensors.old_rows,
            new_ids=new.vocab_size,
            new_rows=tensors.height,
            copied=int((sources.copied >= 0).sum()),
            combined=0 if options.method == "mean" else len(sources.spelled),
            means=names_of(new, tensors.mean_ids()),
            is_tied=tensors.is_tied and not tensors.adds_head,
            stop_ids=ids.stops,
            lost_stop_ids=ids.lost_stops,
            dropped_generation_keys=dropped,
            unusual_rows=tensors.unusual,
        )

        def write_others(folder: Path) -> None:
            for name, file in copies.items():
                shutil.copyfile(file, folder / name)
            if generation is not None:
                _write(folder / GENERATION_FILE, values)
            report.unusual_rows[:] = names_of(new, tensors.unusual_ids())
            _write(folder / REPORT_FILE, asdict(report))

        write_checkpoint(
            output,
            config=config,
            files=shards(tensors.plans(), max_shard_bytes=options.max_shard_bytes),
            read=lambda plans: tensors.read(plans, wrap),
            write_others=write_others,
        )
    return report


def replace_rows(folder: Path, output: Path, rows: Mapping[str, torch.Tensor]) -> None:
    """Write a model again, with other last rows of its embedding or head.

    Args:
        folder: HuggingFace folder.
        output: New or empty folder.
        rows: [n, D] of ``embedding`` and ``head``, in place of those before the padding's.

    Raises:
        CheckpointError: The output cannot be written.
    """
    files = CheckpointFiles(folder)
    names = _vocabulary_names(family_of(files).architecture)
    tensors = {"embedding": min(names - {HEAD_NAME}), "head": HEAD_NAME}
    new = {tensors[part]: matrix for part, matrix in rows.items()}
    ids = build_tokenizer(TokenizerConfig(model=str(folder))).vocab_size
    with TensorReader(files) as reader:

        def read(plans: list[TensorPlan]) -> dict[str, torch.Tensor]:
            read = {plan.name: reader.rows(plan.name, slice(None), None) for plan in plans}
            for name in read.keys() & new.keys():
                read[name] = read[name].clone()
                read[name][ids - len(new[name]) : ids] = new[name].to(read[name].dtype)
            return read

        plans = [
            TensorPlan(name=name, shape=stored.shape, dtype=_DTYPES[stored.dtype])
            for name, stored in files.tensors.items()
        ]
        write_checkpoint(
            output,
            config=files.config,
            files=shards(plans, max_shard_bytes=TransferOptions().max_shard_bytes),
            read=read,
            write_others=lambda target: _copy_others(folder, target),
        )


def _copy_others(folder: Path, target: Path) -> None:
    for file in side_files(folder):
        if file.name != CONFIG_FILE:
            shutil.copyfile(file, target / file.name)


def transfer(
    model: Path,
    tokenizer_folder: Path | None,
    output: Path,
    options: TransferOptions,
    *,
    wrap: Callable[[list[str]], Any] = list,
) -> TransferReport:
    """``transfer_model`` to bytes, or to a folder's tokenizer with the old digits.

    Args:
        model: Folder of a model of a supported family.
        tokenizer_folder: Folder of the new tokenizer; None for the library ``byte-level``.
        output: New or empty folder.
        options: Options of the transfer.
        wrap: As of ``transfer_model``.

    Raises:
        ConfigError: The old digits cannot be kept; or an error of ``transfer_model``.
    """
    with TemporaryDirectory() as made:
        folder = tokenizer_folder
        if folder is None:
            folder = Path(made)
            build_tokenizer(TokenizerConfig(library="byte-level")).save_pretrained(folder)
        elif options.keeps_digits:
            new, old = (
                build_tokenizer(TokenizerConfig(model=str(path))) for path in (folder, model)
            )
            if digit_scheme(new) != digit_scheme(old):
                keep_digits(folder, Path(made), new=new, old=old)
                folder = Path(made)
        return transfer_model(model, folder, output, options, wrap=wrap)


class _NewTensors:
    """Tensors of the new checkpoint; those of the vocabulary are made anew."""

    def __init__(
        self,
        files: CheckpointFiles,
        reader: TensorReader,
        *,
        sources: RowSources,
        stated: Shares | None,
        options: TransferOptions,
    ) -> None:
        self._stored, self._reader = files.tensors, reader
        self._sources, self._stated, self._options = sources, stated, options
        names = _vocabulary_names(family_of(files).architecture)
        self._of_vocabulary = names & self._stored.keys()
        self._input = next(iter(sorted(names - {HEAD_NAME})))
        is_stated = files.config.get("tie_word_embeddings")
        self.is_tied = HEAD_NAME not in self._stored or bool(is_stated)
        self.adds_head = options.unties and self.is_tied
        if self.adds_head:
            self._of_vocabulary |= {HEAD_NAME}
        self.old_rows = self._source_of(self._input).shape[0]
        count = len(sources.copied)
        multiple = options.pad_to_multiple_of
        self.height = self.old_rows if sources.is_identity else -(-count // multiple) * multiple
        self.unusual: list[str] = []
        self._grown: set[int] = set()
        self._donor = None if options.donor is None else _Donor(options.donor)
        self._network = None if options.hypernet is None else Hypernetwork.load(options.hypernet)
        self._predicted: torch.Tensor | None = None

    def check(self, old_size: int, new: MegatronTokenizerText) -> None:
        """Check everything that can be wrong before a file is written.

        Raises:
            CheckpointError: A matrix has too few rows, or a tensor a dtype that is not read.
            ConfigError: The donor has another vocabulary, or there are too few anchors.
        """
        self._old_size = old_size
        for name in sorted(self._of_vocabulary & self._stored.keys()):
            stored = self._stored[name]
            if stored.shape[0] < old_size:
                raise CheckpointError(
                    f"{name} has fewer rows than the model's tokenizer has ids",
                    where=stored.file,
                    got=stored.shape[0],
                    expected=f"{old_size} or more",
                )
        for name, stored in self._stored.items():
            if stored.dtype not in _DTYPES:
                raise CheckpointError(
                    f"{name} is of a dtype that is not read",
                    where=stored.file,
                    got=stored.dtype,
                    expected=f"one of {', '.join(_DTYPES)}",
                )
        if self._network is not None:
            found = rows_fingerprint(self._whole(self._input), old_size)
            parts = 1 if self.is_tied else 2
            if (self._network.config.model, self._network.config.parts) != (found, parts):
                raise ConfigError(
                    "the hypernetwork was trained for another model",
                    where="--hypernet",
                    got=self._options.hypernet,
                    fix="train one with megatron-ext transfer train-hypernet",
                )
        if self._donor is not None:
            self._donor.check(new, anchors=len(self._sources.anchors[0]), k=self._options.k)

    def mean_ids(self) -> Any:
        """New ids that are the mean of all."""
        if self._options.method == "mean":
            return (self._sources.copied < 0).nonzero()[0]
        return self._sources.unmatched

    def unusual_ids(self) -> Any:
        """New ids whose rows grew far more than others from the donor's."""
        return torch.tensor(sorted(self._grown), dtype=torch.int64).numpy()

    def plans(self) -> list[TensorPlan]:
        """All tensors, in the order of the files."""
        names = [*self._stored, *sorted(self._of_vocabulary - self._stored.keys())]
        plans = []
        for name in names:
            stored = self._source_of(name)
            is_new = name in self._of_vocabulary
            shape = (self.height, *stored.shape[1:]) if is_new else stored.shape
            plans.append(TensorPlan(name=name, shape=shape, dtype=_DTYPES[stored.dtype]))
        return plans

    def read(
        self, plans: list[TensorPlan], wrap: Callable[[list[str]], Any]
    ) -> dict[str, torch.Tensor]:
        """The tensors of one file."""
        return {
            name: self._matrix(name) if name in self._of_vocabulary else self._whole(name)
            for name in wrap([plan.name for plan in plans])
        }

    def _matrix(self, name: str) -> torch.Tensor:
        old = self._whole(name if name in self._stored else self._input)
        if self._sources.is_identity:
            return old
        part: VocabularyPart = "input"
        if name == HEAD_NAME and (self.adds_head or not self.is_tied):
            part = "head"
        shares = self._shares(part)
        rows = new_rows(
            shares, old, vocab_size=self._old_size, calibrates=self._options.calibrates_norms
        )
        if self._network is not None:
            rows[torch.from_numpy(self._sources.spelled)] = self._predictions(part).to(rows.dtype)
        if self._donor is not None:
            spelled = self._sources.spelled
            self._grown.update(grown_rows(self._donor.rows(part), rows, spelled))
        if self.height == len(rows):
            return rows
        padded = rows.new_zeros(self.height, rows.shape[1])
        padded[: len(rows)] = rows
        return padded

    def _predictions(self, part: VocabularyPart) -> torch.Tensor:
        """[spelled tokens, D] of a hypernetwork, in fp32 on the host."""
        assert self._network is not None
        width = self._network.config.width
        if self._predicted is None:
            names = [self._input] if self.is_tied else [self._input, HEAD_NAME]
            matrices = [self._whole(name)[: self._old_size].float() for name in names]
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            pieces = [self._sources.pieces[i] for i in self._sources.spelled]
            network, rows = self._network.to(device), torch.cat(matrices, dim=1).to(device)
            self._predicted = network.predict(rows, pieces).cpu()
        # Where embedding and head are one matrix, both are the same columns.
        return self._predicted[:, :width] if part == "input" else self._predicted[:, -width:]

    def _shares(self, part: VocabularyPart) -> Shares:
        if self._stated is not None:
            return self._stated
        if self._donor is None:
            return piece_shares(self._sources, self._options.method, part)
        return pursued_shares(self._sources, self._donor.rows(part), k=self._options.k, part=part)

    def _source_of(self, name: str) -> StoredTensor:
        return self._stored[name if name in self._stored else self._input]

    def _whole(self, name: str) -> torch.Tensor:
        return self._reader.rows(name, slice(None), None)


class _Donor:
    """A model with the new vocabulary, whose rows say how tokens relate."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, CheckpointFiles(folder)
        names = _vocabulary_names(family_of(self._files).architecture)
        self._names = {"input": min(names - {HEAD_NAME}), "head": HEAD_NAME}
        if HEAD_NAME not in self._files.tensors or self._files.config.get("tie_word_embeddings"):
            self._names["head"] = self._names["input"]
        self._read: tuple[str, torch.Tensor] | None = None

    def check(self, new: MegatronTokenizerText, *, anchors: int, k: int) -> None:
        """Check the donor's vocabulary and the number of anchors.

        Raises:
            ConfigError: It is not the new one, or there are fewer anchors than ``k``.
            CheckpointError: It has fewer rows than ids.
        """
        found = build_tokenizer(TokenizerConfig(model=str(self._folder)))
        if found.fingerprint() != new.fingerprint():
            raise ConfigError(
                "the donor has another vocabulary than the new tokenizer",
                where="--donor",
                got=f"{self._folder}, {found.vocab_size} ids",
                expected=f"a model with the {new.vocab_size} ids of the new tokenizer",
            )
        if not 1 <= k <= anchors:
            raise ConfigError(
                "there are too few common tokens for so many atoms",
                where="--k",
                got=k,
                expected=f"1 to {anchors}, the ordinary tokens that both vocabularies have",
            )
        for name in set(self._names.values()):
            stored = self._files.tensors[name]
            if stored.shape[0] < new.vocab_size:
                raise CheckpointError(
                    f"the donor's {name} has fewer rows than its tokenizer has ids",
                    where=stored.file,
                    got=stored.shape[0],
                    expected=f"{new.vocab_size} or more",
                )

    def rows(self, part: VocabularyPart) -> torch.Tensor:
        """Rows [rows, D] of a matrix, on the GPU where there is one."""
        name = self._names[part]
        if self._read is None or self._read[0] != name:
            self._read = None
            with TensorReader(self._files) as reader:
                whole = reader.rows(name, slice(None), None)
            device = "cuda" if torch.cuda.is_available() else "cpu"
            self._read = (name, whole.to(device))
        return self._read[1]


def input_name(files: CheckpointFiles) -> str:
    """Name of the embedding of a model."""
    return min(_vocabulary_names(family_of(files).architecture) - {HEAD_NAME})


def _vocabulary_names(architecture: str) -> frozenset[str]:
    """Names of the tensors with a row for each token."""
    return frozenset(
        part.name
        for rule in FAMILIES[architecture].rules
        for part in rule.parts
        if part.shape[0] == "vocabulary"
    )


def _json_of(file: Path) -> dict[str, Any] | None:
    return read_json(file) if file.is_file() else None


def _write(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

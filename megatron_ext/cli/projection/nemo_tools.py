"""The x-token tools of NeMo RL as actions of ``megatron-ext projection``, with their flags."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np

from megatron_ext.cli.projection.build import (
    add_pair,
    note,
    read_entries,
    required_pair,
    write_projection,
)
from megatron_ext.errors import ConfigError, ProjectionError, refused_by_system
from megatron_ext.imports import needed_packages
from megatron_ext.projection.embedding_builder import build_embedding_projection
from megatron_ext.projection.embeddings import EmbeddingMatrix, EmbeddingSpace
from megatron_ext.projection.nemo.loose_entries import LooseEntries
from megatron_ext.projection.nemo.operations import (
    MultitokenOptions,
    multitoken_projection,
    reapply_exact_map,
    sort_and_cut,
)
from megatron_ext.projection.nemo.tokenizer_pair import TokenizerPair
from megatron_ext.projection.projection_matrix import ProjectionMatrix

Flags = Mapping[str, Mapping[str, Any]]
"""argparse options by flag, or by short and long form; ``--enable/disable-x`` is two flags."""

_DATA_FOLDER: Final = "cross_tokenizer_data"
_SIZE: Final = re.compile(r"-?[0-9.]+[bm]", re.IGNORECASE)
_VARIANT: Final = re.compile(r"-(Base|it|Instruct)")
_SWITCH: Final = "--enable/disable-"
_ROLES: Final = ("student", "teacher")
_DEFAULTS: Final = MultitokenOptions()

_NO_SCALE_TRICK: Final = (
    "--enable-scale-trick does nothing: no column is given mass that stands for nothing, and the "
    "file says enable_scale_trick=False"
)
_BYTES_DECIDE: Final = "does nothing: tokens are compared by their bytes, and equal ones are exact"

EMBEDDING_NAMES: Final = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
)
"""Suffixes of input embeddings' names, in transformers' models and in Meta's Llama files."""


def _set(text: str) -> dict[str, Any]:
    return {"action": "store_true", "help": text}


def _number(default: float | None, metavar: str, text: str) -> dict[str, Any]:
    kind = float if isinstance(default, float) else int
    shown = "" if default is None else f" ({default:g})"
    return {"type": kind, "default": default, "metavar": metavar, "help": f"{text}{shown}"}


_BYTE_FLAGS: Final[Flags] = {
    name: _set("accepted; tokens of equal bytes are always exact")
    for name in ("--enable-exact-match", "--use-raw-tokens", "--use-canonicalization")
}
_INITIAL: Final = {"type": Path, "metavar": "FILE", "help": "a projection file to start from"}

_MULTITOKEN: Final[Flags] = {
    "--num-examples": _number(0, "N", "rows to print"),
    "--enable/disable-scale-trick": {
        "default": False,
        "help": "accepted; no mass is ever put on a column that stands for nothing",
    },
    "--enable/disable-reverse-pass": {
        "default": True,
        "help": "also spell the teacher's tokens (default)",
    },
    "--enable/disable-special-token-mapping": {
        "default": True,
        "help": "relate control tokens whose names are alike (default)",
    },
    **_BYTE_FLAGS,
    "--tokens-to-cut": _number(_DEFAULTS.tokens_to_cut, "N", "most pieces of a spelling"),
    "--top-k": _number(_DEFAULTS.top_k, "K", "most entries of a row"),
    "--special-token-similarity-threshold": _number(
        _DEFAULTS.special_token_similarity_threshold,
        "X",
        "least similarity of the names of two control tokens",
    ),
    "--special-token-top-k": _number(None, "K", "most entries of a control token (--top-k)"),
    "--output-dir": {
        "default": _DATA_FOLDER,
        "metavar": "DIR",
        "help": f"folder for the file ({_DATA_FOLDER})",
    },
    "--output-filename": {"metavar": "STEM", "help": "file name without its ending"},
}
"""Flags of the first step; the second accepts and ignores them."""

_CUT: Final[Flags] = {
    "--initial-projection-path": {
        "type": Path,
        "required": True,
        "metavar": "FILE",
        "help": "projection to sort and cut",
    },
    "--top_k": {"type": int, "required": True, "metavar": "K", "help": "most entries of a row"},
    "--output_path": {
        "type": Path,
        "metavar": "FILE",
        "help": "by default NAME_top_K_sorted.pt, or NAME_top_K_sorted_preservelast.pt",
    },
    "--preserve_last": {
        "action": argparse.BooleanOptionalAction,
        "default": False,
        "help": "keep the last slot of each row whatever it holds",
    },
    "-q --quiet": _set("say nothing but errors"),
}

_INERT_OF_GENERATOR: Final[Flags] = {
    "--keep_top_tokens": {"type": int, "default": -1, "help": "accepted; does nothing"},
    "--force_recompute": _set("accepted; does nothing"),
    "--use_canonicalization": _set("accepted; does nothing"),
}

_GENERATOR: Final[Flags] = {
    **{
        f"--{role}-embeddings": {
            "type": Path,
            "metavar": "FILE",
            "help": f"a .npy or .safetensors file with a row for each token of the {role}; by "
            "default the input embeddings of the model in the folder of its tokenizer",
        }
        for role in _ROLES
    },
    **{
        f"--{role}-tensor": {"metavar": "NAME", "help": "tensor in a .safetensors file of several"}
        for role in _ROLES
    },
    "--space": {
        "choices": get_args(EmbeddingSpace),
        "default": "anchored",
        "help": "shared: one encoder made both; anchored: each is its model's own, and what both "
        "have relate them (anchored)",
    },
    "--data_dir": {
        "default": f"{_DATA_FOLDER}/",
        "metavar": "DIR",
        "help": f"folder for the file ({_DATA_FOLDER}/)",
    },
    "--top_k": _number(10, "K", "most entries of a row"),
    "--weight_threshold": _number(0.0, "X", "leave out entries whose share is not larger"),
    **_INERT_OF_GENERATOR,
}

_WRAPPER: Final[Flags] = {
    "--data-dir": {
        "default": _DATA_FOLDER,
        "metavar": "DIR",
        "help": f"folder for the files ({_DATA_FOLDER})",
    },
    "--prep-top-k": _number(32, "K", "most entries of a row in the first step"),
    "--runtime-top-k": _number(4, "K", "most entries of a row in the last step"),
    "--final-output": {
        "type": Path,
        "metavar": "FILE",
        "help": "by default projection_matrix_STUDENT_TEACHER_topK.pt in the folder",
    },
    "--skip-exact-map": _set("leave out the second step"),
    "--use-canonicalization": _set("accepted; tokens of equal bytes are always exact"),
    "--no-scale-trick": _set("accepted; no filler column is ever written"),
    "--no-reverse-pass": _set("do not spell the teacher's tokens"),
    "--no-special-token-mapping": _set("leave control tokens without a match empty"),
}

_OF_A_PAIR: Final[Mapping[str, Flags]] = {
    "minimal-projection-via-multitoken": {**_MULTITOKEN, "--initial-projection-path": _INITIAL},
    "reapply-exact-map": {
        **_MULTITOKEN,
        "--initial-projection-path": {**_INITIAL, "required": True},
    },
    "minimal-projection-generator": _GENERATOR,
    "build-projection-matrix": _WRAPPER,
}


def add_flags(tool: str, parser: argparse.ArgumentParser) -> None:
    """Add the flags of a tool to ``parser``."""
    if tool in _OF_A_PAIR:
        add_pair(parser, required=True)
    for name, options in _OF_A_PAIR.get(tool, _CUT).items():
        if not name.startswith(_SWITCH):
            parser.add_argument(*name.split(), **options)
            continue
        what = name.removeprefix(_SWITCH)
        dest = what.replace("-", "_")
        parser.add_argument(f"--enable-{what}", dest=dest, action="store_true", **options)
        parser.add_argument(
            f"--disable-{what}", dest=dest, action="store_false", help=argparse.SUPPRESS
        )


def build_multitoken(arguments: argparse.Namespace) -> Path:
    """Build a projection by tokenizing each side's tokens with the other tokenizer.

    megatron-ext projection minimal-projection-via-multitoken \\
        --student-model llama3_2/ --teacher-model qwen3/

    Flags, defaults and file names are those of the tool of this name in NeMo RL, but that no filler
    column is written: --enable-scale-trick is accepted, says so and does nothing. Only the
    tokenizers are read, by their bytes.
    """
    if arguments.scale_trick:
        note(_NO_SCALE_TRICK)
    _note_given(arguments, _BYTE_FLAGS, _BYTES_DECIDE)
    options = MultitokenOptions(
        reverse_pass=arguments.reverse_pass,
        special_token_mapping=arguments.special_token_mapping,
        tokens_to_cut=arguments.tokens_to_cut,
        top_k=arguments.top_k,
        special_token_similarity_threshold=arguments.special_token_similarity_threshold,
        special_token_top_k=arguments.special_token_top_k,
    )
    initial = arguments.initial_projection_path
    pair = required_pair(arguments)
    entries = None if initial is None else read_entries(initial, pair)
    projection = multitoken_projection(pair, options, entries)
    sys.stdout.writelines(_examples(projection, pair, arguments.num_examples))
    stem = arguments.output_filename or prepared_name(
        arguments.student, arguments.teacher, options.top_k
    )
    ending = "_special" if options.special_token_mapping else ""
    path = _made_folder(arguments.output_dir) / f"{stem.removesuffix('.pt')}{ending}.pt"
    write_projection(projection, path, arguments)
    return path


def reapply(arguments: argparse.Namespace) -> Path:
    """Map each token of both vocabularies to itself alone, in an existing projection.

    megatron-ext projection reapply-exact-map \\
        --student-model DIR --teacher-model DIR --initial-projection-path map.pt

    Writes map_exact_map_remapped.pt beside the file. Flags are those of the tool of this name in
    NeMo RL, but that both models must be named; tokens are compared by their bytes.
    """
    _note_given(arguments, _MULTITOKEN, "does nothing here")
    pair = required_pair(arguments)
    projection = reapply_exact_map(read_entries(arguments.initial_projection_path, pair), pair)
    path = _with_suffix(arguments.initial_projection_path, "_exact_map_remapped")
    write_projection(projection, path, arguments)
    return path


def cut(arguments: argparse.Namespace) -> Path:
    """Keep the largest entries of each row of a projection.

    megatron-ext projection sort-and-cut-projection-matrix \\
        --initial-projection-path map.pt --top_k 4

    Writes map_top_4_sorted.pt beside the file. Flags are those of the tool of this name in NeMo RL,
    but that a filler column (the scale trick) is left out and not carried over, unless
    --preserve_last asks for it.
    """
    entries = read_entries(arguments.initial_projection_path)
    result = sort_and_cut(entries, arguments.top_k, preserve_last=arguments.preserve_last)
    if result.filler_rows and not arguments.quiet:
        share = result.filler_mass / result.filler_rows
        note(f"left out a filler: {share:.1%} of the mass of {result.filler_rows:,} rows")
    if result.cut_mass and not arguments.quiet:
        note(f"cut entries of {result.cut_mass:,.1f} rows' mass")
    preserved = "_preservelast" if arguments.preserve_last else ""
    path: Path = arguments.output_path or _with_suffix(
        arguments.initial_projection_path, f"_top_{arguments.top_k}_sorted{preserved}"
    )
    slots = max(arguments.top_k, 2)
    write_projection(result.projection, path, arguments, slot_count=slots, quiet=arguments.quiet)
    return path


def generate(arguments: argparse.Namespace) -> Path:
    """Build a projection from embeddings of the two vocabularies.

    megatron-ext projection minimal-projection-generator \\
        --student-model llama3_2/ --teacher-model qwen3/ \\
        --student-embeddings student.safetensors --teacher-embeddings teacher.npy

    Flags and the file name are those of the tool of this name in NeMo RL. No model is downloaded:
    the embeddings are a matrix of each side, or the input embeddings of models whose weights lie in
    the folders. Tokens of equal bytes are exact; only the others are related by embeddings.
    """
    if arguments.student == arguments.teacher:
        raise ConfigError(
            "student and teacher are one model", got=arguments.student, expected="two models"
        )
    if not 0 <= arguments.weight_threshold < 1:
        raise ConfigError(
            "the least share cannot be used",
            got=arguments.weight_threshold,
            expected="at least 0 and below 1",
            where="--weight_threshold",
        )
    _note_given(arguments, _INERT_OF_GENERATOR, "does nothing")
    student_embeddings, teacher_embeddings = (_embeddings(arguments, role) for role in _ROLES)
    pair = required_pair(arguments)
    built = build_embedding_projection(
        pair.student,
        pair.teacher,
        student_embeddings,
        teacher_embeddings,
        space=arguments.space,
        top_k=arguments.top_k,
    )
    entries = LooseEntries.of(built)
    projection = entries.kept(entries.weights > arguments.weight_threshold).projection(
        built.shape, vocab_sizes=built.vocab_sizes, is_exact_row=built.is_exact_row
    )
    student, teacher = (clean_model_name(m) for m in (arguments.student, arguments.teacher))
    name = f"temp_projection_map_{student}_to_{teacher}_top_{arguments.top_k}.pt"
    path = _made_folder(arguments.data_dir) / name
    write_projection(projection, path, arguments)
    return path


def build_cut_matrix(arguments: argparse.Namespace) -> Path:
    """Build a projection in one command: the multi-token map, exact rows, sorting and cutting.

    megatron-ext projection build-projection-matrix \\
        --student-model llama3_2/ --teacher-model qwen3/

    Flags and file names are those of build_projection_matrix.sh in NeMo RL; its three steps are the
    actions minimal-projection-via-multitoken, reapply-exact-map and sort-and-cut-projection-matrix.
    """
    folder = _made_folder(arguments.data_dir)
    models = ["--student-model", arguments.student, "--teacher-model", arguments.teacher]
    first = ["--top-k", str(arguments.prep_top_k), "--output-dir", str(folder)]
    first += ["--disable-reverse-pass"] if arguments.no_reverse_pass else []
    first += ["--disable-special-token-mapping"] if arguments.no_special_token_mapping else []
    first += ["--use-canonicalization"] if arguments.use_canonicalization else []
    path = build_multitoken(_parsed("minimal-projection-via-multitoken", [*models, *first]))
    if not arguments.skip_exact_map:
        words = [*models, "--initial-projection-path", str(path)]
        path = reapply(_parsed("reapply-exact-map", words))
    student, teacher = (clean_model_name(m) for m in (arguments.student, arguments.teacher))
    top_k = str(arguments.runtime_top_k)
    last = arguments.final_output or folder / f"projection_matrix_{student}_{teacher}_top{top_k}.pt"
    words = ["--initial-projection-path", str(path), "--top_k", top_k, "--output_path", str(last)]
    return cut(_parsed("sort-and-cut-projection-matrix", words))


TOOLS: Final = {
    "minimal-projection-via-multitoken": build_multitoken,
    "reapply-exact-map": reapply,
    "sort-and-cut-projection-matrix": cut,
    "minimal-projection-generator": generate,
    "build-projection-matrix": build_cut_matrix,
}


def clean_model_name(model: str) -> str:
    """A model's name in the file names of NeMo RL's tools.

    It is the last part of the path without sizes (``-1B``) and variants (``-Base``, ``-Instruct``,
    ``-it``), with ``_mini`` appended if it contains "mini".
    """
    name = Path(model).name
    cleaned = _VARIANT.sub("", _SIZE.sub("", name)).strip("-_")
    return f"{cleaned}_mini" if "mini" in name else cleaned


def prepared_name(student: str, teacher: str, top_k: int) -> str:
    """Stem of the first step's file."""
    return (
        f"projection_map_{clean_model_name(student)}_to_{clean_model_name(teacher)}"
        f"_multitoken_top_{top_k}_double"
    )


def _parsed(tool: str, words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(tool, parser)
    return parser.parse_args(words)


def _note_given(arguments: argparse.Namespace, flags: Flags, why: str) -> None:
    """Note those of ``flags`` that were given and have no effect."""
    given = [
        name
        for name, options in flags.items()
        if getattr(arguments, name.removeprefix(_SWITCH).removeprefix("--").replace("-", "_"))
        != options.get("default", False if "action" in options else None)
    ]
    if given:
        note(f"{', '.join(given)} {why}")


def _made_folder(path: str | Path) -> Path:
    folder = Path(path)
    with refused_by_system("the folder cannot be made", where=folder, kind=ProjectionError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _with_suffix(path: Path, words: str) -> Path:
    """``path`` with ``words`` appended to its stem and the suffix .pt."""
    stem = path.name.removesuffix(path.suffix) if path.suffix in (".pt", ".pth") else path.name
    return path.with_name(f"{stem}{words}.pt")


def _examples(projection: ProjectionMatrix, pair: TokenizerPair, count: int) -> list[str]:
    """The first rows with several entries, one line each."""
    lines = []
    for row in np.flatnonzero(np.diff(projection.indptr) > 1)[:count].tolist():
        entries = slice(*projection.indptr[row : row + 2])
        values, columns = projection.values[entries].tolist(), projection.indices[entries].tolist()
        shares = sorted(zip(values, columns, strict=True), reverse=True)
        pieces = ", ".join(f"{pair.teacher.id_to_token(i)!r} {share:.4f}" for share, i in shares)
        lines.append(f"{row} {pair.student.id_to_token(row)!r}: {pieces}\n")
    return lines


def _embeddings(arguments: argparse.Namespace, role: str) -> EmbeddingMatrix:
    """The embeddings in the named file, or those of the model in its folder."""
    file, tensor = getattr(arguments, f"{role}_embeddings"), getattr(arguments, f"{role}_tensor")
    if file is None:
        file, tensor = _of_model(Path(getattr(arguments, role)), role)
    if file.suffix != ".npy":
        return EmbeddingMatrix(file, tensor)
    try:
        return EmbeddingMatrix(np.load(file, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError) as error:
        raise ProjectionError(
            f"the {role}'s embeddings cannot be read",
            where=file,
            got=error,
            expected="an array of numbers that numpy.save wrote",
        ) from error


def _of_model(folder: Path, role: str) -> tuple[Path, str]:
    """The weights file that holds the input embeddings, and their name."""
    with needed_packages("a model's weights"):
        from safetensors import SafetensorError, safe_open
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else []:
        try:
            with safe_open(path, framework="numpy") as file:
                names = sorted(file.keys())
        except (OSError, SafetensorError) as error:
            raise ProjectionError("the weights cannot be read", where=path, got=error) from error
        for name in names:
            if name.endswith(EMBEDDING_NAMES):
                return path, name
    raise ProjectionError(
        f"there are no embeddings of the {role}",
        where=folder,
        expected="a folder with the model's weights in .safetensors files",
        fix=f"name a file: --{role}-embeddings",
    )

"""How fast batches of text become ids: the original library, ours through it, and our engine.

    python benchmarks/tokenization.py --output benchmarks/results/tokenization.json

(A script here that is named tokenize.py would hide the standard library's module of that name from
every benchmark in this folder.)

Vocabularies are those of a folder, by default of the one that MEGATRON_EXT_SHARED names, and of
mistral_common. The text is real: interface texts in 37 languages, word problems, chats, a Japanese
novel, Python; lines of JSONL are documents, other files are cut at line ends after 8,000
characters. Documents that spell a control token of a HuggingFace vocabulary are left out of its
row: the library reads it as one, we as text.

``library`` is the original one, called the way it is fastest: tokenizers' ``encode_batch_fast``,
sentencepiece's ``encode`` of a list, tiktoken's ``encode_ordinary_batch``, each on all cores.
``loop`` is the same library called the way Megatron calls it, a document at a time.
``reference`` is ours without the engine, ``first`` the engine's first pass over the text after it
is built, and ``auto`` a pass after that. The four alternate; medians count, of the times and of the
ratios within a round. ``build`` is the building and the proof of the engine. Where there is no
engine for a vocabulary, ``refusal`` says why.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import mistral_common
import numpy as np
from alignment import machine

from megatron_ext.tokenizers.engine import flat_ids
from megatron_ext.tokenizers.libraries import TOKENIZER_LIBRARIES
from megatron_ext.tokenizers.tokenizer_files import FileKind, file_kind

SHARED = Path(os.environ.get("MEGATRON_EXT_SHARED", "../shared"))
MISTRAL = Path(mistral_common.__file__).parent / "data"
DOCUMENT = 8_000
CORES = len(os.sched_getaffinity(0))
TIMED = ("library", "loop", "reference", "first", "auto")
OURS = TIMED[2:]

Encode = Callable[[Sequence[str]], Any]


def vocabularies(folder: Path) -> Iterator[Path]:
    """Every tokenizer folder and every single file, then those of mistral_common."""
    for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
        if (inner / "tokenizer.json").is_file():
            yield inner
        yield from sorted([*inner.glob("*.model"), *inner.glob("*.tiktoken")])
    yield from sorted(MISTRAL.iterdir())


def documents(folder: Path) -> Iterator[str]:
    """The texts of the corpora."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        if file.suffix == ".jsonl":
            yield from lines
            continue
        document = ""
        for line in lines:
            document += line
            if len(document) >= DOCUMENT:
                yield document
                document = ""
        if document:
            yield document


def library_calls(kind: FileKind, adapter: Any) -> tuple[str, Encode, Encode]:
    """The original library's fastest call, by name; the function that makes it; and a loop."""
    if kind.library == "huggingface":
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(kind.file))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return (
            "encode_batch_fast",
            lambda texts: [
                row.ids for row in tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            ],
            lambda texts: [tokenizer.encode(text, add_special_tokens=False).ids for text in texts],
        )
    if kind.library == "sentencepiece":
        from sentencepiece import SentencePieceProcessor

        processor = SentencePieceProcessor(model_file=str(kind.file))
        return (
            "encode",
            lambda texts: processor.encode(texts, num_threads=CORES),
            lambda texts: [processor.encode(text) for text in texts],
        )
    # A rank file has no pattern: the encoding is as our adapter made it.
    encoding = adapter._encoding
    return (
        "encode_ordinary_batch",
        lambda texts: encoding.encode_ordinary_batch(texts, num_threads=CORES),
        lambda texts: [encoding.encode_ordinary(text) for text in texts],
    )


def seconds(call: Encode, texts: Sequence[str]) -> float:
    """Time of one call, the release of its result left out."""
    gc.collect()
    begin = time.perf_counter()
    result = call(texts)
    elapsed = time.perf_counter() - begin
    del result
    return elapsed


def measure(path: Path, all_texts: Sequence[str], repeats: int) -> dict[str, Any]:
    """The row of one vocabulary."""
    kind = file_kind(path)
    library = TOKENIZER_LIBRARIES[kind.library]
    reference: Any = library.build(path, {"engine": "reference"})
    call_name, call, loop = library_calls(kind, reference)
    names = names_read(reference)
    texts = [text for text in all_texts if not any(name in text for name in names)]
    expected = flat_ids(call(texts))
    times: dict[str, list[float]] = {name: [] for name in (*TIMED, "build")}
    for _ in range(repeats):
        auto: Any = library.build(path, {"engine": "auto"})
        begin = time.perf_counter()
        refusal = auto.prepare_engine()
        times["build"].append(time.perf_counter() - begin)
        times["library"].append(seconds(call, texts))
        times["loop"].append(seconds(loop, texts))
        times["first"].append(seconds(auto.text_to_flat_ids, texts))
        times["reference"].append(seconds(reference.text_to_flat_ids, texts))
        times["auto"].append(seconds(auto.text_to_flat_ids, texts))
    equal = [
        all(map(np.array_equal, ours.text_to_flat_ids(texts), expected))
        for ours in (auto, reference)
    ]
    return {
        "vocabulary": f"{path.parent.name}/{path.name}",
        "library": f"{kind.library}: {call_name}",
        "engine": "gigatoken" if refusal is None else "reference",
        "refusal": None if refusal is None else refusal.removeprefix(f"{kind.file}: "),
        "documents": len(texts),
        **summary(times, sum(len(text.encode()) for text in texts)),
        "tokens": len(expected[0]),
        "ids_equal": all(equal),
        "seconds": times,
    }


def names_read(tokenizer: Any) -> list[str]:
    """What the original library reads out of text and we do not."""
    if tokenizer.library != "huggingface":
        return []
    ids = filter(tokenizer.is_control, range(tokenizer.vocab_size))
    return [name for name in map(tokenizer.id_to_token, ids) if name]


def summary(times: dict[str, list[float]], size: int) -> dict[str, Any]:
    """MB/s of each side, and how many times the library's and the loop's each of ours is."""
    return {
        "bytes": size,
        "build_seconds": median(times["build"]),
        **{f"{name}_mb_per_s": size / 1e6 / median(times[name]) for name in TIMED},
        **{
            f"{name}_to_{other}": median(
                theirs / own for theirs, own in zip(times[other], times[name], strict=True)
            )
            for other in ("library", "loop")
            for name in OURS
        },
    }


def line(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    ours = (
        f"{row[f'{name}_mb_per_s']:>8.1f} {row[f'{name}_to_library']:>5.1f}x"
        f" {row[f'{name}_to_loop']:>5.1f}x"
        for name in OURS
    )
    name = row["vocabulary"].removeprefix("tokenizers/")
    equal = "equal" if row["ids_equal"] else "DIFFERENT"
    theirs = f"{row['library_mb_per_s']:>8.1f} {row['loop_mb_per_s']:>8.1f}"
    return f"{name:>52} {theirs} {' '.join(ours)} {equal:>9}"


def write_results(path: Path, rows: list[dict[str, Any]]) -> None:
    """Machine and rows as JSON."""
    packages = ("tokenizers", "sentencepiece", "tiktoken", "gigatoken", "mistral-common")
    results = {
        "machine": machine() | {"packages": {name: version(name) for name in packages}},
        "threads": CORES,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabularies", type=Path, default=SHARED / "tokenizers")
    parser.add_argument("--corpora", type=Path, default=SHARED / "corpora")
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the names to measure")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    texts = list(documents(arguments.corpora))
    size = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{len(texts):,} documents, {size:.1f} MB, {CORES} cores")
    print("MB/s; how many times the library, how many times the loop")
    heads = [f"{name:>8}" for name in TIMED[:2]] + [f"{name:>22}" for name in OURS]
    print(f"{'vocabulary':>52}", *heads, "      ids")
    rows = []
    for path in vocabularies(arguments.vocabularies):
        if any(part in str(path) for part in arguments.only):
            rows.append(measure(path, texts, arguments.repeats))
            print(line(rows[-1]), flush=True)
    if arguments.output is not None:
        write_results(arguments.output, rows)


if __name__ == "__main__":
    main()

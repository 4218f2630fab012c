"""How long ``megatron-ext tokenize`` takes from JSON lines to .bin and .idx, beside a plain loop.

    python benchmarks/preprocess.py --output benchmarks/results/preprocess.json

The loop is what Megatron's preprocess_data.py does in one process: parse a line, tokenize its text
with the tokenizers or sentencepiece library itself, hand the ids to megatron-core's
IndexedDatasetBuilder. Both write the same files, which are compared byte for byte.

The text is real (interface texts in 37 languages, word problems, a Japanese novel, Python), cut
into documents, shuffled and repeated up to --megabytes. Vocabularies and text come from the folder
that MEGATRON_EXT_SHARED names.

Every run is a process of its own. ``seconds`` is from before the tokenizer is built to when the
files are whole, by the clock on the wall; ``cpu_seconds`` is what all threads and processes ran in
that time, which a busy machine stretches less. ``process_seconds`` is of the whole process, with
the import of torch and megatron-core, which takes seconds on either side. Runs of the sides
alternate; medians count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SHARED = Path(os.environ.get("MEGATRON_EXT_SHARED", "../shared"))
VOCABULARIES = ("qwen2_5", "llama3_2", "gpt2", "gemma3", "llama2_sp")
PARAGRAPHS = 8
CHARACTERS = 4000


def documents() -> Iterator[str]:
    """The texts of the corpora, in documents of some hundred to some thousand characters."""
    corpora = SHARED / "corpora"
    for path in sorted(corpora.glob("django_po/*.po")):
        paragraphs = path.read_text(encoding="utf-8").split("\n\n")
        for start in range(0, len(paragraphs), PARAGRAPHS):
            yield "\n\n".join(paragraphs[start : start + PARAGRAPHS])
    for line in (corpora / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        yield f"{record['question']}\n{record['answer']}"
    for path in sorted([*corpora.glob("python_code/*.txt"), *corpora.glob("wagahai/*.txt")]):
        text = path.read_text(encoding="utf-8")
        for start in range(0, len(text), CHARACTERS):
            yield text[start : start + CHARACTERS]


def write_corpus(path: Path, megabytes: int) -> tuple[int, int]:
    """JSON lines; returns the number of documents and the bytes of their text."""
    texts = list(documents())
    random.Random(0).shuffle(texts)
    sizes = [len(text.encode()) for text in texts]
    count = size = 0
    with path.open("w", encoding="utf-8") as file:
        while size < megabytes * 1e6:
            index = count % len(texts)
            file.write(json.dumps({"id": count, "text": texts[index]}, ensure_ascii=False) + "\n")
            size += sizes[index]
            count += 1
    return count, size


def library_encoder(folder: Path) -> tuple[Callable[[str], list[int]], int]:
    """How the library itself tokenizes one text, and the size of its vocabulary."""
    if (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return lambda text: tokenizer.encode(text, add_special_tokens=False).ids, (
            tokenizer.get_vocab_size()
        )
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=str(next(folder.glob("*.model"))))
    return processor.encode, processor.vocab_size()


def loop(corpus: Path, prefix: Path, vocabulary: Path) -> dict[str, float]:
    """One document after the other."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    seconds = clock()
    encode, vocab_size = library_encoder(vocabulary)
    builder = IndexedDatasetBuilder(
        f"{prefix}_text_document.bin", dtype=DType.optimal_dtype(vocab_size)
    )
    with corpus.open(encoding="utf-8") as lines:
        for line in lines:
            ids = encode(json.loads(line)["text"])
            builder.add_document(ids, [len(ids)])
    builder.finalize(f"{prefix}_text_document.idx")
    return seconds()


def tokenize(corpus: Path, prefix: Path, vocabulary: Path, workers: int) -> dict[str, float]:
    """``megatron-ext tokenize``."""
    import megatron.core.datasets.indexed_dataset  # noqa: F401 - loaded before the clock starts

    from megatron_ext.preprocessing.config import PreprocessConfig
    from megatron_ext.preprocessing.preprocess import preprocess
    from megatron_ext.tokenizers import TokenizerConfig

    seconds = clock()
    preprocess(
        PreprocessConfig(
            inputs=(str(corpus),),
            output_prefix=str(prefix),
            tokenizer=TokenizerConfig(model=str(vocabulary)),
            workers=workers,
        )
    )
    return seconds()


def clock() -> Callable[[], dict[str, float]]:
    """Seconds from now on: by the wall, and of this process and its children that have ended."""

    def now() -> tuple[float, float]:
        times = os.times()
        return time.perf_counter(), sum(times[:4])

    wall, cpu = now()
    return lambda: {"seconds": now()[0] - wall, "cpu_seconds": now()[1] - cpu}


def run_side(side: str, corpus: Path, folder: Path, vocabulary: Path) -> dict[str, float]:
    """One side in a process of its own."""
    folder.mkdir()
    command = [sys.executable, "-W", "ignore", __file__, "--side", side]
    command += [str(path) for path in (corpus, folder / "a", vocabulary)]
    start = time.perf_counter()
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    process_seconds = time.perf_counter() - start
    if finished.returncode != 0:
        raise RuntimeError(finished.stderr)
    return {**json.loads(finished.stdout), "process_seconds": process_seconds}


def files_of(folder: Path) -> list[bytes]:
    return [(folder / f"a_text_document.{end}").read_bytes() for end in ("bin", "idx")]


def row(vocabulary: Path, corpus: Path, repeats: int, text_bytes: int) -> dict[str, Any]:
    """All sides over one vocabulary."""
    sides = ("loop", "1", str(os.cpu_count() or 1))
    times: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    identical = True
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(dir=corpus.parent) as scratch:
            for side in times:
                folder = Path(scratch) / side
                times[side].append(run_side(side, corpus, folder, vocabulary))
            expected = files_of(Path(scratch) / "loop")
            identical &= all(files_of(Path(scratch) / side) == expected for side in times)
    medians = {
        side: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for side, runs in times.items()
    }
    result: dict[str, Any] = {"vocabulary": vocabulary.name, "identical": identical, "runs": times}
    for side, median in medians.items():
        name = side if side == "loop" else f"tokenize_{side}"
        result[f"{name}_mb_per_second"] = text_bytes / median["seconds"] / 1e6
        if side != "loop":
            result[f"{name}_times_faster"] = medians["loop"]["seconds"] / median["seconds"]
            for kind in ("cpu", "process"):
                result[f"{name}_times_faster_{kind}"] = (
                    medians["loop"][f"{kind}_seconds"] / median[f"{kind}_seconds"]
                )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--megabytes", type=int, default=64, help="text to tokenize (default 64)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side (default 3)")
    parser.add_argument("--vocabularies", nargs="+", default=VOCABULARIES, metavar="NAME")
    parser.add_argument("--side", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        side, *paths = arguments.side
        corpus, prefix, vocabulary = map(Path, paths)
        seconds = (
            loop(corpus, prefix, vocabulary)
            if side == "loop"
            else tokenize(corpus, prefix, vocabulary, int(side))
        )
        print(json.dumps(seconds))
        return
    with tempfile.TemporaryDirectory() as scratch:
        corpus = Path(scratch) / "corpus.jsonl"
        count, size = write_corpus(corpus, arguments.megabytes)
        print(f"{count:,} documents, {size / 1e6:.1f} MB of text; MB/s and ratios to the loop")
        results = []
        for name in arguments.vocabularies:
            result = row(SHARED / "tokenizers" / name, corpus, arguments.repeats, size)
            results.append(result)
            numbers = {key: value for key, value in result.items() if isinstance(value, float)}
            print(name, result["identical"], {k: round(v, 1) for k, v in numbers.items()})
        if arguments.output is not None:
            from alignment import machine

            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            values = {"machine": machine(), "documents": count, "text_bytes": size, "rows": results}
            arguments.output.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Malformed files and arguments for every verb, and what each came to.

``run(seconds, seed)`` makes small inputs, a run and a model, damages one file or argument at a
time, and runs a verb on it. What is refused must say so in one line, leave nothing behind, and
take less than a minute of processor time. ``python -m tests.hostile --only input_fuzz``
prints the counts.
"""

from __future__ import annotations

import gc
import os
import random
import re
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.fork_server import fork_server
from tests.hostile.input_mutations import CONTROLS, contents

_PROCESSOR_S: Final = 60
_WALL_S: Final = 300
_HUNG: Final = (-signal.SIGALRM, -signal.SIGXCPU, -signal.SIGKILL)
_CONTROL: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
COUNTS: Final = (
    *("cases", "refused", "done", "tracebacks", "controls", "long_lines", "left_behind", "hangs"),
)


class Target(NamedTuple):
    """A command of a verb, and the files that it reads, below the folder of the inputs."""

    words: tuple[str, ...]
    files: tuple[str, ...]


def _target(command: str, *files: str) -> Target:
    return Target(tuple(shlex.split(command)), files)


_TEXTS: Final = (
    *("text.jsonl", "text.jsonl.gz", "list.json", "text.parquet", "text.arrow", "a.txt"),
)
_OUTPUT: Final = "--output-prefix out/x --tokenizer-model hf --workers 1"
SMALL: Final = (
    *(
        _target(
            f"inspect --tokenizer-model {folder} 'a b <|x|> é'", *(f"{folder}/{n}" for n in names)
        )
        for folder, names in (
            ("hf", ("tokenizer.json", "tokenizer_config.json", "tokenizer_metadata.json")),
            ("wordpiece", ("tokenizer.json", "tokenizer_config.json")),
            ("unigram", ("tokenizer.json",)),
        )
    ),
    *(
        _target(f"inspect --tokenizer-model {file} 'a b é'", file)
        for file in ("ranks.json", "ranks.tiktoken", "tekken.json", "spm.model")
    ),
    _target(
        "inspect --tokenizer-model hf --tokenizer-prompt-format auto --conversation chat.jsonl",
        *("chat.jsonl", "hf/tokenizer_config.json"),
    ),
    *(
        _target(f"tokenize --input {file} {_OUTPUT} {strict}", file)
        for file in _TEXTS
        for strict in ("", "--strict")
    ),
    _target(f"tokenize --input chat.jsonl {_OUTPUT} --tokenizer-mode sft", "chat.jsonl"),
    _target(
        "align text.jsonl --student hf --teacher ranks.json --json out/a.json",
        *("text.jsonl", "hf/tokenizer.json", "ranks.json"),
    ),
    _target(
        "projection build --student hf --teacher ranks.json -o out/p.safetensors",
        *("hf/tokenizer.json", "ranks.json"),
    ),
    _target("projection inspect pair.safetensors", "pair.safetensors"),
    _target("projection convert pair.safetensors -o out/p.pt", "pair.safetensors"),
    _target("distill --config run.yaml --dry-run", "run.yaml"),
    _target("run script.py", "script.py"),
)
"""Commands that need no model."""

_RUN: Final = (
    *("student/config.yaml", "student/metrics.jsonl", "student/data.json"),
    "student/checkpoints/latest",
)
_STEP: Final = "teacher/checkpoints/iter_0000001"
_MODEL: Final = ("model/config.json", "model/model.safetensors")
LARGE: Final = (
    *SMALL,
    _target("distill --config run.yaml", *_RUN),
    _target(
        "distill --config run.yaml --dry-run",
        *("train.jsonl", "ranks.json", "teacher/checkpoints/latest", f"{_STEP}/metadata.json"),
        *(f"{_STEP}/common.pt", f"{_STEP}/manifest.json"),
    ),
    _target("report student --output out/report.html", *_RUN),
    _target("evaluate --checkpoint student --task bits_per_byte --data held-out.jsonl", *_RUN[3:]),
    _target(
        "evaluate --checkpoint student --task mmlu --data mmlu.jsonl --num-fewshot 0", "mmlu.jsonl"
    ),
    _target(
        "evaluate --checkpoint student --task gsm8k --data gsm8k.jsonl --num-fewshot 0 "
        "--max-new-tokens 2",
        "gsm8k.jsonl",
    ),
    _target("export-hf student out/hf", *_RUN[3:]),
    _target("import-hf model out/model", *_MODEL),
)
"""Those and commands on a run and a model."""


@dataclass(frozen=True, slots=True)
class Case:
    """A command with one file or argument changed."""

    words: tuple[str, ...]
    what: str
    file: str | None = None
    content: bytes | None = None
    """None with a file: it is gone."""


def cases(targets: Sequence[Target], folder: Path, draw: random.Random) -> Iterator[Case]:
    """Endless cases: every file of every target in turn, and now and then an argument."""
    streams = [
        (target, file, contents(file, (folder / file).read_bytes(), draw))
        for target in targets
        for file in target.files
    ]
    while True:
        draw.shuffle(streams)
        for target, file, stream in streams:
            what, content = next(stream)
            yield Case(target.words, f"{what} of {file}", file, content)
            if draw.random() < 0.15:
                yield _other_words(draw.choice(targets).words, draw)


def _other_words(words: tuple[str, ...], draw: random.Random) -> Case:
    values = (
        "",
        CONTROLS,
        "/",
        "/dev/null",
        "x" * 5000,
        "-1",
        "1e999",
        "nul\u00e9",
        "{",
        "../..",
        "2" * 60,
    )
    changed = list(words)
    at = draw.randrange(1, len(words))
    kind = draw.randrange(3)
    if kind == 0:
        changed[at] = draw.choice(values)
    elif kind == 1:
        del changed[at]
    else:
        changed.insert(
            at, draw.choice(("--", "--x", "-h", CONTROLS, "--tokenizer-mode", "--config"))
        )
    return Case(tuple(changed), "other arguments")


@dataclass(frozen=True, slots=True)
class Ended:
    """What a command came to."""

    code: int
    errors: str
    seconds: float
    left: tuple[str, ...]
    """Files that were not there before."""

    def faults(self) -> list[str]:
        """The counts that it is one too many of."""
        found = []
        # A script's own errors are shown as Python shows them.
        if 'File "script.py"' in self.errors and "megatron-ext: error" not in self.errors:
            return []
        lines = self.errors.splitlines()
        is_refused = self.code == 2 and bool(lines) and lines[-1].startswith("megatron-ext: error")
        if "Traceback (most recent call last)" in self.errors or self.code not in (0, 2):
            found.append("hangs" if self.code in _HUNG else "tracebacks")
        elif self.code == 2 and not is_refused:
            found.append("tracebacks")
        if _CONTROL.search(self.errors):
            found.append("controls")
        if is_refused and len(lines[-1]) > 2100:
            found.append("long_lines")
        if is_refused and self.left:
            found.append("left_behind")
        return found


class Fuzzed:
    """A process with the imports done, which forks a child for each command.

    Args:
        folder: An empty folder for the inputs.
        is_large: Whether a run and a model are made, too, which takes some ten seconds.
    """

    def __init__(self, folder: Path, *, is_large: bool) -> None:
        context = fork_server()
        self._questions, answered = context.Pipe()
        self._process = context.Process(target=_serve, args=(answered, folder, is_large))
        self._process.start()
        answered.close()
        self._questions.recv()

    def __enter__(self) -> Fuzzed:
        return self

    def __exit__(self, *raised: object) -> None:
        # It holds nothing, and takes seconds to end by itself.
        self._process.kill()
        self._process.join()

    def outcome(self, case: Case) -> Ended:
        """What a case comes to."""
        self._questions.send((case.words, case.file, case.content))
        return Ended(*self._questions.recv())


def _serve(questions: Connection, folder: Path, is_large: bool) -> None:
    import torch

    from tests.hostile.input_files import import_verbs, make_large, make_small

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.dup2(2, 1)
    os.chdir(folder)
    # What is imported is no garbage, and no child needs pages of its own to look for some.
    gc.disable()
    import_verbs(is_large=is_large)
    make_small(Path())
    if is_large:
        for words in make_large(Path()):
            code, errors, *_ = _ended(words)
            assert code == 0, (words, errors)
    gc.freeze()
    gc.enable()
    questions.send("ready")
    while True:
        questions.send(_outcome(*questions.recv()))


def _outcome(
    words: Sequence[str], file: str | None, content: bytes | None
) -> tuple[int, str, float, tuple[str, ...]]:
    before = Path(file).read_bytes() if file else b""
    kept = Path(".kept")
    # A run's folder is changed by what resumes it.
    runs = [Path("student")] if "student" in " ".join((*words, file or "")) else []
    for run in filter(Path.exists, runs):
        shutil.copytree(run, kept / run, dirs_exist_ok=True)
    try:
        if file is not None and content is None:
            Path(file).unlink()
        elif file is not None:
            Path(file).write_bytes(content or b"")
        names = _names()
        code, errors, seconds = _ended(words)
        left = sorted(_names() - names)
    finally:
        if file is not None:
            Path(file).write_bytes(before)
        for run in filter(Path.exists, runs):
            shutil.rmtree(run)
            shutil.copytree(kept / run, run)
        shutil.rmtree("out", ignore_errors=True)
        Path("out").mkdir()
    return code, errors, seconds, tuple(left)


def _names() -> set[str]:
    """All files but indices of texts, which any start may leave, and folders of logs."""
    return {
        str(path)
        for path in Path().rglob("*")
        if not {".text_cache", ".kept"} & {*path.parts} and path.name != ".lock"
    }


def _ended(words: Sequence[str]) -> tuple[int, str, float]:
    """Exit code, standard error and seconds of a command, in a child."""
    start = time.monotonic()
    with tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            os.setsid()
            signal.alarm(_WALL_S)
            resource.setrlimit(resource.RLIMIT_CPU, (_PROCESSOR_S, _PROCESSOR_S))
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(null, 1)
            os.dup2(errors.fileno(), 2)
            os._exit(_main(words))
        _, status = os.waitpid(child, 0)
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    return os.waitstatus_to_exitcode(status), text[-20_000:], time.monotonic() - start


def _main(words: Sequence[str]) -> int:
    """Exit code of the command line, as the interpreter ends with it."""
    from megatron_ext.cli.main import main

    sys.argv = ["megatron-ext", *words]
    code: Any = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    if isinstance(code, str):
        sys.stderr.write(code)
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


def run(seconds: float, seed: int) -> dict[str, Any]:
    """Counts of what became of the cases, until the time is over, and those that are faults."""
    end = time.monotonic() + seconds
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, Fuzzed(Path(folder), is_large=True) as fuzzed:
        check_whole(fuzzed, LARGE)
        return tried(fuzzed, _until(end, cases(LARGE, Path(folder), draw)))


def _until(end: float, given: Iterator[Case]) -> Iterator[Case]:
    for case in given:
        if time.monotonic() > end:
            return
        yield case


def check_whole(fuzzed: Fuzzed, targets: Sequence[Target]) -> None:
    """Check that commands succeed before anything is damaged, so that damage is what is refused."""
    for words in {target.words for target in targets}:
        ended = fuzzed.outcome(Case(words, "whole"))
        assert ended.code == 0, (words, ended.errors)


def tried(fuzzed: Fuzzed, given: Iterator[Case]) -> dict[str, Any]:
    """Counts of the outcomes of cases."""
    counts: dict[str, Any] = dict.fromkeys(COUNTS, 0)
    found: list[list[Any]] = []
    for case in given:
        ended = fuzzed.outcome(case)
        counts["cases"] += 1
        faults = ended.faults()
        for fault in faults:
            counts[fault] += 1
        counts["done"] += ended.code == 0
        counts["refused"] += ended.code == 2 and not faults
        if faults:
            words = " ".join(case.words)[:300]
            found.append([faults, case.what, words, ended.left[:5], ended.errors[-1500:]])
    return counts | {"found": found}


def some(fuzzed: Fuzzed, folder: Path, seed: int, count: int) -> dict[str, Any]:
    """Counts of the first cases of the small commands."""
    return tried(fuzzed, islice(cases(SMALL, folder, random.Random(seed)), count))

"""What chat templates of strangers come to: text or an error, processor time and memory."""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from megatron_ext.conversation import render
from megatron_ext.errors import MegatronExtError
from tests.hostile.template_attacks import ATTACKS, Attack
from tests.hostile.template_grammar import Grammar

SECONDS: Final = 2.0
"""Processor time that a hostile template may take."""
MEMORY: Final = 300 * 2**20
"""Bytes by which a process may grow with it."""
_LAST_RESORT: Final = 20
"""Seconds of processor time after which the kernel ends an attack."""
NAME: Final = "template of a stranger"
_MARK: Final = "leaked 5c1f"
"""Text that no template gets at."""


class Given:
    """A variable with attributes that no template may read."""

    secret = real = hex = runs = name = _MARK


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of an attack."""

    kind: str
    """``refused``, ``rendered``, ``escaped``, or the name of an exception that is not ours."""
    text: str
    """The error, or the beginning of the text."""
    seconds: float
    """Processor time."""
    growth: int
    """Bytes by which the process grew."""

    @property
    def is_slow(self) -> bool:
        """Whether it took too much processor time."""
        return self.seconds >= SECONDS

    @property
    def is_large(self) -> bool:
        """Whether it took too much memory."""
        return self.growth >= MEMORY

    @property
    def is_clean(self) -> bool:
        """Whether an error is ours, in one line that can be printed, and names the template."""
        if self.kind == "rendered":
            return True
        return (
            self.kind == "refused"
            and NAME in self.text
            and self.text.isprintable()
            and len(self.text) <= 2000
        )


class Attacker:
    """A process that forks a child for each attack; it has one thread and little memory.

    A test's own process has the threads and libraries of everything that it ran before, and a fork
    of it may find a lock that is held.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hostile.template_runs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            text=True,
        )

    def __enter__(self) -> Attacker:
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.communicate()

    def outcome(self, attack: Attack) -> Outcome:
        """What becomes of an attack."""
        given, answers = self._process.stdin, self._process.stdout
        assert given is not None
        assert answers is not None
        given.write(json.dumps([attack.source, dict(attack.variables)]) + "\n")
        given.flush()
        return Outcome(**json.loads(answers.readline()))


def _serve() -> None:
    """Try each attack of standard input, and write its outcome."""
    rendered(Attack("{{ 'a' | tojson | wordwrap | pprint | urlize }}{{ strftime_now('%Y') }}"))
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(vars(_outcome(Attack(*json.loads(line))))), flush=True)


def _outcome(attack: Attack) -> Outcome:
    """What becomes of an attack in a child of this process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            os.write(writing, json.dumps(_attacked(attack)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        written = pipe.read()
    _, status, usage = os.wait4(child, 0)
    if not written:
        kind = f"ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "ended"
        growth = usage.ru_maxrss * 1024
        return Outcome(kind=kind, text="", seconds=usage.ru_utime + usage.ru_stime, growth=growth)
    return Outcome(**json.loads(written))


def _attacked(attack: Attack) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_CPU, (_LAST_RESORT, _LAST_RESORT))
    resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
    memory, start = _peak(), time.process_time()
    try:
        kind, text = "rendered", rendered(attack)
    except MegatronExtError as error:
        kind, text = "refused", str(error)
    except BaseException as error:
        kind, text = type(error).__name__, str(error)[:200]
    seconds = time.process_time() - start
    if _MARK in text or "root:x:0" in text:
        kind = "escaped"
    return {"kind": kind, "text": text[:2001], "seconds": seconds, "growth": _peak() - memory}


def _peak() -> int:
    """Bytes of memory that the process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


QUESTION: Final = [{"role": "user", "content": "hi", "tags": ["a"]}]


def rendered(attack: Attack) -> str:
    """The text that a template renders."""
    return render(
        attack.source,
        QUESTION,
        special_tokens={"bos_token": "<s>"},
        variables={"given": Given(), **attack.variables},
        name=NAME,
        keep_unknown=True,
    ).text


def attacks(seed: int) -> Iterator[tuple[str, Attack]]:
    """The table, then random templates without end."""
    yield from ATTACKS.items()
    grammar = Grammar(seed)
    number = 0
    while True:
        yield f"random {seed}-{number}", Attack(grammar.template())
        number += 1


def run(seconds: float, seed: int) -> dict[str, Any]:
    """Counts of what became of the table and then of random templates, until the time is over.

    What took too much time or memory, or gave another error than ours, is named under ``found``.
    """
    counts: dict[str, Any] = dict.fromkeys(
        ("cases", "refused", "rendered", "escapes", "over_time", "over_memory", "tracebacks"), 0
    )
    counts["found"] = []
    end = time.monotonic() + seconds
    with Attacker() as attacker:
        for name, attack in attacks(seed):
            if time.monotonic() > end:
                break
            result = attacker.outcome(attack)
            is_fault = {
                "over_time": result.is_slow,
                "over_memory": result.is_large,
                "escapes": result.kind == "escaped",
                "tracebacks": not (result.is_clean or result.is_slow or result.kind == "escaped"),
            }
            counts["cases"] += 1
            for key, is_found in is_fault.items():
                counts[key] += is_found
            if result.kind in counts:
                counts[result.kind] += 1
            if any(is_fault.values()):
                counts["found"].append([name, attack.source[:300], *vars(result).values()])
    return counts


if __name__ == "__main__":
    _serve()

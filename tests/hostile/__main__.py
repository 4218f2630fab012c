"""Attack what the documentation promises, for a while, and print the counts as JSON.

    python -m tests.hostile --minutes 20 --seed 1

The time is shared by the modules here that have a ``run``. The exit code is 1 where anything was
found that is neither done nor refused as it should be.
"""

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, Final

_HARMLESS: Final = ("cases", "programs", "attacks", "refused", "rendered", "done", "growth_bytes")
"""Counts that are no faults."""


def faults(counts: dict[str, Any]) -> dict[str, int]:
    """The counts that have to be 0."""
    return {
        name: count
        for name, count in counts.items()
        if isinstance(count, int) and name not in _HARMLESS
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="time for all of them")
    parser.add_argument("--seed", type=int, default=0, help="seed of what is random")
    parser.add_argument("--only", help="name of one module, such as jail_programs")
    arguments = parser.parse_args()
    files = sorted(Path(__file__).parent.glob("*.py"))
    modules = [
        import_module(f"tests.hostile.{file.stem}")
        for file in files
        if not file.stem.startswith(("test_", "__")) and arguments.only in (None, file.stem)
    ]
    runs = [module for module in modules if hasattr(module, "run")]
    seconds = arguments.minutes * 60 / max(len(runs), 1)
    results = {}
    for module in runs:
        name = module.__name__.rsplit(".", 1)[-1]
        # Each in a new process: memory is measured as growth.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            results[name] = pool.submit(module.run, seconds, arguments.seed).result()
        sys.stderr.write(f"{name}: {faults(results[name])}\n")
    print(json.dumps(results, indent=1, default=str))
    sys.exit(any(any(faults(counts).values()) for counts in results.values()))


if __name__ == "__main__":
    main()

"""Record a change that is meant, or compare two states of the code bit for bit.

    python -m tests.guards.record names              write public_names.json
    python -m tests.guards.record losses             write golden_losses.json
    python -m tests.guards.record --bits FILE        write hashes of every loss and gradient
    python -m tests.guards.record --compare FILE     print what is not bit for bit as in FILE

Hashes hold on one machine and are not committed.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from tests.guards.golden_losses import GOLDEN, bits_of, golden_paths, measure, numbers_of
from tests.guards.public_names import SNAPSHOT, current_names, differences, recorded_names


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("names", "losses"))
    parser.add_argument("--bits", type=Path, metavar="FILE")
    parser.add_argument("--compare", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.what == "names":
        record_names()
    if arguments.what == "losses":
        record_losses()
    if arguments.bits is not None:
        arguments.bits.write_text(json.dumps(_bits(), indent=1) + "\n", encoding="utf-8")
    if arguments.compare is not None:
        sys.exit(_compare(json.loads(arguments.compare.read_text(encoding="utf-8")), _bits()))


def record_names():
    """Write ``public_names.json`` and print what is new in it."""
    recorded = recorded_names()
    names = current_names(recorded)
    print("\n".join(differences(recorded, names)))
    SNAPSHOT.write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")


def record_losses():
    """Write ``golden_losses.json``, a case a line."""
    lines = [
        f"{json.dumps(name)}: {json.dumps(numbers_of(measure(*path)))}"
        for name, path in golden_paths().items()
    ]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _bits():
    return {name: bits_of(measure(*path)) for name, path in golden_paths().items()}


def _compare(before, after):
    """Print what differs; 1 where anything does."""
    different = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    for name in different:
        was, now = before.get(name), after.get(name)
        if isinstance(was, dict) and isinstance(now, dict):
            tensors = [part for part in {**was, **now} if was.get(part) != now.get(part)]
            print(f"{name}: {', '.join(tensors)}")
        else:
            print(f"{name}: {'gone' if now is None else 'new' if was is None else 'not refused'}")
    print(f"{len(after) - len(different)} of {len(after)} are the same bit for bit")
    return 1 if different else 0


if __name__ == "__main__":
    main()

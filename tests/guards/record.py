"""Record a change that is meant.

python -m tests.guards.record names
"""

from __future__ import annotations

import argparse
import json

from tests.guards.public_names import SNAPSHOT, current_names, differences, recorded_names


def main() -> None:
    """Write what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("names",))
    parser.parse_args()
    record_names()


def record_names() -> None:
    """Write ``public_names.json`` and print what is new in it."""
    recorded = recorded_names()
    names = current_names(recorded)
    print("\n".join(differences(recorded, names)))
    SNAPSHOT.write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

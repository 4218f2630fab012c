"""The parser of a Megatron-LM release, by the record of its flags.

``record_megatron_flags.py`` writes the record. Defaults are not in it, nor the choices of a flag.
"""

import argparse
import json

from tests.training.record_megatron_flags import FOLDER

RELEASES = tuple(sorted(file.stem for file in FOLDER.glob("*.json")))
"""Tags of the releases that are recorded."""

_TYPES = {"int": int, "float": float, "str": str}
_SWITCHES = {
    "on": {"action": "store_true"},
    "off": {"action": "store_false"},
    "either": {"action": argparse.BooleanOptionalAction},
}


def release_parser(tag):
    """A parser with the flags of a release; it raises where argparse would end the process."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    flags = json.loads((FOLDER / f"{tag}.json").read_text())
    for name, text in flags.items():
        kind, _, destination = text.partition(" ")
        options = {"dest": destination} if destination else {}
        parser.add_argument(name, **options, **_takes(kind))
    return parser


def _takes(kind):
    if kind in _SWITCHES:
        return _SWITCHES[kind]
    name = next(name for name in _TYPES if kind.startswith(name))
    count = kind.removeprefix(name)
    nargs = {"nargs": int(count) if count.isdigit() else count} if count else {}
    return {"type": _TYPES[name], **nargs}

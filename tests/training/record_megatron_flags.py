"""Record which flags the parser of a Megatron-LM release has, for ``megatron_flags``.

    python tests/training/record_megatron_flags.py ../Megatron-LM core_v0.16.1

The first argument is a checkout whose modules import in this Python, the second is its tag. What is
written are the names of its flags and what each takes.
"""

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).parent / "megatron_flags"
_SWITCHES = {
    "_StoreTrueAction": "on",
    "_StoreFalseAction": "off",
    "BooleanOptionalAction": "either",
}


def kind_of(action):
    """``on``, ``off``, ``either``, or the type and the number of what a flag takes."""
    switch = _SWITCHES.get(type(action).__name__)
    if switch is not None:
        return switch
    kind = action.type.__name__ if action.type in (int, float) else "str"
    return f"{kind}{action.nargs or ''}"


def flags_of(parser):
    """Name of each flag -> its kind, and the attribute it sets where that has another name."""
    found = {}
    for name, action in parser._option_string_actions.items():
        if isinstance(action, argparse._HelpAction):
            continue
        kind = kind_of(action)
        if kind == "either" and name != action.option_strings[0]:
            # The other way, which comes with the first.
            continue
        named = name.removeprefix("--").replace("-", "_")
        found[name] = kind if named == action.dest else f"{kind} {action.dest}"
    return found


def main():
    checkout, tag = sys.argv[1:]
    sys.path.insert(0, str(Path(checkout).resolve()))
    parser = argparse.ArgumentParser(allow_abbrev=False)
    import_module("megatron.training.arguments").add_megatron_arguments(parser)
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps(flags_of(parser), indent=0, sort_keys=True)
    (FOLDER / f"{tag}.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main()

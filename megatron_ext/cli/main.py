"""``megatron-ext VERB ...``: parse, run, and turn an error into one line.

Each verb is a module with ``add_arguments`` and ``run``; it is imported when it is called, so that
``megatron-ext --help`` stays instant.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from megatron_ext.errors import MegatronExtError
from megatron_ext.version import __version__

VERBS = {
    "distill": "train a student from a teacher with another tokenizer",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one verb and exit: 0 when done, 2 on an error the user can mend."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    if not argv or argv[0] not in VERBS:
        parser.parse_args(argv)
        parser.print_help()
        sys.exit(2)
    verb = import_module(f"megatron_ext.cli.{argv[0]}")
    verb_parser = argparse.ArgumentParser(
        prog=f"megatron-ext {argv[0]}",
        description=verb.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_arguments(verb_parser)
    try:
        verb.run(verb_parser.parse_args(argv[1:]))
    except MegatronExtError as error:
        sys.stderr.write(f"megatron-ext: error: {error}\n")
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    lines = "\n".join(f"  {name:<12} {summary}" for name, summary in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="megatron-ext",
        description="The tokenizer and cross-tokenizer distillation layer for Megatron.",
        epilog=f"verbs:\n{lines}\n\nmegatron-ext VERB --help lists the options of a verb.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megatron-ext {__version__}")
    parser.add_argument("verb", choices=VERBS, metavar="VERB", help="what to do")
    return parser

"""The command ``megatron-ext VERB ...``: parses, runs the verb, and prints errors in one line.

Each verb is a module with ``add_arguments`` and ``run`` that is imported when it is called, so that
``megatron-ext --help`` is instant.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import re
import select
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, Final, NoReturn

from megatron_ext.cli.output import add_output_flags, as_told
from megatron_ext.constants import __version__
from megatron_ext.errors import ConfigError, MegatronExtError, escape_controls, printable
from megatron_ext.files import from_home
from megatron_ext.imports import needed_packages
from megatron_ext.registry import did_you_mean, nearest

VERBS = {
    "inspect": "show the tokens of a text, or the trained part of a conversation",
    "align": "show how the tokens of a student and a teacher align on a text",
    "projection": "build, inspect and convert a projection between two vocabularies",
    "transfer": "give a model another tokenizer",
    "distill": "train a student from a teacher with another tokenizer",
    "sft": "train a model on conversations, without a teacher",
    "train": "train a model on texts, without a teacher",
    "cache-teacher": "record the predictions of a teacher, for runs without its model",
    "serve-teacher": "serve a teacher to runs on other machines",
    "report": "write a page about a run, or about several side by side",
    "import-hf": "import a HuggingFace folder as a checkpoint of a student or a teacher",
    "export-hf": "export a run or a checkpoint to a HuggingFace folder",
    "generate": "generate text with a model, or with several together",
    "evaluate": "measure a model: bits per byte, multiple choice, generated answers",
    "tokenize": "tokenize documents to Megatron's .bin and .idx",
    "run": "run a script of Megatron-LM with our flags and tokenizers",
    "recipes": "list or copy configurations for pairs of published models",
    "ls": "list objectives, prompt formats, tasks, model families or recipes",
    "demo": "train a teacher, distil a student, and compare, in minutes on a CPU",
    "doctor": "show versions, devices, and what is missing",
    "completion": "print the completion of this command for bash, zsh or fish",
    "schema": "print a JSON schema of configurations, for editors",
}

_EXTRA_OF: Final = {
    **dict.fromkeys(("distill", "cache-teacher", "serve-teacher", "transfer", "generate"), "train"),
    **dict.fromkeys(("import-hf", "export-hf", "evaluate", "sft", "train"), "train"),
    "demo": "demo",
}
"""Verb -> extra for all that it needs."""

_EXIT_WITHOUT_READER = 128 + 13
"""Exit code of a program ended by SIGPIPE."""

_EXIT_INTERRUPTED = 128 + 2
"""Exit code of a program ended by SIGINT."""

_ALMOST: Final = 0.85
"""Least similarity of two names that differ by a slip."""

_NAMES_ELSEWHERE: Final = {
    "run-dir": "output output-dir out-dir save experiment-path",
    "initial-checkpoint": "model-name-or-path student student-model load "
    "student-pretrained-model-name-or-path",
    "teacher-checkpoint": "teacher teacher-model teacher-model-name-or-path "
    "teacher-pretrained-model-name-or-path",
    "data-train": "data-path train-data-path train-file dataset-name data-train-path",
    "tokenizer-model": "tokenizer-name student-tokenizer-name target-tokenizer-name",
    "teacher-tokenizer-model": "teacher-tokenizer-name",
    "data-text-key": "dataset-text-field",
    "seq-length": "max-length max-seq-length max-seq-len max-length-new max-student-length",
    "teacher-seq-length": "max-length-teacher max-teacher-length",
    "loss-objective": "objective loss losses",
    "loss-options": "alm-diff-fn",
    "precision": "bf16 dtype torch-dtype",
    "train-iters": "max-steps steps num-train-steps epochs num-epochs num-train-epochs",
    "micro-batch-size": "per-device-train-batch-size mbs",
    "global-batch-size": "batch-size gbs gradient-accumulation-steps",
    "lr-warmup-iters": "warmup-steps",
    "save-interval": "save-steps",
    "eval-interval": "eval-steps",
    "lora-rank": "lora-r model-lora-r",
    "lr": "optimizer-learning-rate",
    "tensor-model-parallel-size": "tp tp-size tensor-parallel-size",
    "pipeline-model-parallel-size": "pp pp-size pipeline-parallel-size",
    "context-parallel-size": "cp cp-size",
}
"""Flag -> its names in transformers, TRL, tokenkit and Megatron-LM, and abbreviations."""

_VERBS_ELSEWHERE: Final = {
    "doctor": "env info version",
    "export-hf": "export",
    "generate": "chat infer inference sample",
    "serve-teacher": "serve",
    "sft": "finetune fine-tune",
    "tokenize": "preprocess preprocess-data",
}
"""Verb -> its names in TRL, axolotl, vLLM and Megatron-LM."""


def _by_other_names(names_of: Mapping[str, str]) -> dict[str, str]:
    return {name: ours for ours, names in names_of.items() for name in names.split()}


_FLAG_OF: Final = _by_other_names(_NAMES_ELSEWHERE)
_VERB_OF: Final = _by_other_names(_VERBS_ELSEWHERE)

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
_COLOUR: Final = re.compile("(\x1b\\[[0-9;]{0,16}m)")
_LINES_UP: Final = re.compile("(?:\n|\x1b\\[A)+")
"""All that several progress bars write to go from one to another."""


class TerminalText:
    """A stream whose text moves no cursor, sets no title and runs nothing in a terminal.

    Control characters are written as their escapes, but for the ends of lines, tabs and colours.

    Args:
        stream: The stream that is written to; everything else is its own.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text; see ``TextIO.write``."""
        shown = text
        if not _LINES_UP.fullmatch(text):
            # Every second part is a colour.
            parts = _COLOUR.split(text)
            parts[::2] = [escape_controls(part, allowed="\n\r\t") for part in parts[::2]]
            shown = "".join(parts)
        self._stream.write(shown)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of them."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one verb; on a ``MegatronExtError`` exit with 2 and one line on standard error.

    If the reader of standard output stops early, as ``head`` does, the verb ends silently with the
    exit code of SIGPIPE.
    """
    if argv is None:
        # Threads that wait in a loop take the cores from those that they wait for: where other
        # programs run, steps of a CPU take ten times as long. Read when torch is loaded.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        sys.stderr = TerminalText(sys.stderr)
        # What is piped is data, and stays what it is: also paths that are not UTF-8.
        if sys.stdout.isatty():
            sys.stdout = TerminalText(sys.stdout)
        elif isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="surrogateescape")
    try:
        _run(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
    except BrokenPipeError:
        # Another pipe may have broken, such as one to a worker, which is an error.
        if not _stdout_is_broken():
            raise
        sys.exit(_EXIT_WITHOUT_READER)
    except MegatronExtError as error:
        rank = os.environ.get("RANK", "0")
        code = getattr(error, "exit_code", 2)
        if code != 2 and rank != "0":
            # Every rank is ended by the signal, and rank 0 says so.
            sys.exit(code)
        who = "megatron-ext: error" if rank == "0" else f"megatron-ext: error (rank {rank})"
        sys.stderr.write(f"{who}: {error}\n")
        sys.exit(code)
    except KeyboardInterrupt:
        sys.stderr.write("megatron-ext: interrupted\n")
        sys.exit(_EXIT_INTERRUPTED)
    except (OSError, RecursionError, ValueError) as error:
        line = _line_of(error)
        if line is None:
            raise
        sys.stderr.write(f"megatron-ext: error: {line}\n")
        sys.exit(2)


def _line_of(error: Exception) -> str | None:
    """What to say of an error of Python that an input or the machine causes; None for a defect."""
    if isinstance(error, RecursionError):
        return "an input is nested too deeply; expected no more than some hundred levels"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        if error.errno in _NO_ROOM:
            return printable(
                f"{where}{error.strerror}; make room there and run the command again; a run "
                "resumes from its last checkpoint"
            )
        return printable(f"{where}{error.strerror}") if where else None
    if "embedded null" in str(error):
        return "a path holds a NUL character; expected the path of a file"
    return None


def _stdout_is_broken() -> bool:
    """Whether standard output is a broken pipe; if so, redirect it to the null device."""
    output = select.poll()
    # No event needs to be requested: POLLERR is always reported.
    output.register(sys.stdout.fileno(), 0)
    if not output.poll(0):
        return False
    # Python flushes buffered output at exit, which would raise again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


class _HelpAll(argparse.Action):
    """The flag ``--help-all``: help with the advanced flags, which ``--help`` leaves out."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, _Parser)
        sys.stdout.write(argparse.ArgumentParser.format_help(parser))
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """Argument parser that raises ``ConfigError`` and suggests similar flags and choices.

    Its help leaves out actions with the attribute ``is_advanced``.
    """

    _given: Sequence[str] = ()

    def format_help(self) -> str:
        """The help without advanced flags, and how to see these."""
        advanced = [
            action
            for action in self._actions
            if getattr(action, "is_advanced", False) and action.help != argparse.SUPPRESS
        ]
        if not advanced:
            return super().format_help()
        helps = [action.help for action in advanced]
        for action in advanced:
            action.help = argparse.SUPPRESS
        try:
            text = super().format_help()
        finally:
            for action, words in zip(advanced, helps, strict=True):
                action.help = words
        return f"{text}\n{len(advanced)} more flags: {self.prog} --help-all\n"

    def add_help_all(self) -> None:
        """Add ``--help-all``, unlisted where ``--help`` shows all flags, and to every action."""
        is_long = any(getattr(action, "is_advanced", False) for action in self._actions)
        words = "show all flags and exit" if is_long else argparse.SUPPRESS
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help=words)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for inner in dict.fromkeys(action.choices.values()):
                    inner.add_help_all()

    def error(self, message: str) -> NoReturn:
        # A flag may be missing because its name was mistyped.
        if message.endswith("required") or " required: " in message:
            message += self._mistyped()
        raise ConfigError(message, fix=f"see {self.prog} --help")

    def _mistyped(self) -> str:
        flags = list(_flags(self))
        known = {name for name, _ in flags}
        given = (word.split("=")[0] for word in self._given if word.startswith("--"))
        unknown = next((flag for flag in given if flag.strip("-") and flag not in known), "")
        return f"; unrecognized: {unknown}{_near_flag(unknown, flags)}" if unknown else ""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does, keeping the words for an error's advice."""
        self._given = [] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse as argparse does, suggesting a flag for an unknown one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            # An override of Hydra is a key and a value: optimizer.lr=1e-3.
            words = (word.lstrip("+") for word in unknown if word.startswith("--") or "=" in word)
            flag = next(words, "").split("=")[0]
            near = _near_flag(flag, list(_flags(self)))
            self.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
        return parsed

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            choices = [str(choice) for choice in action.choices or ()]
            verb = _VERB_OF.get(value) if action.dest == "verb" else None
            near = did_you_mean(value if verb is None else verb, choices)
            if near is None:
                raise
            raise argparse.ArgumentError(action, f"{error.message}; {near}") from None


def _flags(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """Every flag of a parser and of its subparsers, with its action."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _flags(inner)
        for flag in () if action.dest.startswith("help") else action.option_strings:
            yield flag, action


def _near_flag(flag: str, actions: list[tuple[str, argparse.Action]]) -> str:
    """A suggestion of a flag with a similar name, or else the first whose help has its words."""
    words = flag.strip("-").replace("-", " ")
    # A key's sections may be guessed: --optimizer-lr for --lr, which is optimizer.lr.
    keys = ((name, action.dest) for name, action in actions if "." in action.dest)
    flag_of_key = {key.replace(".", "-").replace("_", "-"): name for name, key in keys}
    flag_of = {name.strip("-"): name for name, _ in actions}
    told = (name for name, action in actions if words in (action.help or "").lower())
    same = flag_of.get(_FLAG_OF.get(re.sub("[_.]", "-", flag.strip("-")), ""))
    key = nearest(words.replace(" ", "-"), list(flag_of_key), least=_ALMOST)
    name = nearest(words.replace(" ", "-"), list(flag_of))
    if same is not None:
        found: str | None = same
    elif key is not None:
        found = flag_of_key[key]
    elif name is not None:
        found = flag_of[name]
    else:
        found = next(told, None) if " " in words else None
    if found == flag:
        return "; other actions have this flag"
    return "" if found is None else f"; did you mean {found!r}?"


def _run(argv: list[str]) -> None:
    if argv[:1] == ["help"]:
        argv = [*argv[1:2], "--help"]
    if not argv or argv[0] not in VERBS:
        _parser().parse_args(argv)
    with needed_packages(f"megatron-ext {argv[0]}", extra=_EXTRA_OF.get(argv[0])):
        verb = _module(argv[0])
        arguments = verb_parser(argv[0]).parse_args([*map(_from_home, argv[1:])])
        with as_told(arguments, _is_told):
            verb.run(arguments)


_OF_TEXT: Final = ("--prompt", "--stop", "--text")
"""Flags whose values are texts."""


def _from_home(word: str) -> str:
    """A word of the command line, with the path of ``--flag=~/path`` from the user's folder."""
    flag, sign, value = word.partition("=")
    is_path = sign and flag.startswith("-") and flag not in _OF_TEXT
    return f"{flag}={from_home(value)}" if is_path else word


def _is_told(error: Exception) -> bool:
    """Whether ``main`` writes a line for an error."""
    if isinstance(error, MegatronExtError):
        return True
    is_of_python = isinstance(error, (OSError, RecursionError, ValueError))
    return is_of_python and not isinstance(error, BrokenPipeError) and _line_of(error) is not None


def _module(verb: str) -> ModuleType:
    return import_module(f"megatron_ext.cli.{verb.replace('-', '_')}")


def verb_parser(verb: str) -> argparse.ArgumentParser:
    """The parser of a verb's arguments."""
    module = _module(verb)
    parser = _Parser(
        prog=f"megatron-ext {verb}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    add_output_flags(parser)
    parser.add_help_all()
    return parser


def _parser() -> argparse.ArgumentParser:
    lines = "\n".join(f"  {name:<14} {summary}" for name, summary in VERBS.items())
    parser = _Parser(
        prog="megatron-ext",
        description="The tokenizer and cross-tokenizer distillation layer for Megatron.",
        epilog=f"verbs:\n{lines}\n\n"
        "megatron-ext VERB --help, or help VERB, lists the flags of a verb. Start with "
        "megatron-ext demo.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"megatron-ext {__version__}")
    parser.add_argument("verb", choices=[*VERBS, "help"], metavar="VERB", help="what to do")
    return parser

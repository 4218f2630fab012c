"""Print the completion of this command for a shell.

    source <(megatron-ext completion bash)                                  # in ~/.bashrc
    source <(megatron-ext completion zsh)                                   # in ~/.zshrc
    megatron-ext completion fish > ~/.config/fish/completions/megatron-ext.fish

It completes verbs, their actions, flags, and the values of flags that have choices; other words are
completed as files. The script is static, so pressing Tab starts no Python: print it again after an
update.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from megatron_ext.cli.main import VERBS, verb_parser
from megatron_ext.errors import MissingDependencyError


@dataclass(frozen=True, slots=True)
class CompletedFlag:
    """A spelling of a flag."""

    name: str
    """With its dashes."""
    about: str
    takes_value: bool
    choices: tuple[str, ...]
    """Its values; empty where any can be given."""


@dataclass(frozen=True, slots=True)
class CompletedCommand:
    """What can follow a command."""

    path: str
    """The words of the command, with spaces between; empty for the program itself."""
    words: Mapping[str, str]
    """Verbs, actions or choices that follow, each with a line about it."""
    flags: tuple[CompletedFlag, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument of the verb."""
    parser.add_argument("shell", choices=_SCRIPTS, help="the shell")


def run(arguments: argparse.Namespace) -> None:
    """Print the script."""
    sys.stdout.write(_SCRIPTS[arguments.shell](list(commands())))


def commands() -> Iterator[CompletedCommand]:
    """The program, its verbs and their actions.

    A verb whose packages are not installed has no flags, and is named on standard error.
    """
    flags = CompletedFlag("--help", "", False, ()), CompletedFlag("--version", "", False, ())
    yield CompletedCommand("", {**VERBS, "help": "show the help of a verb"}, flags)
    yield CompletedCommand("help", VERBS, ())
    for verb in VERBS:
        try:
            yield from _of_parser(verb, verb_parser(verb))
        except (ImportError, MissingDependencyError) as error:
            sys.stderr.write(f"megatron-ext: {verb} is completed without flags: {error}\n")
            yield CompletedCommand(verb, {}, ())


def _of_parser(path: str, parser: argparse.ArgumentParser) -> Iterator[CompletedCommand]:
    words: dict[str, str] = {}
    flags: list[CompletedFlag] = []
    inner: list[CompletedCommand] = []
    for action in parser._actions:
        choices = tuple(map(str, action.choices or ()))
        if isinstance(action, argparse._SubParsersAction):
            about = {choice.dest: _line(choice.help) for choice in action._choices_actions}
            words |= {name: about.get(name, "") for name in choices}
            for name, subparser in action.choices.items():
                inner += _of_parser(f"{path} {name}", subparser)
        elif not action.option_strings:
            words |= dict.fromkeys(choices, "")
        elif action.help is argparse.SUPPRESS:
            continue
        takes_value = action.nargs != 0
        flags += [
            CompletedFlag(name, _line(action.help), takes_value, choices)
            for name in action.option_strings
        ]
    yield CompletedCommand(path, words, tuple(flags))
    yield from inner


def _line(text: str | None) -> str:
    """The first sentence of a help, as plain words."""
    words = " ".join((text or "").replace("%%", "%").split())
    return words.partition(". ")[0].partition("; ")[0].removesuffix(".")


def _bash(listed: list[CompletedCommand]) -> str:
    values, words = [], []
    for command in listed:
        for flag in command.flags:
            if flag.takes_value:
                choices = " ".join(flag.choices)
                values.append(f'        "{command.path} {flag.name}") words="{choices}" ;;')
        names = " ".join(flag.name for flag in command.flags)
        words.append(
            f'        "{command.path}") flags="{names}"; words="{" ".join(command.words)}" ;;'
        )
    return f"""\
# Completion of megatron-ext for bash.
_megatron_ext() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD - 1]}}"
    local command="" flags="" words="" i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$command ${{COMP_WORDS[i]}}" in
            {_paths(listed)})
                command="${{command:+$command }}${{COMP_WORDS[i]}}" ;;
        esac
    done
    COMPREPLY=()
    case "$command $previous" in
{_joined(values)}
        *)
    case "$command" in
{_joined(words)}
    esac ;;
    esac
    if [[ "$word" == -* ]]; then words="$flags"; fi
    if [[ -n "$words" ]]; then COMPREPLY=($(compgen -W "$words" -- "$word")); fi
}}
complete -o default -o bashdefault -F _megatron_ext megatron-ext
"""


def _zsh(listed: list[CompletedCommand]) -> str:
    values, words = [], []
    for command in listed:
        for flag in command.flags:
            if flag.takes_value:
                then = f"compadd -- {' '.join(flag.choices)}" if flag.choices else "_files"
                values.append(f"        ('{command.path} {flag.name}') {then}; return ;;")
        names = " ".join(_described(flag.name, flag.about) for flag in command.flags)
        following = " ".join(_described(*each) for each in command.words.items())
        words.append(f"        ('{command.path}') flags=({names}); follow=({following}) ;;")
    return f"""\
#compdef megatron-ext
# Completion of megatron-ext for zsh.
_megatron_ext() {{
    local command="" part previous="${{words[CURRENT - 1]}}"
    local -a flags follow
    for part in "${{(@)words[2, CURRENT - 1]}}"; do
        case "$command $part" in
            ({_paths(listed)})
                command="${{command:+$command }}$part" ;;
        esac
    done
    case "$command $previous" in
{_joined(values)}
    esac
    case "$command" in
{_joined(words)}
    esac
    if [[ "${{words[CURRENT]}}" == -* ]]; then
        _describe -o flag flags
    elif (( ${{#follow}} )); then
        _describe word follow
    else
        _files
    fi
}}
if [[ "${{zsh_eval_context[-1]}}" == loadautofunc ]]; then
    _megatron_ext "$@"
else
    compdef _megatron_ext megatron-ext
fi
"""


def _fish(listed: list[CompletedCommand]) -> str:
    lines = []
    for command in listed:
        begin = f"complete -c megatron-ext -n {_quoted('__megatron_ext_at ' + command.path)}"
        for word, about in command.words.items():
            lines.append(f"{begin} -f -a {_quoted(word)}{_fish_about(about)}")
        for flag in command.flags:
            kind = "-l" if flag.name.startswith("--") else "-s"
            value = f" -x -a {_quoted(' '.join(flag.choices))}" if flag.choices else " -r"
            named = f"{kind} {flag.name.lstrip('-')}{value if flag.takes_value else ''}"
            lines.append(f"{begin} {named}{_fish_about(flag.about)}")
    paths = " ".join(_quoted(f"{command.path}") for command in listed if command.path)
    return f"""\
# Completion of megatron-ext for fish.
function __megatron_ext_at
    set -l command
    for part in (commandline -opc)[2..-1]
        if contains -- (string join -- ' ' $command $part) {paths}
            set -a command $part
        end
    end
    test "$command" = "$argv"
end
{_joined(lines)}
"""


_SCRIPTS: Final[Mapping[str, Callable[[list[CompletedCommand]], str]]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}


def _paths(listed: Iterable[CompletedCommand]) -> str:
    """Patterns of bash and zsh for a command so far and its next word."""
    patterns = []
    for command in listed:
        begin, _, last = command.path.rpartition(" ")
        if last:
            patterns.append(f'"{begin} {last}"')
    return " | ".join(patterns)


def _described(word: str, about: str) -> str:
    """A word of zsh's ``_describe``."""
    text = word.replace(":", "\\:")
    return _quoted(f"{text}:{about}" if about else text)


def _fish_about(about: str) -> str:
    return f" -d {_quoted(about)}" if about else ""


def _quoted(text: str) -> str:
    """A word within single quotes, for zsh and for fish."""
    plain = text.replace("\\", "").replace("'", "’")
    return f"'{plain}'"


def _joined(lines: Iterable[str]) -> str:
    return "\n".join(lines)

"""``ConversationReport``: the output of ``megatron-ext inspect --conversation`` in all formats."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from megatron_ext.alignment.audit import share_in_words
from megatron_ext.cli.output import write_output
from megatron_ext.cli.pages.conversation_cells import KINDS, Kind
from megatron_ext.cli.pages.conversation_view import (
    ConversationView,
    ConversationViewer,
    TurnView,
    conversation_of,
    json_records,
    naming_record,
)
from megatron_ext.cli.pages.token_view import (
    BLUE,
    BOLD,
    BOLD_UNDERLINED,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RED,
    TEAL,
    VIOLET,
    WARNING,
    listing,
    one_line,
    readable_text,
    styled,
)
from megatron_ext.documents.records import schema_of
from megatron_ext.errors import ConversationError
from megatron_ext.tokenizers import MegatronTokenizerText

_COLORS: Final[Mapping[Kind, str]] = {
    "template": GREY,
    "system": VIOLET,
    "user": BLUE,
    "tool": ORANGE,
    "assistant": GREEN,
    "image": PINK,
    "variable": TEAL,
    "unknown": RED,
}


def conversation_ribbon(view: ConversationView, *, color: bool) -> Iterator[str]:
    """A conversation for a terminal: text turn by turn, legend, totals and warnings.

    Trained text is bold and underlined; without colour it is in ``⟪⟫``, and other text that is not
    the template's in ``‹›``.
    """
    yield f"{totals(view)}\n\n"
    yield f"{_legend(view, color=color)}\n"
    for turn in view.turns:
        title = styled(_COLORS[turn.kind] + BOLD, turn.title, color=color)
        yield f"\n{' · '.join((f'── {title}', *turn.counts))}\n"
        text = "".join(_runs(turn, color=color))
        yield text if text.endswith("\n") else f"{text}\n"
    if view.refusal is not None:
        refused = styled(WARNING, "a run leaves the conversation out", color=color)
        yield f"\n{refused}: {one_line(view.refusal)}\n"
    if view.warnings:
        yield f"\n{styled(WARNING, 'warnings', color=color)}\n"
    for warning in view.warnings:
        name = view.message_name(warning.message)
        yield f"  {name}{': ' if name else ''}{one_line(warning.text)}\n"


def totals(view: ConversationView) -> str:
    """Numbers of messages, tokens and trained tokens of a conversation, in words."""
    share = share_in_words(view.trained_share)
    counts = [f"{count:,} {name}" for name, count in view.sizes.items()]
    return " · ".join((*counts, f"{view.trained_tokens:,} trained ({share})"))


def _legend(view: ConversationView, *, color: bool) -> str:
    """Legend of the marks, with the number of tokens of each kind."""
    names = [
        _marked(kind, f"{KINDS[kind]} {tokens:,}", color=color)
        for kind, (tokens, _) in view.counts.items()
    ]
    trained = f"trained {view.trained_tokens:,}"
    names.append(styled(BOLD_UNDERLINED, trained) if color else f"⟪{trained}⟫")
    return "tokens: " + "  ".join(names)


def _runs(turn: TurnView, *, color: bool) -> Iterator[str]:
    """The marked text of a turn."""
    for is_trained, cells in groupby(turn.cells, lambda cell: cell.is_trained):
        text = ""
        for kind, same in groupby(cells, lambda cell: cell.kind):
            shown = readable_text("".join(cell.text for cell in same))
            text += _marked(kind, shown, is_trained=is_trained, color=color)
        if is_trained and not color:
            text, line_end = text.removesuffix("\n"), "\n" * text.endswith("\n")
            text = f"⟪{text}⟫{line_end}"
        yield text


def _marked(kind: Kind, text: str, *, is_trained: bool = False, color: bool) -> str:
    if color:
        return styled(_COLORS[kind] + BOLD_UNDERLINED * is_trained, text)
    return text if kind == "template" else f"‹{text}›"


@dataclass(frozen=True, slots=True)
class ConversationReport:
    """Views of the conversations of a file, and the records that have none."""

    title: str
    """Title of the page."""
    about: str
    """Description of the tokenizer."""
    views: tuple[ConversationView, ...]
    failures: dict[int, str]
    """Errors of the records that cannot be shown, by number."""

    @classmethod
    def of(
        cls,
        tokenizer: MegatronTokenizerText,
        text: str,
        *,
        name: str,
        record: int | None = 1,
        schema: str = "auto",
    ) -> ConversationReport:
        """Read the conversations of a file; of several, errors are collected as ``failures``.

        Args:
            tokenizer: Tokenizer with a prompt format.
            text: Contents of the file.
            name: Name of the file.
            record: Number of the conversation, from 1; None for all.
            schema: Schema of the records.

        Raises:
            ConfigError: There is no such record, or the tokenizer has no prompt format.
            ConversationError: The requested conversation, or each of all, cannot be shown.
            DataError: The file holds no conversations.
        """
        records = json_records(text, name)
        if schema == "auto":
            schema = schema_of(records, where=name)
        viewer = ConversationViewer(tokenizer)
        failures: dict[int, str] = {}
        views = []
        numbers = range(1, len(records) + 1) if record is None else [record]
        for number in numbers:
            try:
                with naming_record(name, number):
                    conversation = conversation_of(records, number, schema)
                    views.append(viewer.view(conversation, number))
            except ConversationError as error:
                failures[number] = str(error)
                if len(failures) == len(numbers):
                    raise
        of_all = "" if record is None else f" · record {record}"
        title = f"{name}{of_all}"
        return cls(title, _in_words(tokenizer, schema), tuple(views), failures)

    def write_page(self, path: Path) -> None:
        """Write the HTML page, and print a summary."""
        from megatron_ext.cli.pages.conversation_page import conversation_page

        page = conversation_page(
            self.views, title=self.title, about=self.about, failures=self.failures
        )
        write_output(path, page, "--html")

    def json_lines(self) -> Iterator[str]:
        """One JSON object a line for each conversation."""
        for view in self.views:
            yield json.dumps(_conversation_row(view, self.about), ensure_ascii=False) + "\n"

    def summary_lines(self) -> Iterator[str]:
        """Totals of each conversation, one line each."""
        for view in self.views:
            yield f"record {view.record}: {totals(view)}\n"

    def terminal_lines(self, *, color: bool, tokens: bool, limit: int) -> Iterator[str]:
        """The conversations for a terminal.

        Args:
            color: Mark sources by colours instead of brackets.
            tokens: List the tokens too.
            limit: Most tokens of each conversation to list; 0 for all.
        """
        yield f"{self.title}\n{self.about}\n"
        for view in self.views:
            if len(self.views) > 1:
                yield f"\nrecord {view.record}\n"
            yield from conversation_ribbon(view, color=color)
            if tokens:
                yield "\n" + listing(view.tokens, limit=limit, color=color)

    def warn(self) -> None:
        """Name the records that cannot be shown, on standard error."""
        for problem in self.failures.values():
            sys.stderr.write(f"megatron-ext: cannot be shown: {problem}\n")


def _in_words(tokenizer: MegatronTokenizerText, schema: str) -> str:
    """Description of tokenizer, prompt format, training policy and record schema."""
    path = tokenizer.path
    said = tokenizer.conversation_options.stated()
    options = [f"{name} {value}".replace("_", "-") for name, value in said.items()]
    parts = [tokenizer.library, *([] if path is None else [Path(path).name])]
    parts += [f"{tokenizer.vocab_size:,} ids", f"prompt format {tokenizer.prompt_format}"]
    parts += filter(None, [tokenizer.template_choice])
    return " · ".join([*parts, *options, f"record schema {schema}"])


def _conversation_row(view: ConversationView, about: str) -> dict[str, Any]:
    """The JSON object of a conversation.

    Positions of spans and turns are characters of ``text``; those of tokens are bytes of its UTF-8.

    Args:
        view: The conversation.
        about: Description of the tokenizer.
    """
    return {
        "record": view.record,
        "tokenizer": about,
        "text": view.text,
        "messages": len(view.roles),
        "trained_tokens": view.trained_tokens,
        "turns": [_turn_row(turn) for turn in view.turns],
        "spans": list(_span_rows(view)),
        "tokens": [token.as_row() for token in view.tokens],
        "warnings": [
            {"message": warning.message, "text": warning.text} for warning in view.warnings
        ],
        "refusal": view.refusal,
    }


def _turn_row(turn: TurnView) -> dict[str, Any]:
    return {
        "message": turn.message,
        "role": turn.role or None,
        "start": turn.cells[0].start,
        "end": turn.cells[-1].start + len(turn.cells[-1].text),
        "first_token": turn.first_token,
        "tokens": turn.tokens,
        "trained_tokens": turn.trained_tokens,
        "untrained": turn.untrained or None,
    }


def _span_rows(view: ConversationView) -> Iterator[dict[str, Any]]:
    cells = (cell for turn in view.turns for cell in turn.cells)
    for (place, is_trained), group in groupby(cells, attrgetter("provenance", "is_trained")):
        own = list(group)
        text = "".join(cell.text for cell in own)
        yield {
            "start": own[0].start,
            "end": own[0].start + len(text),
            "source": place.source,
            "kind": own[0].kind,
            "message": place.message,
            "field": place.field or None,
            "turn": place.turn,
            "trained": is_trained,
            "text": text,
        }

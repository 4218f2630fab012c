"""What ``megatron-ext inspect --conversation`` prints and writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.cli.conversation.file import (
    conversation_of,
    file_schema,
    json_records,
    naming_record,
)
from megatron_ext.cli.conversation.ribbon import conversation_ribbon, totals
from megatron_ext.cli.conversation.rows import conversation_row
from megatron_ext.cli.conversation.view import ConversationView, ConversationViewer
from megatron_ext.cli.output import write_output
from megatron_ext.cli.token_view import listing
from megatron_ext.errors import ConversationError
from megatron_ext.tokenizers import MegatronTokenizerText


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationSource:
    """Which conversations of a file are asked for."""

    text: str
    """What the file holds."""
    name: str
    """What to call the file."""
    record: int | None = 1
    """Number of the conversation, from 1; None for all."""
    schema: str = "auto"
    """Schema of the records."""


@dataclass(frozen=True, slots=True)
class ConversationReport:
    """Some conversations of a file."""

    title: str
    """What they are."""
    about: str
    """What they were tokenized with."""
    views: tuple[ConversationView, ...]
    failures: dict[int, str]
    """What is wrong with the records that cannot be shown, by number."""

    @classmethod
    def of(cls, tokenizer: MegatronTokenizerText, source: ConversationSource) -> ConversationReport:
        """The conversations of a file; of several, those that cannot be shown are failures.

        Raises:
            ConfigError: There is no such record, or the tokenizer has no prompt format.
            ConversationError: The one that is asked for, or every one of all, cannot be shown.
            DataError: The file holds no conversations.
        """
        records = json_records(source.text, source.name)
        schema = source.schema
        if schema == "auto":
            schema = file_schema(records, source.name)
        viewer = ConversationViewer(tokenizer)
        failures: dict[int, str] = {}
        views = []
        numbers = range(1, len(records) + 1) if source.record is None else [source.record]
        for number in numbers:
            try:
                with naming_record(source.name, number):
                    conversation = conversation_of(records, number, schema)
                    views.append(viewer.view(conversation, number))
            except ConversationError as error:
                failures[number] = str(error)
                if len(failures) == len(numbers):
                    raise
        of_all = "" if source.record is None else f" · record {source.record}"
        title = f"{source.name}{of_all}"
        return cls(title, _in_words(tokenizer, schema), tuple(views), failures)

    def write_page(self, path: Path) -> None:
        """Write the HTML page and say what is on it."""
        from megatron_ext.cli.conversation.page import conversation_page

        page = conversation_page(
            self.views, title=self.title, about=self.about, failures=self.failures
        )
        write_output(path, page, "--html")

    def json_lines(self) -> Iterator[str]:
        """One line for each conversation."""
        for view in self.views:
            yield json.dumps(conversation_row(view, self.about), ensure_ascii=False) + "\n"

    def summary_lines(self) -> Iterator[str]:
        """How much there is of each conversation, in a line."""
        for view in self.views:
            yield f"record {view.record}: {totals(view)}\n"

    def terminal_lines(self, *, color: bool, tokens: bool, limit: int) -> Iterator[str]:
        """The conversations as text.

        Args:
            color: Mark sources with colours, not with brackets.
            tokens: List the tokens too.
            limit: Tokens of each conversation to list; 0 for all.
        """
        yield f"{self.title}\n{self.about}\n"
        for view in self.views:
            if len(self.views) > 1:
                yield f"\nrecord {view.record}\n"
            yield conversation_ribbon(view, color=color)
            if tokens:
                yield "\n" + listing(view.tokens, limit=limit, color=color)

    def warn(self) -> None:
        """Name the records that cannot be shown, on standard error."""
        for problem in self.failures.values():
            sys.stderr.write(f"megatron-ext: cannot be shown: {problem}\n")


def _in_words(tokenizer: MegatronTokenizerText, schema: str) -> str:
    """The tokenizer, the format, what is trained and the schema of the records."""
    path = tokenizer.path
    said = tokenizer.conversation_options.stated()
    options = [f"{name} {value}".replace("_", "-") for name, value in said.items()]
    parts = [tokenizer.library, *([] if path is None else [Path(path).name])]
    parts += [f"{tokenizer.vocab_size:,} ids", f"prompt format {tokenizer.prompt_format}"]
    return " · ".join([*parts, *options, f"record schema {schema}"])

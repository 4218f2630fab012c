"""``ConversationView``: provenance and training of a conversation's text; reading of records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from megatron_ext.cli.pages.conversation_cells import (
    KINDS,
    Cell,
    ConversationWarning,
    Kind,
    cells_of,
    conversation_warnings,
    kind_of_role,
)
from megatron_ext.cli.pages.token_view import TokenView, token_views
from megatron_ext.conversation import EncodedConversation
from megatron_ext.conversation.message import ROLES
from megatron_ext.conversation.records import (
    ConversationRecord,
    conversation_record,
    sniff_record_schema,
)
from megatron_ext.documents.lines import parse, parse_lines
from megatron_ext.documents.record_fields import AS_THEY_ARE
from megatron_ext.errors import ConfigError, ConversationError, DataError
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.special_tokens import ControlToken, ControlTokens


@dataclass(frozen=True, slots=True)
class TurnView:
    """Rendered text of one message, or text outside of all turns."""

    message: int | None
    """Index of the message; None outside of all turns."""
    role: str
    """Role of the message in the conversation; empty outside of all turns."""
    kind: Kind
    """Kind of the message; ``template`` outside of all turns."""
    cells: tuple[Cell, ...]
    trained_tokens: int
    """Number of trained tokens that begin in it."""
    untrained: str
    """Reason why none is trained; empty if some are, and outside of all turns."""

    @property
    def first_token(self) -> int:
        """Index of the first token that begins in it."""
        return self.cells[0].first_token

    @property
    def tokens(self) -> int:
        """Number of tokens that begin in it."""
        return sum(cell.token_count for cell in self.cells)

    @property
    def title(self) -> str:
        """Number and role of the message."""
        if self.message is None:
            return "template"
        # A system message added by the format is no message of the conversation.
        return f"{self.message} {self.role}" if self.message >= 0 else self.role

    @property
    def counts(self) -> list[str]:
        """Numbers of tokens and trained tokens in words, or the reason why none is trained."""
        characters = sum(len(cell.text) for cell in self.cells)
        counts = [f"{characters:,} characters", f"{self.tokens:,} tokens"]
        if self.trained_tokens:
            counts.append(f"{self.trained_tokens:,} trained")
        elif self.message is not None:
            counts.append(self.untrained or "nothing trained")
        return counts


@dataclass(frozen=True, slots=True)
class ConversationView:
    """A conversation with the source and training state of each part."""

    record: int
    """Number in the file, from 1."""
    text: str
    roles: tuple[str, ...]
    """Roles of the messages."""
    turns: tuple[TurnView, ...]
    """Consecutive turns without gaps; a template may return to a message."""
    tokens: tuple[TokenView, ...]
    warnings: tuple[ConversationWarning, ...]
    refusal: str | None
    """Reason why a run leaves the conversation out; None if it is used."""

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers of messages, characters, bytes and tokens."""
        return {
            "messages": len(self.roles),
            "characters": len(self.text),
            "tokens": len(self.tokens),
        }

    def message_name(self, index: int | None) -> str:
        """Number and role of a message; empty for None and for messages that the format adds."""
        if index is None or not 0 <= index < len(self.roles):
            return ""
        return f"{index} {self.roles[index]}"

    @property
    def trained_tokens(self) -> int:
        return sum(turn.trained_tokens for turn in self.turns)

    @property
    def trained_share(self) -> float:
        """Fraction of trained tokens; 0 without tokens."""
        return self.trained_tokens / max(len(self.tokens), 1)

    @property
    def counts(self) -> dict[Kind, tuple[int, int]]:
        """Tokens that begin in each kind of source, and the trained ones among them."""
        tokens: Counter[Kind] = Counter()
        trained: Counter[Kind] = Counter()
        for turn in self.turns:
            for cell in turn.cells:
                tokens[cell.kind] += cell.token_count
                trained[cell.kind] += sum(self._trained(cell))
        return {kind: (tokens[kind], trained[kind]) for kind in KINDS if kind in tokens}

    def _trained(self, cell: Cell) -> list[bool]:
        begun = self.tokens[cell.first_token : cell.first_token + cell.token_count]
        return [bool(token.trained) for token in begun]


class ConversationViewer:
    """Factory of views.

    Args:
        tokenizer: Tokenizer with a prompt format.
    """

    def __init__(self, tokenizer: MegatronTokenizerText) -> None:
        self._tokenizer = tokenizer
        ids = (i for i in range(tokenizer.vocab_size) if tokenizer.is_control(i))
        self._control = ControlTokens([ControlToken(tokenizer.id_to_token(i), i) for i in ids])

    def view(self, conversation: ConversationRecord, record: int = 1) -> ConversationView:
        """The view of a conversation.

        Args:
            conversation: Messages, and the other variables of the template.
            record: Number in the file, from 1.

        Raises:
            ConfigError: The tokenizer has no prompt format.
            ConversationError: The conversation is malformed, or does not fit the format.
        """
        messages, variables = conversation.messages, conversation.template_variables
        encoded = self._tokenizer.encode_conversation(messages, template_variables=variables)
        roles = {index: str(message["role"]) for index, message in enumerate(messages)}
        is_control = np.array([i in self._control.ids for i in encoded.ids.tolist()], np.bool_)
        cells = cells_of(encoded, roles, is_control)
        warnings = conversation_warnings(
            messages,
            encoded,
            cells,
            trained_roles=self._trained_roles,
            control_tokens=self._control,
            has_images=self._tokenizer.apply_image_tag is not None,
        )
        tokens = token_views(
            self._tokenizer, encoded.text, encoded.ids, encoded.byte_ends, encoded.trained.tolist()
        )
        return ConversationView(
            record=record,
            text=encoded.text,
            roles=tuple(roles.values()),
            turns=tuple(_turns(cells, roles, encoded)),
            tokens=tuple(tokens),
            warnings=tuple(warnings),
            refusal=self._refusal(conversation),
        )

    @property
    def _trained_roles(self) -> frozenset[str]:
        config = self._tokenizer.prompt_config
        assert config is not None
        return ROLES if config.skip_masking else config.policy.roles

    def _refusal(self, conversation: ConversationRecord) -> str | None:
        """Reason why a run leaves the conversation out; None if it is used."""
        try:
            self._tokenizer.tokenize_conversation(
                conversation.messages,
                True,
                False,
                template_variables=conversation.template_variables,
            )
        except ConversationError as error:
            return str(error)
        return None


def _turns(
    cells: Sequence[Cell],
    roles: Mapping[int, str],
    encoded: EncodedConversation,
) -> Iterator[TurnView]:
    for message, turn in _by_message(cells):
        tokens = slice(turn[0].first_token, turn[-1].first_token + turn[-1].token_count)
        trained = int(encoded.trained[tokens].sum())
        # A message that is not in the conversation is a system message added by the format.
        role = "" if message is None else roles.get(message, "system")
        yield TurnView(
            message=message,
            role=role,
            kind=kind_of_role(role) if role else "template",
            cells=turn,
            trained_tokens=trained,
            untrained="" if trained or message is None else encoded.excluded.get(message, ""),
        )


def _by_message(cells: Sequence[Cell]) -> Iterator[tuple[int | None, tuple[Cell, ...]]]:
    """``cells`` grouped by the message in whose turn they are written.

    Text written outside of the template's loop belongs to the message quoted there, if it is a
    single one; of several, each has its own characters, and the rest belongs to none.
    """
    for turn, group in groupby(cells, lambda cell: cell.provenance.turn):
        written = tuple(group)
        quoted = {cell.provenance.message for cell in written} - {None}
        if turn is not None:
            yield turn, written
        elif len(quoted) < 2:
            yield next(iter(quoted), None), written
        else:
            for message, group_cells in groupby(written, lambda cell: cell.provenance.message):
                yield message, tuple(group_cells)


def json_records(text: str, where: str) -> list[Any]:
    """The records of a JSON document or of JSON lines.

    A document is one record, or a list of them; a list of turns is one record.

    Args:
        text: Contents of the file.
        where: The file, for errors.

    Raises:
        DataError: The text is neither.
    """
    try:
        document = parse(text.encode(), as_it_is=True)
    except DataError:
        return _lines(text, where)
    if not isinstance(document, list) or _has_schema([document]):
        return [document]
    return document


def has_conversations(records: Sequence[Any]) -> bool:
    """Whether some record has a known schema."""
    return any(_has_schema([record]) for record in records)


def conversation_of(records: Sequence[Any], number: int, schema: str) -> ConversationRecord:
    """The conversation of one record, counted from 1.

    Raises:
        ConfigError: There is no such record.
        ConversationError: The record is no conversation of the schema.
    """
    if not 1 <= number <= len(records):
        raise ConfigError(
            "there is no such record", got=number, expected=f"1 to {len(records)}", where="--record"
        )
    return conversation_record(records[number - 1], schema)


@contextmanager
def naming_record(where: str, number: int) -> Iterator[None]:
    """Context that adds the file and the record to a ``ConversationError``."""
    try:
        yield
    except ConversationError as error:
        raise ConversationError(str(error), where=f"{where}, record {number}") from error


def _has_schema(records: Sequence[Any]) -> bool:
    try:
        sniff_record_schema(records)
    except ConversationError:
        return False
    return True


def _lines(text: str, where: str) -> list[Any]:
    block = parse_lines(text.encode().split(b"\n"), AS_THEY_ARE, first_line=1)
    for bad in block.bad:
        raise DataError(
            "neither a JSON document nor JSON lines", got=bad.problem, where=bad.place(where)
        )
    if not block.lines:
        raise DataError("there are no records", where=where)
    return block.columns[0]

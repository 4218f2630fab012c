"""Prompts as a student reads them, and completions that it sampled as aligned texts.

The sampled ids are the truth: they are kept as they are, and never decoded and encoded again. Every
teacher reads the canonical ids of the same bytes, in a conversation behind its own template. Only
sampled tokens are trained, and only they are in chunks.

T tokens of a text, N sampled ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.chunk_places import (
    BEGINS,
    OUTSIDE,
    chunk_marks,
    ids_of_marks,
    without_chunks,
)
from megatron_ext.alignment.conversation_alignment import shown_contents, stop_tokens
from megatron_ext.alignment.spelling import stream_bytes
from megatron_ext.alignment.token_aligner import TokenAligner
from megatron_ext.constants import NO_CHUNK
from megatron_ext.conversation import EncodedConversation, PromptConfig, encode_conversation
from megatron_ext.conversation.records import ConversationRecord
from megatron_ext.conversation.rendering.provenance import TEMPLATE, Provenance, Span
from megatron_ext.data.aligner import AlignedText, Content, TeacherTokens, teacher_tokens
from megatron_ext.data.collator import CrossTokenizerCollator
from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.token_bytes import TokenBytes

_BLANKS: Final = b" \t"
_PROBE: Final = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the student completes."""

    content: Content
    """The text, or the conversation up to the answer."""

    ids: list[int]
    """Ids that the student reads, its leading token included."""

    encoded: EncodedConversation | None
    """The conversation as the student's template writes it, with the header of an answer; None for
    a text."""


class SampleCounts(NamedTuple):
    """What became of the sampled tokens of one completion."""

    sampled: int = 0
    """N, the stop token included."""

    stopped: int = 0
    """1 where the student ended the text itself."""

    trained: int = 0
    """Tokens that are trained."""

    cut: int = 0
    """Tokens behind the last whole character, or from a control token on that ends no text; a stop
    token behind them, too."""

    blank: int = 0
    """Tokens of spaces and tabs alone, which are not trained."""

    unaligned: int = 0
    """Trained tokens that are in no chunk with some teacher."""

    left_out: int = 0
    """1 for a completion of which nothing is left to train."""


class SampledText(NamedTuple):
    """A completion behind its prompt, for all models."""

    text: AlignedText | None
    """None where nothing is left to train."""

    counts: SampleCounts


class SampledTexts:
    """Reader of prompts and aligner of completions, for the models of a collator.

    Args:
        collator: The models' tokenizers, row lengths and special tokens.
        most_ids: Most ids of a prompt.
        prompt_characters: Characters of a text that are its prompt; None for all.
        trains_whitespace: Train sampled tokens of spaces and tabs alone, too. How white space is
            cut says nothing, and exact targets there teach just that.
        stops: Ids with which the student ends a text, beside its EOS and end of document and what
            its template writes.
    """

    def __init__(
        self,
        collator: CrossTokenizerCollator,
        *,
        most_ids: int,
        prompt_characters: int | None = None,
        trains_whitespace: bool = False,
        stops: Collection[int] = (),
    ) -> None:
        self._student, *self._teachers = collator.tokenizers
        self._side, *self._teacher_sides = collator.sides
        self._most_ids = most_ids
        self._characters = prompt_characters
        self._trains_whitespace = trains_whitespace
        self._stops = frozenset(stops)
        self._aligners = [TokenAligner(self._student, other) for other in self._teachers]

    @property
    def vocab_size(self) -> int:
        """Number of the student's ids."""
        return self._student.vocab_size

    @cached_property
    def _template_stop(self) -> int | None:
        """The token that ends an answer of the student's prompt format."""
        return template_stop(self._student, self._student.prompt_config)

    def prompt(self, content: Content) -> Prompt:
        """The prompt of a document.

        Raises:
            ConversationError: A conversation of answers alone, or one that does not fit a format.
            TokenizerError: A text that the student's tokenizer cannot take, or a prompt that leaves
                no room for a completion.
        """
        prompt = self._text(content) if isinstance(content, str) else self._conversation(content)
        if len(prompt.ids) > self._most_ids:
            raise TokenizerError(
                "a prompt leaves no room for a completion",
                got=f"{len(prompt.ids)} tokens",
                expected=f"at most {self._most_ids}",
                fix="raise student.seq_length, or lower data.rollouts.max_new_tokens or "
                "data.rollouts.prompt_characters",
            )
        return prompt

    def stop_ids(self, prompt: Prompt) -> frozenset[int]:
        """Ids with which the student ends a completion."""
        stops = {self._student.eos_id, self._student.eod, *self._stops}
        if prompt.encoded is not None:
            stops.add(self._template_stop)
        return frozenset(stop for stop in stops if stop is not None)

    def aligned(
        self, prompt: Prompt, ids: Sequence[int], log_probs: Sequence[float] | None = None
    ) -> SampledText:
        """A completion behind its prompt.

        Args:
            prompt: A result of ``prompt``.
            ids: N sampled ids, up to a stop token or without one.
            log_probs: [N] with which they were sampled; None where that is not known.
        """
        sample = self._sample(prompt, list(ids))
        aligned = self._of_text if prompt.encoded is None else self._of_conversation
        text = aligned(prompt, sample)
        assert text.trained is not None
        outside = [(teacher.student_marks == OUTSIDE) & text.trained for teacher in text.teachers]
        counts = sample.counts._replace(
            trained=int(text.trained.sum()),
            unaligned=sum(int(mask.sum()) for mask in outside),
            left_out=int(not text.trained.any()),
        )
        if counts.left_out:
            return SampledText(None, counts)
        if log_probs is not None:
            text = text._replace(log_probs=_of_sampled(text, prompt, ids, log_probs))
        return SampledText(text, counts)

    def shown(self, ids: Sequence[int]) -> str:
        """Text of the student's ids, control tokens by name."""
        return self._student.detokenize(list(ids))

    def spelled(self, prompt: Prompt, ids: Sequence[int]) -> list[bytes]:
        """Bytes of each of N sampled ids that is kept; a stop token is not among them."""
        sample = self._sample(prompt, list(ids))
        count = sample.prompt_count
        starts = [int(sample.ends[count - 1]) if count else 0, *sample.ends[count:].tolist()]
        return [sample.spelled[start:end] for start, end in pairwise(starts)]

    def _text(self, text: str) -> Prompt:
        text = text[: self._characters]
        ids, _ = self._student.encode_with_byte_ends(text, parse_special=False)
        whole = _around(self._side.lead, ids, None).tolist()
        if not whole:
            raise TokenizerError(
                "a prompt has no token",
                got=repr(text),
                expected="a text, or a tokenizer with a BOS or end-of-document token",
            )
        return Prompt(text, whole, None)

    def _conversation(self, record: ConversationRecord) -> Prompt:
        asked = record.asked()
        encoded = self._student.encode_conversation(
            asked.messages, add_generation_prompt=True, template_variables=asked.template_variables
        )
        return Prompt(asked, encoded.ids.tolist(), encoded)

    def _sample(self, prompt: Prompt, ids: list[int]) -> _Sample:
        """The completion up to its last whole character, and what of it is trained."""
        table = TokenBytes.of(self._student)
        stop = ids[-1] if ids and ids[-1] in self.stop_ids(prompt) else None
        texts = ids if stop is None else ids[:-1]
        has_lead = prompt.encoded is None and self._side.lead is not None
        before = prompt.ids[int(has_lead) :]
        kept = next((n for n, token in enumerate(texts) if table.is_control[token]), len(texts))
        stream = np.array([*before, *texts[:kept]], np.int32)
        ends = self._student.byte_ends(stream)
        spelled = stream_bytes(table, stream, ends)
        start = int(ends[len(before) - 1]) if before else 0
        kept = _whole_tokens(ends[len(before) :] - start, spelled[start:])
        if kept < len(texts):
            # A stop behind what is cut ends another text.
            stop = None
        count = len(before) + kept
        trained = np.arange(count) >= len(before)
        blank = trained & _is_blank(table, stream[:count])
        return _Sample(
            ids=stream[:count],
            ends=ends[:count],
            spelled=spelled[: int(ends[count - 1]) if count else 0],
            prompt_count=len(before),
            stop=stop,
            trained=trained if self._trains_whitespace else trained & ~blank,
            counts=SampleCounts(
                sampled=len(ids),
                stopped=int(stop is not None),
                cut=len(ids) - kept - int(stop is not None),
                blank=0 if self._trains_whitespace else int(blank.sum()),
            ),
        )

    def _of_text(self, prompt: Prompt, sample: _Sample) -> AlignedText:
        text = sample.spelled.decode()
        teachers = []
        for aligner, side in zip(self._aligners, self._teacher_sides, strict=True):
            ids, ends = aligner.teacher_tokenizer.encode_with_byte_ends(text, parse_special=False)
            marks = chunk_marks(aligner.align_encoded((sample.ids, sample.ends), (ids, ends)))
            tokens = _only_sampled(TeacherTokens(ids, *marks), sample.trained, sample)
            # Both ends of the text are a chunk, where both sides have one.
            stop = None if sample.stop is None else side.eod
            own_mark, its_mark = (None if end is None else OUTSIDE for end in (sample.stop, stop))
            if stop is not None:
                own_mark = its_mark = BEGINS
            assert tokens.trained is not None
            teachers.append(
                TeacherTokens(
                    _around(side.lead, tokens.ids, stop),
                    _around(self._lead_mark, tokens.student_marks, own_mark),
                    _around(None if side.lead is None else OUTSIDE, tokens.teacher_marks, its_mark),
                    _around(None if side.lead is None else 0, tokens.trained, its_mark),
                )
            )
        no_bytes = None if sample.stop is None else 0
        return AlignedText(
            _around(self._side.lead, sample.ids, sample.stop),
            _around(self._lead_mark, np.diff(sample.ends, prepend=0), no_bytes),
            tuple(teachers),
            trained=_around(self._lead_mark, sample.trained, None if no_bytes is None else 1),
        )

    @property
    def _lead_mark(self) -> int | None:
        """What stands for the student's leading token in masks and marks; None without one."""
        return None if self._side.lead is None else OUTSIDE

    def _of_conversation(self, prompt: Prompt, sample: _Sample) -> AlignedText:
        record = prompt.content
        assert isinstance(record, ConversationRecord)
        start = int(sample.ends[sample.prompt_count - 1])
        answer = sample.spelled[start:].decode()
        student = _with_answer(prompt, answer, sample, self._student)
        answered = replace(
            record, messages=[*record.messages, {"role": "assistant", "content": answer}]
        )
        teachers = (
            teacher_tokens(student, answered, self._student, tokenizer)
            if answer
            else _of_empty_answer(student, sample, record, tokenizer)
            for tokenizer in self._teachers
        )
        return AlignedText(
            student.ids.astype(np.int32),
            np.diff(student.byte_ends, prepend=0).astype(np.int32),
            tuple(_only_sampled(tokens, student.trained, sample) for tokens in teachers),
            trained=student.trained,
        )


class _Sample(NamedTuple):
    """A prompt's text and the completion behind it, as tokens of the student. T tokens."""

    ids: NDArray[np.int32]
    """[T] of the prompt without a leading token, and of the completion without its stop token."""

    ends: NDArray[np.int64]
    """[T] in ``spelled``."""

    spelled: bytes
    """What ``ids`` decode to."""

    prompt_count: int
    """Tokens of the prompt."""

    stop: int | None
    """The stop token; None where the completion has been cut."""

    trained: NDArray[np.bool_]
    """[T]"""

    counts: SampleCounts


Number = TypeVar("Number", bound=np.generic)


def _around(first: int | None, values: NDArray[Number], last: int | None) -> NDArray[Number]:
    """``values`` with what stands for a leading and for a stop token, where there are any."""
    parts = [np.full(1, end, values.dtype) for end in (first, last) if end is not None]
    if first is None:
        return np.concatenate([values, *parts])
    return np.concatenate([parts[0], values, *parts[1:]])


def _of_sampled(
    text: AlignedText, prompt: Prompt, ids: Sequence[int], log_probs: Sequence[float]
) -> NDArray[np.float32]:
    """[Ts] log-probabilities of the sampled tokens of a text, NaN for those of its prompt."""
    values = np.full(len(text.student_ids), np.nan, np.float32)
    kept = len(values) - len(prompt.ids)
    values[len(prompt.ids) :] = log_probs[:kept]
    assert text.student_ids[len(prompt.ids) :].tolist() == list(ids[:kept])
    return values


def _whole_tokens(ends: NDArray[np.int64], spelled: bytes) -> int:
    """Number of the first tokens that together spell whole characters of UTF-8, at most [T]."""
    count = len(ends)
    while count:
        end = int(ends[count - 1])
        try:
            spelled[:end].decode()
        except UnicodeDecodeError as error:
            count = int(ends[:count].searchsorted(error.start, side="right"))
        else:
            break
    return count


def _is_blank(table: TokenBytes, ids: NDArray[np.int32]) -> NDArray[np.bool_]:
    """[T] mask of tokens of spaces and tabs alone."""
    rows = (table.rows[token] for token in ids.tolist())
    return np.array([bool(row) and not row.strip(_BLANKS) for row in rows], np.bool_)


def stop_tokens_of(tokenizer: MegatronTokenizerText) -> frozenset[int]:
    """Ids that end a text by a tokenizer: EOS, end of document, and what its template writes."""
    stops = (tokenizer.eos_id, tokenizer.eod, template_stop(tokenizer, tokenizer.prompt_config))
    return frozenset(stop for stop in stops if stop is not None)


def template_stop(tokenizer: MegatronTokenizerText, config: PromptConfig | None) -> int | None:
    """The control token that a prompt format writes behind an answer; None without one."""
    if config is None:
        return None
    encoded = encode_conversation(tokenizer, _PROBE, config)
    stop = stop_tokens(encoded, shown_contents(encoded), tokenizer.is_control).get(1)
    return None if stop is None else int(encoded.ids[stop])


def _with_answer(
    prompt: Prompt, answer: str, sample: _Sample, tokenizer: MegatronTokenizerText
) -> EncodedConversation:
    """The student's conversation with the sampled answer, ids as they were sampled."""
    asked, record = prompt.encoded, prompt.content
    assert asked is not None
    assert isinstance(record, ConversationRecord)
    stop = "" if sample.stop is None else tokenizer.id_to_token(sample.stop)
    at = len(asked.text)
    spans = [*asked.spans]
    if answer:
        source = Provenance("message", len(record.messages), "content")
        spans.append(Span(at, at + len(answer), source))
    if stop:
        spans.append(Span(at + len(answer), at + len(answer) + len(stop), TEMPLATE))
    before, stream_start = len(asked.ids), int(sample.ends[sample.prompt_count - 1])
    start = int(asked.byte_ends[-1])
    ends = sample.ends[before:] - stream_start + start
    last = start + len(answer.encode())
    return EncodedConversation(
        text=asked.text + answer + stop,
        spans=tuple(spans),
        trained_ranges=[(at, at + len(answer) + len(stop))],
        ids=_around(None, sample.ids.astype(np.int64), sample.stop),
        byte_ends=np.concatenate(
            [asked.byte_ends, _around(None, ends, last + len(stop.encode()) if stop else None)]
        ),
        trained=_around(None, sample.trained, 1 if stop else None),
        excluded={},
    )


def _of_empty_answer(
    student: EncodedConversation,
    sample: _Sample,
    record: ConversationRecord,
    tokenizer: MegatronTokenizerText,
) -> TeacherTokens:
    """A teacher's tokens of a conversation that the student has ended at once."""
    asked = tokenizer.encode_conversation(
        record.messages, add_generation_prompt=True, template_variables=record.template_variables
    )
    stop = None if sample.stop is None else template_stop(tokenizer, tokenizer.prompt_config)
    ids = _around(None, asked.ids.astype(np.int32), stop)
    student_marks, teacher_marks = (
        np.full(len(side), OUTSIDE, np.uint8) for side in (student.ids, ids)
    )
    if stop is not None:
        student_marks[-1] = teacher_marks[-1] = BEGINS
    return TeacherTokens(ids, student_marks, teacher_marks)


def _only_sampled(
    tokens: TeacherTokens, trained: NDArray[np.bool_], sample: _Sample
) -> TeacherTokens:
    """``tokens`` in chunks of trained tokens alone, which are all that they train themselves.

    Behind a completion that was cut, the last token is one that the teacher may have gone on
    within: its chunk is dropped.
    """
    chunk_of = ids_of_marks(tokens.student_marks, np.int64)
    dropped = np.zeros(int((tokens.student_marks >= BEGINS).sum()), np.bool_)
    dropped[chunk_of[~trained & (chunk_of != NO_CHUNK)]] = True
    inside = chunk_of[chunk_of != NO_CHUNK]
    if sample.stop is None and len(inside):
        dropped[inside[-1]] = True
    student_marks, teacher_marks = (
        without_chunks(marks, dropped) for marks in (tokens.student_marks, tokens.teacher_marks)
    )
    return TeacherTokens(tokens.ids, student_marks, teacher_marks, teacher_marks != OUTSIDE)

"""Every published row of the original is met id for id, or belongs to a difference that is true."""

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from megatron_ext.conversation import EncodedConversation, apply_chat_template
from megatron_ext.errors import ConversationError
from tests.conversation.golden_rows import (
    DIFFERENCES,
    FORMATS,
    LLAMA3_HEADER,
    Row,
    config_of,
    difference_of,
    encoded,
    is_refused_alike,
    is_trained,
    rows,
    rows_of,
    tokenized,
    tokenizer_of,
)
from tests.conversation.shared_files import IMAGES, SHARED, needs_shared

pytestmark = needs_shared

LARGEST = ("gemma3", "qwen3")
"""Vocabularies whose formats others have as well."""
TAKEN = [row for row in FORMATS if row[2] not in LARGEST or os.environ.get("MEGATRON_EXT_ALL_TEXT")]


@pytest.fixture(scope="module", params=TAKEN, ids=["-".join(row) for row in TAKEN])
def golden_rows(request: pytest.FixtureRequest) -> list[Row]:
    """The rows of one format and tokenizer; a module's fixture, so that tokenizers take turns."""
    return rows_of(*request.param)


def test_every_row_belongs_to_a_format() -> None:
    assert {(r["kind"], r["prompt_format"], r["tokenizer"]) for r in rows()} == set(FORMATS)
    assert len(rows()) == 928


def test_rows_are_those_of_the_original_but_for_the_differences(golden_rows: list[Row]) -> None:
    for row in golden_rows:
        assert config_of(row).pad_token_id == row["pad_id"]
        difference = difference_of(row)
        error = is_refused_alike(row) or (difference.refused if difference is not None else "")
        if error:
            with pytest.raises(ConversationError, match=rf"^conversation\[\d\]: .*{error}"):
                tokenized(row)
            continue
        ids, target = tokenized(row) if is_trained(row) else (tokenized(row), None)
        differs = None if difference is None else difference.what
        assert (ids.tolist() == row["tokens"]) == (differs != "ids"), row["conversation_id"]
        if "target" in row and differs != "ids":
            assert (target.tolist() == row["target"]) == (differs != "mask"), row["conversation_id"]
        assert (is_trained(row) and "target" not in row) == (differs == "raises")


# In every row that is trained, differing or not, the trained text is the answers with their stops.

STOPS = {
    "nemotron-nano-v2": "\n<SPECIAL_12>\n",
    "nemotron-h-aligned": "\n",
    "llama3": "<|eot_id|>",
    "llama3p1": "<|eot_id|>",
    "llama3p2": "<|eot_id|>",
    "mistral": "</s>",
    "nemotron5": "<SPECIAL_15>\n",
    "nemotron5-aligned": "\n[PREFIX]",
    "chatml": "<|im_end|>\n",
    "qwen2p0": "<|im_end|>\n",
    "qwen2p5": "<|im_end|>\n",
}
TRIMMED = ("nemotron-nano-v2", "nemotron-h-aligned", "llama3", "llama3p1", "llama3p2")


def test_what_the_assistant_says_is_trained_with_its_stop_marker(golden_rows: list[Row]) -> None:
    name = golden_rows[0]["prompt_format"]
    for row in golden_rows:
        if not is_trained(row) or _is_refused(row):
            continue
        found = encoded(row)
        answers = [m["content"] for m in row["conversation"] if m["role"] == "assistant"]
        if name == "default":
            assert found.trained.all()
        elif name == "identity":
            np.testing.assert_array_equal(found.trained, _within_answers(row, found))
        else:
            lead = " " if name == "mistral" else ""
            answers = [answer.strip() for answer in answers] if name in TRIMMED else answers
            expected = "".join(f"{lead}{answer}{STOPS[name]}" for answer in answers)
            assert trained_text(found) == expected, row["conversation_id"]


def trained_text(found: EncodedConversation) -> str:
    text = found.text.encode()
    begins = [0, *found.byte_ends[:-1].tolist()]
    ends = found.byte_ends.tolist()
    pieces = zip(begins, ends, found.trained.tolist(), strict=True)
    return b"".join(text[begin:end] for begin, end, trained in pieces if trained).decode()


def _within_answers(row: Row, found: EncodedConversation) -> list[bool]:
    """Whether each token lies in one answer, where a text is nothing but the contents."""
    roles: list[str] = []
    for index, message in enumerate(row["conversation"]):
        place = f"{index} {message['role']}"
        roles += [place] * len(message["content"].encode())
    begins = [0, *found.byte_ends[:-1].tolist()]
    tokens = [set(roles[b:e]) for b, e in zip(begins, found.byte_ends.tolist(), strict=True)]
    return [len(places) == 1 and "assistant" in places.pop() for places in tokens]


def _is_refused(row: Row) -> bool:
    difference = difference_of(row)
    return bool(is_refused_alike(row) or (difference is not None and difference.refused))


# What the differences say is so.


def test_what_we_refuse_the_original_takes_in_part() -> None:
    outcomes: dict[str, set[str]] = {"assistant_first": set(), "unknown_role": set()}
    for row in rows():
        difference = difference_of(row) if row["tokenizer"] != "mistral_7b_v1" else None
        if difference is None or not difference.refused:
            continue
        assert "tokens" in row
        if row["conversation_id"] == "tool":
            said = [m["content"] for m in row["conversation"] if m["role"] == "tool"]
            assert said
            assert not any(content in row["text"] for content in said)
        elif is_trained(row):
            outcomes[row["conversation_id"]].add("target" if "target" in row else "raises")
    assert all(seen == {"target", "raises"} for seen in outcomes.values())


def test_masks_differ_in_what_a_tool_says_and_in_a_header_s_fourth_token(
    golden_rows: list[Row],
) -> None:
    for row in _differing(golden_rows, "mask"):
        ours = encoded(row)
        explained = _tool_tokens(row, ours)
        if row["prompt_format"] == "nemotron5":
            explained |= _fourth_tokens(row, ours)
        differs = np.flatnonzero(ours.target != row["target"]).tolist()
        assert set(differs) == explained, row["conversation_id"]
        assert not ours.trained[differs].any()


def _tool_tokens(row: Row, ours: EncodedConversation) -> set[int]:
    """Tokens of the turns in which a tool speaks."""
    tools = {i for i, message in enumerate(row["conversation"]) if message["role"] == "tool"}
    spans = [span for span in ours.spans if span.provenance.turn in tools]
    ranges = [[len(ours.text[:at].encode()) for at in (s.start, s.end)] for s in spans]
    ends = ours.byte_ends.tolist()
    return {
        token
        for token, end in enumerate(ends)
        if any(start < end <= stop for start, stop in ranges)
    }


def _fourth_tokens(row: Row, ours: EncodedConversation) -> set[int]:
    marker, word = tokenizer_of(row).token_to_id("<SPECIAL_14>"), "assistant\n"
    starts = np.flatnonzero(ours.ids == marker).tolist()
    ends = ours.byte_ends.tolist()
    text = ours.text.encode()
    return {at + 3 for at in starts if text[ends[at] : ends[at + 3]].decode() == word}


def test_ids_that_differ_are_those_of_the_tokenizer_s_file(golden_rows: list[Row]) -> None:
    differing = _differing(golden_rows, "ids")
    if not differing:
        return
    file = Tokenizer.from_file(str(SHARED / "tokenizers" / "mistral_7b_v1" / "tokenizer.json"))
    file.add_special_tokens([AddedToken(token, special=True) for token in IMAGES])
    space = re.compile(r"(</s>|<image>|</?img>)▁+")
    for row in differing:
        ours = encoded(row)
        assert ours.ids.tolist() == file.encode(ours.text, add_special_tokens=False).ids
        written, original = (
            "".join(map(file.id_to_token, ids)) for ids in (ours.ids.tolist(), row["tokens"])
        )
        assert written != original
        assert space.sub(r"\1▁", written) == space.sub(r"\1▁", original)


WRITTEN_ALONE = {"chatml": "<|im_start|>system\nYou are Qwen", "llama3": LLAMA3_HEADER}
"""What the own templates write around one message that they do not write around it among others."""


def test_an_own_template_writes_more_around_one_message(golden_rows: list[Row]) -> None:
    row = next(row for row in golden_rows if row["conversation_id"] == "multi")
    more = WRITTEN_ALONE.get(row["prompt_format"])
    if more is None:
        return
    message = row["conversation"][2]
    assert message["role"] == "assistant"
    template = config_of(row).custom_chat_template or tokenizer_of(row).chat_template
    assert template is not None
    text = apply_chat_template(tokenizer_of(row), [message], template, tokenize=False)
    assert isinstance(text, str)
    assert more in text
    assert text.removeprefix("<|begin_of_text|>") not in encoded(row).text


def test_messages_share_a_token_just_where_the_original_raises(golden_rows: list[Row]) -> None:
    found: Counter[bool] = Counter()
    for row in golden_rows:
        if row["prompt_format"] != "identity" or not is_trained(row) or _is_refused(row):
            continue
        tokenizer = tokenizer_of(row)
        apart: list[int] = []
        for message in row["conversation"]:
            apart += tokenizer.encode_with_control_spans(message["content"], [])[0].tolist()
        raises = "target_error" in row
        assert (apart != row["tokens"]) == raises, row["conversation_id"]
        found[raises] += 1
    assert not found or (found[True] >= 4 and found[False] >= 12)


def _differing(golden_rows: list[Row], what: str) -> list[Row]:
    return [r for r in golden_rows if getattr(difference_of(r), "what", None) == what]


def test_the_documentation_lists_the_differences_with_their_numbers() -> None:
    page = (Path(__file__).parents[2] / "docs" / "prompt_formats.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (\d+) \| (.+) \|$", page, re.MULTILINE)
    counts: Counter[Any] = Counter(
        difference.reason for row in rows() if (difference := difference_of(row)) is not None
    )
    assert listed == [(str(counts[d.reason]), d.reason) for d in DIFFERENCES]
    alike = sum(is_refused_alike(row) is not None for row in rows())
    assert f"{len(rows()) - alike - counts.total()} of {len(rows())} rows" in page
    assert f"{alike} rows" in page

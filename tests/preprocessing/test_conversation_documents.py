"""Conversations to tokens and the mask of what is trained."""

from datetime import datetime

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.conversation.records import ConversationRecord
from megatron_ext.documents.record_fields import RecordBlock, RecordFields
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.preprocessing import preprocess as preprocess_module
from megatron_ext.preprocessing.document_encoder import ConversationEncoder
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from tests.preprocessing.chat_of_bytes import BEGIN, EOD, STOP, TRAINED, ChatOfBytes, conversation
from tests.preprocessing.runs import config_of, contents, run, write_json_lines

SFT = TokenizerConfig(library="byte-level", mode="sft")
ANSWERED = conversation("hi", "yo")
UNANSWERED = conversation("hi", "yo", "no?")


@pytest.fixture(autouse=True)
def _chat_of_bytes(monkeypatch):
    monkeypatch.setattr(preprocess_module, "build_tokenizer", lambda config: ChatOfBytes())


def encoded(*conversations, eod=None, trains_all=False):
    """Ids and trained flags of some conversations."""
    records = [ConversationRecord(messages) for messages in conversations]
    block = RecordBlock((records,), lines=list(range(1, len(records) + 1)))
    tokenizer = ChatOfBytes(trains_all=trains_all)
    (documents,) = ConversationEncoder(tokenizer, eod).encode(block).documents
    assert documents.sequence_lengths.sum() == len(documents.ids) == len(documents.trained)
    return documents.ids.tolist(), documents.trained.tolist()


def test_the_mask_is_one_where_the_target_is_trained():
    ids, trained = encoded(ANSWERED)
    assert ids == [BEGIN, *b"hi", STOP, *(TRAINED + byte for byte in (*b"yo", STOP))]
    assert trained == [int(token >= TRAINED) for token in ids]


def test_an_eod_is_trained_where_it_follows_an_answer():
    ids, trained = encoded(ANSWERED, UNANSWERED, eod=EOD)
    ends = [i for i, token in enumerate(ids) if token == EOD]
    assert [trained[end] for end in ends] == [1, 0]


def test_no_eod_is_put_behind_another():
    assert encoded(ANSWERED, eod=STOP + TRAINED) == encoded(ANSWERED)


def test_the_first_token_is_never_trained():
    ids, trained = encoded(ANSWERED, UNANSWERED, trains_all=True)
    assert [token for token, flag in zip(ids, trained, strict=True) if not flag] == [BEGIN] * 2


def test_a_record_with_one_bad_conversation_is_left_out_under_every_key():
    bad, good, other = (
        ConversationRecord(messages)
        for messages in ([{"role": "wizard", "content": "x"}], ANSWERED, UNANSWERED)
    )
    block = RecordBlock(([good, bad, good], [other] * 3), lines=[4, 7, 9])
    tokenizer = ChatOfBytes()
    result = ConversationEncoder(tokenizer).encode(block)
    assert [len(documents.sequence_counts) for documents in result.documents] == [2, 2]
    assert [(record.line, record.problem) for record in result.bad] == [
        (7, "message 0: unknown role")
    ]


def test_a_run_writes_tokens_and_a_mask_of_the_same_shape(tmp_path):
    rows = [ANSWERED, UNANSWERED, [{"role": "wizard"}], "text", conversation("hi")]
    file = write_json_lines(tmp_path / "a.jsonl", ({"messages": row} for row in rows))
    report = run(file, output=tmp_path / "out" / "a", tokenizer=SFT, append_eod=True)
    tokens = IndexedDataset(str(tmp_path / "out" / "a_messages_document"))
    mask = IndexedDataset(str(tmp_path / "out" / "a_messages_loss_mask"))
    assert mask.index.dtype == np.uint8
    assert np.array_equal(mask.sequence_lengths, tokens.sequence_lengths)
    assert np.array_equal(mask.document_indices, tokens.document_indices)
    assert len(tokens) == 3
    trained = np.concatenate(list(mask)).sum()
    assert report.tokens["messages_loss_mask"] == trained
    assert report.tokens["messages_document"] == tokens.sequence_lengths.sum()
    assert report.untrained_documents == 1
    assert [bad.place for bad in report.bad] == [f"{file}:3", f"{file}:4"]
    assert "unknown role" in report.bad[0].problem
    assert report.bad[1].problem.startswith("messages: the text is not JSON")
    cut = run(file, output=tmp_path / "cut" / "a", tokenizer=SFT, append_eod=True, shard_count=7)
    assert cut == report
    assert contents(tmp_path / "cut") == contents(tmp_path / "out")


def test_a_real_tokenizer_gives_what_its_own_method_gives(tmp_path, monkeypatch):
    monkeypatch.setattr(preprocess_module, "build_tokenizer", build_tokenizer)
    config = TokenizerConfig(
        library="byte-level",
        mode="sft",
        chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    )
    rows = [ANSWERED, UNANSWERED, [*ANSWERED, *ANSWERED]]
    file = write_json_lines(tmp_path / "a.jsonl", ({"messages": row} for row in rows))
    run(file, output=tmp_path / "a", tokenizer=config)
    tokens = IndexedDataset(str(tmp_path / "a_messages_document"))
    mask = IndexedDataset(str(tmp_path / "a_messages_loss_mask"))
    tokenizer = build_tokenizer(config)
    for row, ids, trained in zip(rows, tokens, mask, strict=True):
        expected, target = tokenizer.tokenize_conversation(row, True, False)
        assert ids.tolist() == expected.tolist()
        assert np.array_equal(trained, target != IGNORE_INDEX)
        assert "yo" in tokenizer.detokenize(ids[trained == 1].tolist())
        assert "hi" not in tokenizer.detokenize(ids[trained == 1].tolist())


DATED = TokenizerConfig(
    library="byte-level",
    mode="sft",
    chat_template="{{ strftime_now('%Y-%m-%d %H:%M:%S') }}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
)


@pytest.mark.parametrize("workers", [1, 2])
def test_templates_see_the_time_at_which_the_run_was_first_started(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(preprocess_module, "build_tokenizer", build_tokenizer)
    file = write_json_lines(tmp_path / "a.jsonl", [{"messages": ANSWERED}] * 8)
    config = config_of(
        file, output=tmp_path / "a", tokenizer=DATED, shard_count=4, shard_indices=(1,)
    )
    with monkeypatch.context() as years_ago:
        years_ago.setattr("megatron_ext.preprocessing.work_folder.datetime", _Years)
        preprocess_module.preprocess(config)
    run(file, output=tmp_path / "a", tokenizer=DATED, workers=workers)
    tokenizer = build_tokenizer(DATED)
    dataset = IndexedDataset(str(tmp_path / "a_messages_document"))
    assert len(dataset) == 8
    for row in dataset:
        assert tokenizer.detokenize(row.tolist()).startswith("2001-02-03 23:59:58")


class _Years(datetime):
    """A clock that stands at one second of another year."""

    @classmethod
    def now(cls, tz=None):
        return cls(2001, 2, 3, 23, 59, 58)


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize("prompt_format", [None, "default"])
def test_a_tokenizer_that_was_saved_for_sft_reads_conversations_without_a_flag(
    tmp_path, monkeypatch, prompt_format
):
    monkeypatch.setattr(preprocess_module, "build_tokenizer", build_tokenizer)
    told = TokenizerConfig(
        library="byte-level", mode="sft", chat_template=TEMPLATE, prompt_format=prompt_format
    )
    folder = tmp_path / "saved"
    build_tokenizer(told).save_pretrained(str(folder))
    # With a text, too: read as one, the record would lose its mask and nobody would notice.
    rows = [{"text": "x", "messages": ANSWERED}, {"text": "y", "messages": UNANSWERED}]
    file = write_json_lines(tmp_path / "a.jsonl", rows)
    saved = TokenizerConfig(model=str(folder))
    report = run(file, output=tmp_path / "saved-out" / "a", tokenizer=saved, workers=2)
    run(file, output=tmp_path / "told-out" / "a", tokenizer=told)
    assert report.settings["mode"] == "sft"
    assert contents(tmp_path / "saved-out") == contents(tmp_path / "told-out")


def test_metadata_of_a_mode_without_a_dataset_are_refused_before_anything_is_written(
    tmp_path, monkeypatch
):
    class OfImages(ChatOfBytes):
        mode = "multimodal"

    monkeypatch.setattr(preprocess_module, "build_tokenizer", lambda config: OfImages())
    file = write_json_lines(tmp_path / "a.jsonl", [{"text": "x"}])
    with pytest.raises(ConfigError, match="a mode that has no indexed dataset; got multimodal"):
        run(file, output=tmp_path / "out" / "a", tokenizer=TokenizerConfig(library="byte-level"))
    assert not (tmp_path / "out").exists()


def test_conversations_without_a_trained_token_are_refused(tmp_path):
    file = write_json_lines(tmp_path / "a.jsonl", [{"messages": conversation("hi")}] * 3)
    with pytest.raises(DataError, match="messages_loss_mask: no token of the input is trained"):
        run(file, output=tmp_path / "out" / "a", tokenizer=SFT)


def test_a_block_without_records_gives_no_documents():
    tokenizer = ChatOfBytes()
    block = RecordBlock.empty(RecordFields(("messages",), "conversation"))
    (documents,) = ConversationEncoder(tokenizer, EOD).encode(block).documents
    assert len(documents.ids) == len(documents.sequence_counts) == 0

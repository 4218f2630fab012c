"""Conversations in batches: each model's own template, its mask, and chunks of what is trained."""

import json
import pickle
from functools import cache

import pytest

from megatron_ext import ArrowTextDataset, CrossTokenizerCollator, TeacherCTSpec
from megatron_ext.alignment import align_conversation
from megatron_ext.constants import IGNORE_INDEX, NO_CHUNK
from megatron_ext.conversation.records import ConversationRecord
from megatron_ext.data.packed_batches import PackedBatches
from megatron_ext.data.packed_dataset import PackedTextDataset
from megatron_ext.errors import ConfigError, ConversationError, DataError
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training.run_data import HeldOut
from tests.alignment.test_conversation_alignment import BRACKETS, NAMES
from tests.data.readers import student_tokenizer, teacher_tokenizer
from tests.training.tiny_run import vocabulary

TURNS = [
    {"role": "user", "content": "Wie heißt die Hauptstadt?"},
    {"role": "assistant", "content": "Sie heißt 東京 (Tōkyō)."},
    {"role": "user", "content": "And of France?"},
    {"role": "assistant", "content": "Paris, of course."},
]


@cache
def tokenizer(library, template):
    file = {
        "tiktoken": "tekken_240911.json",
        "sentencepiece": "mistral_instruct_tokenizer_240323.model.v3",
    }[library]
    return MegatronTokenizerText(
        vocabulary(file),
        {"library": library},
        prompt_format="auto",
        chat_template=template,
        engine="reference",
    )


def collator(length=120, **options):
    student = tokenizer("tiktoken", BRACKETS)
    return CrossTokenizerCollator(
        student,
        length,
        [
            TeacherCTSpec(name="other", tokenizer=tokenizer("sentencepiece", NAMES)),
            TeacherCTSpec(name="same", tokenizer=student),
            TeacherCTSpec(name="renamed", tokenizer=tokenizer("tiktoken", NAMES)),
        ],
        **options,
    )


def flat(batch):
    return {
        name: value.tolist() if hasattr(value, "tolist") else value
        for name, value in batch.as_dict().items()
    }


@pytest.mark.parametrize("side", ["student", "other", "renamed"])
def test_a_row_is_what_a_template_writes_and_its_labels_what_it_trains(side):
    batch = collator()([{"messages": TURNS}])
    rows = batch.student if side == "student" else batch.teachers[side]
    encoded = {
        "student": tokenizer("tiktoken", BRACKETS),
        "other": tokenizer("sentencepiece", NAMES),
        "renamed": tokenizer("tiktoken", NAMES),
    }[side].encode_conversation(TURNS)
    count = len(encoded.ids) - 1
    assert rows.lengths.tolist() == [count]
    assert rows.input_ids[0, :count].tolist() == encoded.ids[:-1].tolist()
    assert rows.labels[0, :count].tolist() == encoded.target[1:].tolist()
    assert (rows.labels[0, count:] == IGNORE_INDEX).all()
    assert rows.loss_mask[0, :count].tolist() == encoded.trained[1:].tolist()
    assert 0 < encoded.trained.sum() < count


@pytest.mark.parametrize(("name", "library"), [("other", "sentencepiece"), ("renamed", "tiktoken")])
def test_chunks_are_those_of_the_alignment_that_the_student_trains(name, library):
    alignment = collator()([{"messages": TURNS}]).alignments[name]
    expected = align_conversation(tokenizer("tiktoken", BRACKETS), tokenizer(library, NAMES), TURNS)
    is_trained = expected.student.trained
    chunk_id = expected.alignment.student_chunk_id
    trained = [
        chunk
        for chunk in range(expected.alignment.chunk_count)
        if is_trained[chunk_id == chunk].all()
    ]
    sides = (
        (alignment.student_chunk_id, chunk_id),
        (alignment.teacher_chunk_id, expected.alignment.teacher_chunk_id),
    )
    assert 0 < len(trained) < expected.alignment.chunk_count
    assert alignment.chunk_count == len(trained)
    for ids, its in sides:
        renumbered = [trained.index(i) if i in trained else NO_CHUNK for i in its.tolist()]
        assert ids[0, : len(its) - 1].tolist() == renumbered[1:]


def test_a_teacher_of_the_same_tokenizer_and_template_has_a_chunk_for_each_trained_label():
    batch = collator()([{"messages": TURNS}])
    assert batch.teachers["same"] is batch.student
    assert batch.alignments["same"].chunk_count == batch.token_count
    assert batch.teachers["renamed"] is not batch.student


def test_texts_and_conversations_share_a_batch():
    mixed = collator()(["A text.", ConversationRecord(TURNS), {"text": "Another."}])
    text, talk = collator()(["A text."]), collator()([{"messages": TURNS}])
    assert mixed.student.labels[0].tolist() == text.student.labels[0].tolist()
    assert mixed.student.labels[1].tolist() == talk.student.labels[0].tolist()
    assert mixed.alignments["other"].sample.unique().tolist() == [0, 1, 2]
    assert mixed.dropped_bytes == 0


def test_a_conversation_that_is_too_long_is_its_beginning():
    whole = tokenizer("tiktoken", BRACKETS).encode_conversation(TURNS)
    for length in range(5, len(whole.ids) - 1, 5):
        batch = collator(length)([{"messages": TURNS}])
        count = int(batch.student.lengths[0])
        assert batch.student.input_ids[0, :count].tolist() == whole.ids[:count].tolist()
        taken = int(whole.byte_ends[count]) if count else 0
        assert batch.dropped_bytes == len(whole.text.encode()) - taken
        alignment = batch.alignments["other"]
        assert alignment.chunk_count == 0 or count > 0
    assert count


@pytest.mark.parametrize("kind", ["files", "memory"])
def test_a_conversation_is_written_and_aligned_once(kind, tmp_path, monkeypatch):
    records = [{"messages": TURNS}, "A text.", {"messages": TURNS[:2]}]
    options = {"cache_dir": tmp_path} if kind == "files" else {"memory_cache_bytes": 1 << 20}
    reader = collator(**options)
    expected = flat(collator()(records))
    assert flat(reader(records)) == expected
    monkeypatch.setattr(MegatronTokenizerText, "encode_conversation", None)
    monkeypatch.setattr(MegatronTokenizerText, "text_to_flat_ids", None)
    assert flat(reader(records)) == expected
    if kind == "files":
        assert flat(collator(**options)(records)) == expected


def test_what_is_kept_in_memory_is_bounded_and_not_sent():
    reader = collator(memory_cache_bytes=1 << 20)
    reader(["A text.", {"messages": TURNS}])
    bare = collator(memory_cache_bytes=1 << 20)
    assert len(pickle.dumps(reader.aligner)) == len(pickle.dumps(bare.aligner))


def test_conversations_of_which_nothing_is_trained_are_left_out_with_their_reasons(tmp_path):
    silent = [turn | {"weight": 0} for turn in TURNS]
    late = [{"role": "user", "content": "x " * 200}, TURNS[1]]
    file = tmp_path / "chat.jsonl"

    def block(*conversations, **settings):
        file.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in conversations))
        return PackedTextDataset(
            ArrowTextDataset(file, conversations=True), collator(), shuffle=False, **settings
        )

    read = block(TURNS, silent, late, TURNS)[0, 0]
    assert [int(piece.trained.sum()) > 0 for s in read.samples for piece in s.pieces] == [True] * 2
    assert {document.place: document.reason[:44] for document in read.refused} == {
        f"{file}:2": "there is nothing to train on; got the roles ",
        f"{file}:3": "nothing of the conversation is trained once ",
    }
    for conversations in ([silent], [late]):
        with pytest.raises(DataError, match=rf"no document of the data can be used; got {file}:1"):
            next(iter(PackedBatches(block(*conversations), 1)))
        with pytest.raises(DataError, match=rf"no held-out document can be used; .*; {file}:1: "):
            HeldOut(block(*conversations, pack=False), global_batch_size=1)
    # An answer that is empty is a mistake, which ends a run unless bad documents are skipped.
    empty = [TURNS[0], {"role": "assistant", "content": ""}]
    with pytest.raises(ConversationError, match=rf"{file}:1: .*the assistant says nothing"):
        block(empty)[0, 0]
    assert len(block(empty, refuse_bad=False)[0, 0].refused) == 1


def test_a_conversation_needs_templates_and_has_to_be_one():
    spec = TeacherCTSpec(name="bare", tokenizer=teacher_tokenizer())
    with pytest.raises(ConfigError, match="no prompt format"):
        CrossTokenizerCollator(student_tokenizer(), 50, [spec])([{"messages": TURNS}])
    with pytest.raises(ConversationError):
        collator()([{"messages": [{"role": "user"}]}])


def test_the_row_of_a_conversation_of_which_nothing_is_trained_is_empty():
    silent = [turn | {"weight": 0} for turn in TURNS]
    batch = collator()([{"messages": turns} for turns in (TURNS[:1], TURNS, silent)])
    alone = collator()([{"messages": TURNS}])
    assert batch.student.loss_mask.sum(1).tolist() == [0, alone.token_count, 0]
    assert batch.student.labels[1].tolist() == alone.student.labels[0].tolist()

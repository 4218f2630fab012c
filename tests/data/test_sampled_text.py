"""Sampled ids are aligned as they are, and only what is sampled is trained."""

from functools import cache

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_ext import CrossTokenizerCollator, TeacherCTSpec
from megatron_ext.alignment.chunk_places import alignment_of
from megatron_ext.conversation.records import ConversationRecord
from megatron_ext.data.aligner import PackedSample
from megatron_ext.data.sampled_text import SampledTexts
from megatron_ext.errors import ConversationError, TokenizerError
from tests.data.readers import student_tokenizer, teacher_tokenizer
from tests.data.test_conversations import BRACKETS, NAMES, TURNS, tokenizer

PROMPT = "The naïve café costs"
IDS_OF_TEKKEN = 131_072


def collator(append_eod=True):
    teachers = [TeacherCTSpec(name="other", tokenizer=teacher_tokenizer())]
    return CrossTokenizerCollator(student_tokenizer(), 96, teachers, append_eod=append_eod)


@cache
def texts():
    return SampledTexts(collator(), most_ids=64)


@cache
def chats():
    teachers = [
        TeacherCTSpec(name="other", tokenizer=tokenizer("sentencepiece", NAMES)),
        TeacherCTSpec(name="renamed", tokenizer=tokenizer("tiktoken", NAMES)),
    ]
    student = tokenizer("tiktoken", BRACKETS)
    return SampledTexts(CrossTokenizerCollator(student, 200, teachers), most_ids=150)


ASKED = ConversationRecord(TURNS[:3])


def ids_of(text):
    """A cut of a text that no tokenizer would give: its bytes one by one."""
    byte_ids = {student_tokenizer().token_bytes(i): i for i in range(1000, 1400)}
    return [byte_ids[bytes([byte])] for byte in text.encode()]


def spelled(reader, ids):
    """Bytes of ids in the middle of a text; the names of control tokens."""
    own = [reader.token_bytes(i) for i in ids.tolist()]
    named = [reader.id_to_token(i).encode() for i in ids.tolist()]
    return b"".join(n if o is None else o for o, n in zip(own, named, strict=True)).decode()


def chunks(text, reader, teacher_side=0):
    """Text of each chunk as the student and as the teacher spell it."""
    teacher = text.teachers[teacher_side]
    alignment = alignment_of(teacher.student_marks, teacher.teacher_marks)
    own, its = reader._student, reader._teachers[teacher_side]
    return [
        (spelled(own, text.student_ids[slice(*a)]), spelled(its, teacher.ids[slice(*b)]))
        for a, b in zip(alignment.student_spans, alignment.teacher_spans, strict=True)
    ]


def test_sampled_ids_are_kept_however_they_are_cut():
    prompt = texts().prompt(PROMPT)
    ids = [*ids_of(" 2 euros"), student_tokenizer().eod]
    text, counts = texts().aligned(prompt, ids)
    assert text.student_ids.tolist() == [*prompt.ids, *ids]
    assert text.teachers[0].ids.tolist() == [
        teacher_tokenizer().bos,
        *teacher_tokenizer().tokenize(PROMPT + " 2 euros"),
        teacher_tokenizer().eod,
    ]
    # Two of the bytes are blanks, which are not trained.
    assert counts.trained == len(ids) - 2 == text.trained.sum()
    assert counts._replace(trained=0) == (len(ids), 1, 0, 0, 2, counts.unaligned, 0)
    assert chunks(text, texts())[-1] == (
        student_tokenizer().id_to_token(student_tokenizer().eod),
        teacher_tokenizer().id_to_token(teacher_tokenizer().eod),
    )


@pytest.mark.parametrize(("readers", "content"), [(texts, PROMPT), (chats, ASKED)])
@pytest.mark.parametrize("answer", ["", "é 2\tnaïve"])
def test_the_bytes_of_sampled_ids_spell_what_is_kept(readers, content, answer):
    reader = readers()
    student, prompt = reader._student, reader.prompt(content)
    cut = next(i for i in range(student.vocab_size) if student.token_bytes(i) == b"\xc3")
    ids = student.tokenize(answer)
    (stop, *_) = reader.stop_ids(prompt)
    for behind in ([stop], [cut], []):
        pieces = reader.spelled(prompt, [*ids, *behind])
        assert b"".join(pieces).decode() == answer
        assert pieces == [student.token_bytes(i) for i in ids]


def test_a_completion_that_is_cut_has_no_stop_and_no_last_chunk():
    prompt = texts().prompt(PROMPT)
    ids = student_tokenizer().tokenize(" two euros and")
    text, counts = texts().aligned(prompt, ids)
    assert counts.stopped == counts.cut == 0
    assert text.student_ids.tolist() == [*prompt.ids, *ids]
    assert [own for own, _ in chunks(text, texts())] == [" two", " euros"]
    assert text.teachers[0].ids.tolist()[-1] != teacher_tokenizer().eod


@pytest.mark.parametrize("is_stopped", [False, True], ids=["cut", "stopped"])
@pytest.mark.parametrize("bad", [b"\xe6\x9d", b"\xff"], ids=["half a character", "no character"])
def test_what_is_no_text_is_cut_off_and_counted(bad, is_stopped):
    byte_ids = {student_tokenizer().token_bytes(i): i for i in range(1000, 1400)}
    prompt, good = texts().prompt(PROMPT), student_tokenizer().tokenize(" two euros")
    broken = [byte_ids[bytes([byte])] for byte in bad]
    behind = [student_tokenizer().eod] if is_stopped else []
    text, counts = texts().aligned(prompt, [*good, *broken, *ids_of("x"), *behind])
    assert text.student_ids.tolist() == [*prompt.ids, *good]
    assert (counts.cut, counts.stopped) == (len(broken) + 1 + is_stopped, 0)


def test_a_control_token_that_ends_no_text_cuts_it():
    prompt, good = texts().prompt(PROMPT), student_tokenizer().tokenize(" two euros")
    text, counts = texts().aligned(
        prompt, [*good, student_tokenizer().bos, *good, student_tokenizer().eod]
    )
    assert text.student_ids.tolist() == [*prompt.ids, *good]
    assert counts.cut == 1 + len(good) + 1, "the stop token, too"


def test_nothing_to_train_is_left_out():
    text, counts = texts().aligned(texts().prompt(PROMPT), [student_tokenizer().bos])
    assert text is None
    assert counts.left_out == counts.cut == 1


def test_a_text_that_ends_at_once_trains_its_stop():
    text, counts = texts().aligned(texts().prompt(PROMPT), [student_tokenizer().eod])
    assert counts.trained == counts.stopped == 1
    assert len(chunks(text, texts())) == 1


@pytest.mark.parametrize("trains", [False, True])
def test_white_space_alone_is_trained_on_request(trains):
    reader = SampledTexts(collator(), most_ids=64, trains_whitespace=trains)
    ids = [
        *student_tokenizer().tokenize(":\n"),
        *student_tokenizer().tokenize("    x = 1"),
        student_tokenizer().eod,
    ]
    text, counts = reader.aligned(reader.prompt("def f()"), ids)
    blank = [not student_tokenizer().token_bytes(i).strip(b" \t") for i in ids[:-1]]
    assert any(blank)
    assert counts.blank == (0 if trains else sum(blank))
    assert text.trained[-len(ids) :].tolist() == [trains or not b for b in [*blank, False]]
    assert any(not own.strip(" ") for own, _ in chunks(text, reader)) == trains


@example([1257, 0, 2])
@given(st.lists(st.integers(0, IDS_OF_TEKKEN - 1), min_size=1, max_size=24))
def test_whatever_is_sampled_chunks_have_the_same_bytes_on_both_sides(ids):
    prompt = texts().prompt(PROMPT)
    stops = texts().stop_ids(prompt)
    first = next((n for n, token in enumerate(ids, 1) if token in stops), len(ids))
    ids = ids[:first]
    text, counts = texts().aligned(prompt, ids)
    if text is None:
        return
    kept = text.student_ids[len(prompt.ids) :].tolist()
    assert kept == ids[: len(kept)]
    assert counts.cut == len(ids) - len(kept)
    assert not text.trained[: len(prompt.ids)].any()
    for own, its in chunks(text, texts()):
        assert own == its
    collator()([PackedSample((text,))])


@pytest.mark.parametrize("teacher", [0, 1], ids=["other", "renamed"])
def test_an_answer_is_read_behind_each_models_own_template(teacher):
    student = chats()._student
    prompt = chats().prompt(ConversationRecord(TURNS))
    assert prompt.content.messages == TURNS[:3]
    stop = student.eos_id
    ids = [*student.tokenize("Paris, naïve 東京"), stop]
    text, counts = chats().aligned(prompt, ids)
    assert text.student_ids.tolist() == [*prompt.ids, *ids]
    assert counts.stopped == 1
    answered = [*TURNS[:3], {"role": "assistant", "content": "Paris, naïve 東京"}]
    its = chats()._teachers[teacher].encode_conversation(answered)
    assert text.teachers[teacher].ids.tolist() == its.ids.tolist()
    found = chunks(text, chats(), teacher)
    assert "".join(own for own, _ in found) == "Paris, naïve 東京</s>"
    # Earlier answers were not sampled.
    assert text.trained.sum() == len(ids)
    assert text.teachers[teacher].trained.sum() == (text.teachers[teacher].teacher_marks > 0).sum()


@pytest.mark.parametrize("teacher", [0, 1], ids=["other", "renamed"])
def test_an_empty_answer_teaches_when_to_stop(teacher):
    text, counts = chats().aligned(chats().prompt(ASKED), [chats()._student.eos_id])
    assert counts.trained == counts.stopped == 1
    assert chunks(text, chats(), teacher) == [("</s>", "</s>")]


def test_prompts_that_cannot_be_completed_are_refused():
    with pytest.raises(TokenizerError, match="no room"):
        texts().prompt("word " * 100)
    with pytest.raises(ConversationError, match="nothing to answer"):
        chats().prompt(ConversationRecord(TURNS[1:2]))
    short = SampledTexts(collator(), most_ids=64, prompt_characters=9)
    assert short.prompt("word word word").content == "word word"


def test_rows_are_batched_as_any_others():
    prompt = texts().prompt(PROMPT)
    text, _ = texts().aligned(
        prompt, [*student_tokenizer().tokenize(" two euros"), student_tokenizer().eod]
    )
    batch = collator()([PackedSample((text,)), "A recorded text."])
    labels = batch.student.labels[0]
    assert (labels != -100).sum() == text.trained.sum()
    assert np.isin(labels[labels != -100].numpy(), text.student_ids[len(prompt.ids) :]).all()

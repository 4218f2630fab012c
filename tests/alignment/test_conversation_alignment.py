"""A conversation that each side writes with its own template."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.alignment.conversation_alignment import align_conversation
from megatron_ext.constants import NO_CHUNK
from megatron_ext.tokenizers import MegatronTokenizerText
from tests.alignment.brute_force import brute_force_segments, chunks_of
from tests.alignment.conftest import DATA
from tests.tokenizers.short_tekken import tekken_file

BRACKETS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}"
    "{{ eos_token }}{% else %}[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}"
)
NAMES = (
    "{% for m in messages %}{{ m.role }}:\n{{ m.content | trim }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
)
WITHOUT_THINKING = (
    "{% for m in messages %}{{ m.role }}: "
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
WITHOUT_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
)
CALLS = (
    "{% for m in messages %}{{ m.role }}: {% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}call {{ c.function.name }} "
    "{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
OTHER_CALLS = (
    "{% for m in messages %}[{{ m.role }}]{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({{ c.function.arguments.city }}){% endfor %}"
    "{{ m.content or '' }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


@cache
def tokenizer(library, template):
    sentencepiece = DATA / "mistral_instruct_tokenizer_240323.model.v3"
    return MegatronTokenizerText(
        tekken_file() if library == "tiktoken" else sentencepiece,
        {"library": library},
        prompt_format="auto",
        chat_template=template,
    )


@pytest.fixture(scope="module")
def pair():
    return tokenizer("tiktoken", BRACKETS), tokenizer("sentencepiece", NAMES)


def conversation(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def texts_of(aligned):
    """What each chunk covers on either side."""
    sides = []
    for encoded, ids in (
        (aligned.student, aligned.alignment.student_chunk_id),
        (aligned.teacher, aligned.alignment.teacher_chunk_id),
    ):
        raw, begins = encoded.text.encode(), np.append(0, encoded.byte_ends[:-1])
        sides.append(
            [
                b"".join(
                    raw[begins[t] : encoded.byte_ends[t]] for t in np.flatnonzero(ids == chunk)
                )
                for chunk in range(aligned.alignment.chunk_count)
            ]
        )
    return list(zip(*sides, strict=True))


def segments_by_hand(contents):
    """Where the contents stand in what both templates write, and the stops behind answers."""
    pairs, stops = [], []
    texts = ["<s>", ""]
    for index, content in enumerate(contents):
        answer = index % 2 == 1
        texts[0] += " " if answer else "[INST] "
        texts[1] += "assistant:\n" if answer else "user:\n"
        shown = content.strip()
        skipped = len(content) - len(content.lstrip())
        starts = [len(texts[0] + content[:skipped]), len(texts[1])]
        pairs.append([[start, start + len(shown)] for start in starts])
        texts[0] += content
        texts[1] += shown
        if answer:
            stops.append([len(text) for text in texts])
        texts[0] += "</s>" if answer else "[/INST]"
        texts[1] += "</s>\n\n" if answer else "\n\n"
    byte = [lambda at, text=text: len(text[:at].encode()) for text in texts]
    in_bytes = [[[byte[s](at) for at in pair[s]] for s in (0, 1)] for pair in pairs]
    return texts, in_bytes, [[byte[s](stop[s]) for s in (0, 1)] for stop in stops]


contents = st.lists(
    st.one_of(
        st.text(min_size=1, max_size=12),
        st.text(st.sampled_from(" \t\né中🙂a1\u0301"), min_size=1, max_size=12),
    ).filter(str.strip),
    min_size=2,
    max_size=4,
).map(lambda texts: texts[: len(texts) // 2 * 2])


@given(texts=contents)
@settings(deadline=None)
def test_chunks_are_those_of_contents_and_stops_located_by_hand(pair, texts):
    written, pairs, stops = segments_by_hand(texts)
    aligned = align_conversation(*pair, conversation(*texts))
    assert [aligned.student.text, aligned.teacher.text] == written
    expected = brute_force_segments(aligned.student.byte_ends, aligned.teacher.byte_ends, pairs)
    sides = aligned.student.byte_ends.tolist(), aligned.teacher.byte_ends.tolist()
    for stop in stops:
        tokens = [ends.index(at + len("</s>")) for ends, at in zip(sides, stop, strict=True)]
        expected.append(({tokens[0]}, {tokens[1]}))
    expected.sort(key=lambda chunk: min(chunk[0]))
    assert chunks_of(aligned.alignment) == expected


def test_what_a_message_says_is_aligned_and_templates_are_not(pair):
    aligned = align_conversation(*pair, conversation(" How are you today? ", "I am well, thanks."))
    chunks = texts_of(aligned)
    assert all(own == other for own, other in chunks)
    spelled = b"".join(own for own, _ in chunks)
    assert spelled.endswith(b"thanks.</s>")
    for word in (b"INST", b"user", b"assistant"):
        assert word not in spelled
    assert (aligned.student_residual_bytes, aligned.teacher_residual_bytes) == (2, 0)
    assert aligned.student_mask.tolist() == aligned.student.trained.tolist()[1:]
    stop = aligned.alignment.student_chunk_id[-1]
    assert aligned.student.trained[-1]
    assert stop == aligned.alignment.chunk_count - 1


def test_thinking_that_one_side_drops_is_reported_and_the_answer_aligned():
    sides = tokenizer("tiktoken", NAMES), tokenizer("sentencepiece", WITHOUT_THINKING)
    thinking = "<think>\nHm, hm.\n</think>"
    aligned = align_conversation(*sides, conversation("Well?", f"{thinking}\nYes."))
    chunks = texts_of(aligned)
    assert all(own == other for own, other in chunks)
    assert b"".join(own for own, _ in chunks).endswith(b"Yes.</s>")
    assert b"Hm" not in b"".join(own for own, _ in chunks)
    assert aligned.student_residual_bytes == len(thinking)
    assert aligned.teacher_residual_bytes == 0


def test_tool_calls_that_templates_write_otherwise_align_by_their_values():
    sides = tokenizer("tiktoken", CALLS), tokenizer("sentencepiece", OTHER_CALLS)
    call = {"name": "weather_report", "arguments": {"city": "Reykjavik"}}
    messages = [
        {"role": "user", "content": "How is it there?"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
    ]
    aligned = align_conversation(*sides, messages)
    chunks = texts_of(aligned)
    assert all(own == other for own, other in chunks)
    spelled = b"".join(own for own, _ in chunks)
    assert b"city" not in spelled
    assert b"call" not in spelled
    assert b"ykjav" in spelled
    assert spelled.endswith(b"</s>")


def test_messages_that_one_side_turns_round_are_aligned_where_most_is():
    turned = "{% for m in messages | reverse %}{{ m.role }}: {{ m.content }};{% endfor %}"
    sides = tokenizer("tiktoken", NAMES), tokenizer("sentencepiece", turned)
    long = "This answer is the longer one of both by far."
    aligned = align_conversation(*sides, conversation("Short one?", long))
    spelled = b"".join(own for own, _ in texts_of(aligned)).decode()
    assert "longer one of both" in spelled
    assert "Short" not in spelled


def test_swapping_the_sides_swaps_the_chunks(pair):
    messages = conversation("Is 2017 prime?  ", " Ja, 2017 est premier. ", "संस्कृत?", "日本語 🙂")
    forward = align_conversation(*pair, messages).alignment
    backward = align_conversation(*reversed(pair), messages).alignment
    assert np.array_equal(forward.student_spans, backward.teacher_spans)
    assert np.array_equal(forward.teacher_chunk_id, backward.student_chunk_id)
    assert forward.chunk_count > 10
    assert NO_CHUNK in forward.student_chunk_id


def test_a_teacher_may_read_demonstrations_that_its_student_does_not():
    """Self-distillation from a prompt: one tokenizer, two templates."""
    student = tokenizer("tiktoken", WITHOUT_SYSTEM)
    teacher = tokenizer("tiktoken", WITHOUT_SYSTEM.replace(" if m.role != 'system'", ""))
    prompt = "Answer as here. Q: What is 2 plus 2? A: 4."
    turns = conversation("What is 3 plus 4?", "It is 7.")
    aligned = align_conversation(student, teacher, [{"role": "system", "content": prompt}, *turns])
    alone = align_conversation(student, student, turns)
    assert "4." not in aligned.student.text
    assert prompt in aligned.teacher.text
    # The student reads and learns what it would without the prompt, from every token of the answer.
    np.testing.assert_array_equal(aligned.student.ids, alone.student.ids)
    np.testing.assert_array_equal(
        aligned.alignment.student_chunk_id, alone.alignment.student_chunk_id
    )
    assert texts_of(aligned) == texts_of(alone)
    assert (aligned.student_residual_bytes, aligned.teacher_residual_bytes) == (
        0,
        len(prompt.encode()),
    )

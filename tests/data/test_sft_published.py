"""Published vocabularies through the dataset: what is trained is what the assistant says."""

from functools import cache

import pytest

from megatron_ext.constants import IGNORE_INDEX as X
from megatron_ext.tokenizers import MegatronTokenizerText
from tests.data.sft_files import dataset, segments
from tests.preprocessing.chat_of_bytes import conversation
from tests.preprocessing.runs import write_json_lines
from tests.tokenizers.short_tekken import tekken_file
from tests.tokenizers.tokenizer_files import mistral_file

FILES = {
    "sentencepiece": lambda: mistral_file("mistral_instruct_tokenizer_240323.model.v3"),
    "tiktoken": tekken_file,
}
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
TOOL_TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    "{% for m in messages %}{{ '[' + m.role + ']' }}{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
ANSWERS = (
    "Yes.",
    "Ja, größer als 3 €!",
    "はい、そうです。",
    "def f(x):\n    return x ** 2\n",
    "نعم 😀",
)


def records():
    """Two answers each, which the questions name."""
    return [
        {"messages": conversation(f"{i} {a} {b}?", a, "And </s> [INST] then?", b)}
        for i, (a, b) in enumerate((a, b) for a in ANSWERS for b in ANSWERS)
    ]


@cache
def tokenizer_of(library, **options):
    path = FILES[library]()
    return MegatronTokenizerText(path, {"library": library}, **options)


@pytest.mark.parametrize("library", FILES)
@pytest.mark.parametrize("packing", ["none", "best-fit-decreasing"])
def test_the_answers_and_their_stops_are_trained_and_nothing_else(tmp_path, library, packing):
    tokenizer = tokenizer_of(library, prompt_format="mistral")
    made = dataset(tmp_path, records(), tokenizer=tokenizer, sequence_length=256, packing=packing)
    stop = tokenizer.detokenize([tokenizer.eos])
    seen = []
    for sample in made:
        for tokens, labels in segments(sample):
            if tokens[0] != tokenizer.bos:
                assert set(labels) == {X}
                continue
            text = tokenizer.detokenize([label for label in labels if label != X])
            seen.append(text)
            assert [t for t, label in zip(tokens[1:], labels, strict=False) if label != X] == [
                label for label in labels if label != X
            ]
    # One space that the template writes is a part of the first word.
    expected = sorted(f"{a}{stop}{b}{stop}" for a in ANSWERS for b in ANSWERS)
    assert (
        sorted("".join(part.lstrip(" ") for part in _split(text, stop)) for text in seen)
        == expected
    )
    assert made.report.conversations == 25
    assert (packing == "none") == (len(made) == 25)


def _split(text, stop):
    return [part + stop for part in text.split(stop)[:-1]]


@pytest.mark.parametrize("library", FILES)
def test_a_sample_holds_the_ids_that_the_tokenizer_gives(tmp_path, library):
    tokenizer = tokenizer_of(library, prompt_format="mistral")
    made = dataset(tmp_path, records(), tokenizer=tokenizer, sequence_length=256, shuffle=False)
    for sample, record in zip(made, records(), strict=True):
        ids, target = tokenizer.tokenize_conversation(record["messages"], True, False)
        # Each ends with EOS, which is the end of a document too.
        assert ids[-1] == tokenizer.eod
        (tokens, labels), _ = segments(sample)
        assert tokens == ids.tolist()
        assert labels == [*target.tolist()[1:], X]


@pytest.mark.parametrize("library", FILES)
def test_a_format_that_trains_everything_trains_all_but_the_beginnings(tmp_path, library):
    tokenizer = tokenizer_of(library, prompt_format="default", chat_template=TOOL_TEMPLATE)
    made = dataset(
        tmp_path, records(), tokenizer=tokenizer, sequence_length=512, packing="first-fit"
    )
    count = 0
    for sample in made:
        for tokens, labels in segments(sample):
            if tokens[0] == tokenizer.bos:
                assert labels == [*tokens[1:], X]
                count += 1
    assert count == 25


@pytest.mark.parametrize("library", FILES)
def test_the_tools_of_each_record_are_in_its_own_render(tmp_path, library):
    tokenizer = tokenizer_of(library, prompt_format="auto", chat_template=TOOL_TEMPLATE)
    turns = conversation("a", "b")
    path = tmp_path / "data.jsonl"
    write_json_lines(path, [{"messages": turns, "tools": TOOLS}, {"messages": turns}])
    made = dataset(tmp_path, [], tokenizer=tokenizer, sequence_length=64, shuffle=False)
    texts = [tokenizer.detokenize(segments(sample)[0][0]) for sample in made]
    assert ["look_up;" in text for text in texts] == [True, False]

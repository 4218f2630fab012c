"""A tokenizer in memory is the one that its files would be."""

import copy
import json
import pickle
import shutil

import pytest
from transformers import AutoTokenizer

from megatron_ext import MegatronTokenizer, from_huggingface
from megatron_ext.errors import ConfigError, TokenizerError
from megatron_ext.tokenizers.identity import tokenizer_identity
from tests.training.small_models import TEXTS, huggingface_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"


def test_ids_and_bytes_are_those_of_the_object():
    theirs = huggingface_tokenizer()
    ours = from_huggingface(theirs)
    for text in TEXTS:
        ids = ours.text_to_ids(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert b"".join(map(ours.token_bytes, ids)) == text.encode()
    assert len(ours) == len(theirs)
    assert ours.eos_token_id == theirs.eos_token_id
    # A text cannot spell a control token, whatever transformers makes of it.
    assert theirs.eos_token_id not in ours.text_to_ids(theirs.eos_token)


def test_changes_in_memory_are_taken_over(tmp_path):
    theirs = copy.deepcopy(huggingface_tokenizer())
    theirs.add_special_tokens({"pad_token": "<pad>", "additional_special_tokens": ["<tool>"]})
    theirs.chat_template = TEMPLATE
    theirs("a text", truncation=True, max_length=1, padding="max_length")
    ours = from_huggingface(theirs, prompt_format="auto")
    assert (ours.pad_token_id, ours.token_to_id("<tool>")) == (
        theirs.pad_token_id,
        theirs.convert_tokens_to_ids("<tool>"),
    )
    assert ours.text_to_ids(TEXTS[0]) == theirs.encode(TEXTS[0], add_special_tokens=False)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "2 €"}]
    expected = theirs.apply_chat_template(turns, return_dict=False)
    assert ours.apply_chat_template(turns) == expected
    ours.save_pretrained(tmp_path / "saved")
    saved = MegatronTokenizer.from_pretrained(tmp_path / "saved")
    copied = pickle.loads(pickle.dumps(ours))
    assert saved.fingerprint() == ours.fingerprint() == copied.fingerprint()


def test_an_object_of_tokenizers_has_no_template_and_no_roles_but_the_conventional():
    theirs = huggingface_tokenizer()
    ours = from_huggingface(theirs.backend_tokenizer)
    assert ours.fingerprint() == from_huggingface(theirs).fingerprint()
    assert ours.chat_template is None


@pytest.mark.parametrize("given", ["gpt2", object()])
def test_what_is_no_fast_tokenizer_is_refused(given):
    with pytest.raises(TokenizerError, match=r"MegatronTokenizer\.from_pretrained"):
        from_huggingface(given)


NAMED = {
    "default": TEMPLATE,
    "tool_use": "{{ tools | length }} tools\n" + TEMPLATE.replace("eos_token", "eos_token + '\n'"),
    "rag": "{% for d in documents %}{{ d.text }}|{% endfor %}" + TEMPLATE,
}
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "2 €"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.fixture(params=[True, False], ids=["files", "list"])
def named(request, tmp_path):
    """A tokenizer of transformers with named templates, and the folder where it saved them."""
    theirs = copy.deepcopy(huggingface_tokenizer())
    theirs.chat_template = NAMED
    theirs.save_pretrained(tmp_path / "folder", save_jinja_files=request.param)
    return theirs, tmp_path / "folder"


def test_named_templates_are_chosen_as_transformers_chooses(named):
    theirs, folder = named
    ours = MegatronTokenizer.from_pretrained(folder)
    assert ours.chat_templates == from_huggingface(theirs).chat_templates == NAMED
    for options in (
        {},
        {"tools": TOOLS},
        {"tools": []},
        {"chat_template": "rag", "documents": [{"text": "d"}], "tools": TOOLS},
        {"chat_template": "default", "tools": TOOLS},
        {"chat_template": "{{ messages[1].content }}"},
    ):
        expected = theirs.apply_chat_template(TURNS, return_dict=False, **options)
        for each in (ours, ours._tokenizer, ours._tokenizer.tokenizer):
            assert each.apply_chat_template(TURNS, **options) == expected
    with pytest.raises(TokenizerError, match=r"'RAG'.* or a name: default, rag, tool_use$"):
        ours.apply_chat_template(TURNS, "RAG")


def test_the_mask_is_that_of_the_template_in_force_and_the_choice_is_saved(named, tmp_path):
    _, folder = named
    for name in (None, "rag", "default"):
        ours = MegatronTokenizer.from_pretrained(folder, chat_template=name, prompt_format="auto")
        ours.save_pretrained(tmp_path / f"{name}")
        for each in (ours, MegatronTokenizer.from_pretrained(tmp_path / f"{name}")):
            for tools in (None, TOOLS):
                in_force = name or ("tool_use" if tools else "default")
                variables = {"tools": tools, "documents": [{"text": "d"}]}
                ids, target = each.tokenize_conversation(
                    TURNS, True, False, template_variables=variables
                )
                text = each.detokenize(target[target >= 0].tolist())
                assert text == " 2 €<|endoftext|>" + "\n" * (in_force == "tool_use")
                assert ids.tolist() == each.apply_chat_template(TURNS, in_force, **variables)
    # What was saved is for transformers too.
    saved = AutoTokenizer.from_pretrained(tmp_path / "None")
    assert saved.chat_template == NAMED


def test_a_template_that_is_only_taken_by_name_is_no_part_of_the_identity():
    # Caches from before there were several templates go on with tokenizers such as Command R's.
    def identity(**templates):
        theirs = copy.deepcopy(huggingface_tokenizer())
        theirs.chat_template = templates
        return tokenizer_identity(from_huggingface(theirs, prompt_format="auto"))["template"]

    one = identity(default=TEMPLATE)
    assert one == identity(default=TEMPLATE, rag=NAMED["rag"])
    assert one != identity(default=TEMPLATE, tool_use=NAMED["tool_use"])


@pytest.mark.parametrize(
    "templates",
    [
        *(["{{ 1 }}"], [{"template": "{{ 1 }}"}], [{"name": "../x", "template": "{{ 1 }}"}], 3),
        [{"name": "x\n\x1b[2J", "template": "{{ 1 }}"}],
    ],
    ids=["text", "no name", "path", "number", "control characters"],
)
def test_chat_templates_of_another_form_are_refused(named, templates):
    _, folder = named
    shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": templates}))
    with pytest.raises(TokenizerError, match=r"config\.json: the chat template is malformed; got"):
        MegatronTokenizer.from_pretrained(folder)


def test_without_a_default_a_template_has_to_be_named():
    theirs = copy.deepcopy(huggingface_tokenizer())
    theirs.chat_template = {"rag": TEMPLATE, "tool_use": NAMED["tool_use"]}
    ours = from_huggingface(theirs)
    expected = theirs.apply_chat_template(TURNS, tools=TOOLS, return_dict=False)
    assert ours.apply_chat_template(TURNS, tools=TOOLS) == expected
    for error, call in (
        (TokenizerError, lambda: ours.apply_chat_template(TURNS)),
        (ConfigError, lambda: from_huggingface(theirs, prompt_format="auto")),
        (ConfigError, lambda: ours.tokenize_conversation(TURNS, True, False)),
    ):
        with pytest.raises(error, match="rag, tool_use"):
            call()
    assert from_huggingface(theirs, chat_template="rag", prompt_format="auto").tokenize(TURNS)

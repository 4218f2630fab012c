"""A tokenizer in memory is the one that its files would be."""

import copy
import pickle

import pytest

from megatron_ext import MegatronTokenizer, from_huggingface
from megatron_ext.errors import TokenizerError
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

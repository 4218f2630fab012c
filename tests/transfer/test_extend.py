"""Tokens that a model gains: one id each, made of what spelled them, and no old row changed."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_ext.cli.main import main
from megatron_ext.errors import DataError, MegatronExtError, TokenizerError
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.transfer.extend import extend_tokenizer, read_tokens
from tests.huggingface.tiny_models import tensors_of

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TOKENS = ["weather", " of the other", "日本語"]


@pytest.fixture
def extended(tmp_path, untied):
    (tmp_path / "words.txt").write_text("".join(f"{token}\n" for token in TOKENS))
    words = ["transfer", "extend", str(untied), "--tokens", str(tmp_path / "words.txt")]
    main([*words, "--output", str(tmp_path / "new")])
    return tmp_path / "new"


def test_old_rows_stay_and_new_ones_are_the_mean_of_their_pieces(extended, untied):
    before, after = tensors_of(untied), tensors_of(extended)
    old, new = _tokenizer(untied), _tokenizer(extended)
    count = old.vocab_size
    assert new.vocab_size == count + len(TOKENS)
    for name in (EMBEDDING, HEAD):
        assert torch.equal(after[name][:count], before[name][:count])
        for place, token in enumerate(TOKENS):
            pieces = old.text_to_ids(token)
            mean = before[name][pieces].float().mean(0).to(torch.bfloat16)
            torch.testing.assert_close(after[name][count + place], mean, rtol=2**-7, atol=1e-6)


def test_a_new_token_is_one_id_here_and_in_transformers(extended, untied):
    old, new, theirs = (
        _tokenizer(untied),
        _tokenizer(extended),
        AutoTokenizer.from_pretrained(extended),
    )
    count = old.vocab_size
    for place, token in enumerate(TOKENS):
        assert new.token_bytes(count + place) == token.encode()
    text = "the weather of the other 日本語 and then weathers"
    ids = new.text_to_ids(text)
    assert ids == theirs(text)["input_ids"]
    assert [i - count for i in ids if i >= count] == [0, 1, 2, 0]
    assert new.detokenize(ids) == theirs.decode(ids) == text
    plain = "the theory, then there"
    assert new.text_to_ids(plain) == old.text_to_ids(plain)
    assert AutoModelForCausalLM.from_pretrained(extended).config.vocab_size == new.vocab_size


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\n\nb\n", r"words.txt:2.*a line is no token|a line is no token.*words.txt:2"),
        ("a\nb\na\n", "a token is there twice"),
        ("", "there are no tokens"),
    ],
)
def test_a_file_of_tokens_with_a_mistake_is_named_with_its_line(tmp_path, content, message):
    (tmp_path / "words.txt").write_text(content)
    with pytest.raises(DataError, match=message):
        read_tokens(tmp_path / "words.txt")


def test_control_tokens_and_other_kinds_of_tokenizers_are_refused(tmp_path, untied):
    with pytest.raises(TokenizerError, match="a control token"):
        extend_tokenizer(untied, tmp_path, ["fine", "</s>"])
    with pytest.raises(TokenizerError, match=r"BPE's tokenizer.json alone; got no tokenizer.json"):
        extend_tokenizer(tmp_path, tmp_path, ["fine"])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "words.jsonl").write_text('"a\\nb"\n7\n')
    words = ["transfer", "extend", str(untied), "--output", str(tmp_path / "new"), "--tokens"]
    with pytest.raises((MegatronExtError, SystemExit)):
        main([*words, str(tmp_path / "words.jsonl")])
    assert not (tmp_path / "new").exists()


def _tokenizer(folder):
    return build_tokenizer(TokenizerConfig(model=str(folder)))

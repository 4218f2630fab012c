"""Tokens that a model gains: one id each, made of what spelled them, and no old row changed."""

import json
import os
import re
import warnings

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_ext.cli.main import main
from megatron_ext.errors import DataError, MegatronExtError, TokenizerError
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.transfer.extend import extend_tokenizer, read_tokens
from megatron_ext.transfer.merges import learn_merges
from tests.conversation.shared_files import SHARED
from tests.huggingface.tiny_models import tensors_of

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TOKENS = ["weather", " of the other", "日本語"]


@pytest.fixture(scope="module")
def extended(tmp_path_factory, untied):
    folder = tmp_path_factory.mktemp("extended")
    (folder / "words.txt").write_text("".join(f"{token}\n" for token in TOKENS))
    words = ["transfer", "extend", str(untied), "--tokens", str(folder / "words.txt")]
    main([*words, "--output", str(folder / "new")])
    return folder / "new"


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
    for token_id in range(count):
        assert new.token_bytes(token_id) == old.token_bytes(token_id)
    controls = {name: i for name, i in theirs.get_added_vocab().items() if i < count}
    assert len(controls) >= 3
    for name, token_id in controls.items():
        assert new.token_to_id(name) == old.token_to_id(name) == token_id
        # Text spells a control token as little as before.
        assert new.text_to_ids(name) == old.text_to_ids(name)
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
        ("a\n\nb\n", r"words.txt:2.*a line is not a token|a line is not a token.*words.txt:2"),
        ("a\nb\na\n", "a token is there twice"),
        ("", "there are no tokens"),
    ],
)
def test_a_file_of_tokens_with_a_mistake_is_named_with_its_line(tmp_path, content, message):
    (tmp_path / "words.txt").write_text(content)
    with pytest.raises(DataError, match=message):
        read_tokens(tmp_path / "words.txt")


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_line_of_a_file_of_tokens_ends_with_a_line_feed_alone(tmp_path, suffix):
    tokens = ["one", "two\u2028\x0c\x85", " three "]
    lines = (json.dumps(t, ensure_ascii=False) if suffix == ".jsonl" else t for t in tokens)
    (tmp_path / f"words{suffix}").write_bytes(("\ufeff" + "\r\n".join(lines)).encode())
    assert read_tokens(tmp_path / f"words{suffix}") == tokens


def test_a_missing_file_of_tokens_is_named_once_with_its_flag(tmp_path):
    (tmp_path / "words.txt").write_text("a\n")
    path = tmp_path / "word.txt"
    with pytest.raises(DataError, match=r"check --tokens; did you mean '.*words.txt'") as refusal:
        read_tokens(path)
    assert str(refusal.value).count(str(path)) == 1
    assert "Errno" not in str(refusal.value)


@pytest.mark.parametrize("action", ["extend", "train-hypernet"])
def test_a_model_that_is_not_there_is_the_reason(tmp_path, capsys, action):
    (tmp_path / "words.txt").write_text("a\n")
    (tmp_path / "model-1").mkdir()
    given = ["--tokens" if action == "extend" else "--data", str(tmp_path / "words.txt")]
    for name, said in (("model1", "correct the path; did you mean"), ("model-1", "export-hf")):
        words = ["transfer", action, str(tmp_path / name), "--output", str(tmp_path / "new")]
        with pytest.raises(SystemExit):
            main([*words, *given])
        error = capsys.readouterr().err
        assert f"{name}: the model is no HuggingFace folder; got no " in error
        assert said in error


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


def test_what_is_a_token_already_keeps_its_id_and_its_row(tmp_path, untied, capsys):
    old = _tokenizer(untied)
    spelled = next(i for i in range(old.vocab_size) if old.token_bytes(i) == b" the")
    (tmp_path / "words.txt").write_text(" the\nweather\n \n")
    words = ["transfer", "extend", str(untied), "--tokens", str(tmp_path / "words.txt")]
    main([*words, "--output", str(tmp_path / "new")])
    assert "tokens already, which stay as they are: 2: ' the', ' '" in capsys.readouterr().out
    new = _tokenizer(tmp_path / "new")
    assert new.vocab_size == old.vocab_size + 1
    assert new.text_to_ids("a the")[-1] == spelled
    before, after = tensors_of(untied)[EMBEDDING], tensors_of(tmp_path / "new")[EMBEDDING]
    assert torch.equal(after[: len(before)][: old.vocab_size], before[: old.vocab_size])
    with pytest.raises(
        TokenizerError, match=r"spelling of another token.*got Ġthe; .*with a space"
    ):
        extend_tokenizer(untied, tmp_path, ["Ġthe"])


def test_a_grown_tokenizer_with_tokens_that_no_text_spells_is_not_warned_of(tmp_path):
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.add_tokens(["<think>"])
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    tokenizer.save(str(tmp_path / "old" / "tokenizer.json"))
    extend_tokenizer(tmp_path / "old", tmp_path / "new", ["ab"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = _tokenizer(tmp_path / "new")
    assert ours.token_to_id("<think>") == 2
    assert ours.text_to_ids("ab") == [3]


PUBLISHED = [("tokens", "gpt2"), ("merges", "gpt2")]
if os.environ.get("MEGATRON_EXT_ALL_TEXT"):
    PUBLISHED += [(kind, name) for name in ("qwen2_5", "llama3_2") for kind in ("tokens", "merges")]


@pytest.mark.parametrize(("kind", "name"), PUBLISHED)
def test_published_tokenizers_keep_every_id_here_and_in_transformers(tmp_path, name, kind):
    folder, new_folder = SHARED / "tokenizers" / name, tmp_path
    if not folder.is_dir():
        pytest.skip(f"no {folder}: set MEGATRON_EXT_SHARED")
    if kind == "tokens":
        extend_tokenizer(folder, new_folder, ["dictionary display", " of the"])
    else:
        learnt = learn_merges(folder, new_folder, [TEXT] * 3, 20)
        assert learnt.tokens_after < learnt.tokens_before
    old, new, theirs = _tokenizer(folder), _tokenizer(new_folder), _of_transformers(new_folder)
    for token in range(old.vocab_size):
        assert new.token_bytes(token) == old.token_bytes(token)
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    for entry in added:
        assert theirs.convert_tokens_to_ids(entry["content"]) == entry["id"]
        # Text spells a control token as little as before.
        assert new.text_to_ids(entry["content"]) == old.text_to_ids(entry["content"])
    ids = new.text_to_ids(TEXT)
    assert max(ids) >= old.vocab_size
    assert ids == theirs(TEXT, add_special_tokens=False)["input_ids"]
    assert new.detokenize(ids) == TEXT
    if kind == "merges":
        ends, old_ends = (set(it.encode_with_byte_ends(TEXT)[1].tolist()) for it in (new, old))
        # Cut as before, then merged further.
        assert ends < old_ends


def test_merges_are_the_most_frequent_pairs(tmp_path, untied):
    text = "the theory of the zebra, zebra and zebra"
    learnt = learn_merges(untied, tmp_path, [text], 100)
    old, new = _tokenizer(untied), _tokenizer(tmp_path)
    assert new.vocab_size == old.vocab_size + len(learnt.pairs)
    assert learnt.tokens_before == len(old.text_to_ids(text))
    assert learnt.tokens_after == len(new.text_to_ids(text))
    assert "Ġzebra" in {"".join(pair) for pair in learnt.pairs}
    # Nothing is there twice any more.
    assert len(learnt.pairs) < 100
    with pytest.raises(DataError, match="no pair of tokens is twice"):
        learn_merges(untied, tmp_path, ["q"], 1)


def test_distilled_rows_read_a_text_as_its_old_tokens_did(tmp_path, untied, capsys):
    text = "the weather of the other thing, then there is the weather and a theory. "
    (tmp_path / "text.txt").write_text(text * 8)
    (tmp_path / "words.txt").write_text("weather\nnowhere\n")
    words = ["transfer", "extend", str(untied), "--tokens", str(tmp_path / "words.txt")]
    plain, distilled = tmp_path / "plain", tmp_path / "distilled"
    main([*words, "--output", str(plain), "--pad-to-multiple-of", "8"])
    options = ["--distill", "30", "--data", str(tmp_path / "text.txt"), "--lr", "0.02"]
    main([*words, "--output", str(distilled), "--pad-to-multiple-of", "8", *options])
    said = capsys.readouterr().out
    assert "not in the text, as they started: 1: 'nowhere'" in said
    first, last = re.search(r"difference ([\d.]+) at first, ([\d.]+) at last", said).groups()
    assert float(last) < 0.9 * float(first)
    before, after = tensors_of(plain), tensors_of(distilled)
    new = _tokenizer(distilled).text_to_ids("weather")[0]
    assert before.keys() == after.keys()
    for name, weight in before.items():
        rows = torch.ones(len(weight), dtype=torch.bool)
        if name in (EMBEDDING, HEAD):
            rows[new] = False
            assert not torch.equal(after[name][new], weight[new])
        assert torch.equal(after[name][rows], weight[rows])
    assert _of_transformers(distilled)("weather")["input_ids"] == [new]


def test_text_that_merges_and_distillation_need_is_asked_for(tmp_path, untied):
    words = ["transfer", "extend", str(untied), "--output", str(tmp_path / "new")]
    with pytest.raises(SystemExit):
        main([*words, "--merges", "3"])
    assert not (tmp_path / "new").exists()


TEXT = "A dictionary display of the value; zebra zebra of the zebra. "


def _of_transformers(folder):
    return AutoTokenizer.from_pretrained(folder)


def _tokenizer(folder):
    return build_tokenizer(TokenizerConfig(model=str(folder)))

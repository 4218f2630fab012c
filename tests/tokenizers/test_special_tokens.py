"""Text cannot spell a control token unless it is asked to."""

import json
import warnings

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megatron_ext.tokenizers import MegatronTokenizer, TokenizerConfig, build_tokenizer

CONTROL = {
    "sentencepiece-v1": ["<s>", "</s>"],
    "sentencepiece-v3": ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"],
    "tekken": ["<s>", "</s>", "[INST]", "<SPECIAL_20>"],
    "json-rank-list": ["<unk>", "<s>", "</s>", "<pad>", "<SPECIAL_7>"],
    "rank-file": ["<unk>", "<s>", "</s>", "<SPECIAL_999>"],
    "huggingface-byte-level": ["<|end|>", "<tool>"],
    "huggingface-nfc": ["<|end|>"],
    "huggingface-metaspace": ["<unk>", "<s>", "</s>"],
    "huggingface-wordpiece": ["[CLS]", "[SEP]", "[PAD]"],
    "huggingface-unigram": ["<pad>", "</s>"],
}


@pytest.mark.parametrize(("name", "control"), CONTROL.items(), ids=CONTROL)
def test_text_spells_a_special_token_only_where_these_are_parsed(tokenizer, name, control):
    for token in control:
        text = f"the {token} of{token}"
        token_id = tokenizer(name).token_to_id(token)
        assert token_id not in tokenizer(name).encode_with_byte_ends(text)[0]
        assert token_id not in tokenizer(name).tokenize(token)
        ids, ends = tokenizer(name).encode_with_byte_ends(text, parse_special=True)
        assert ids.tolist().count(token_id) == 2
        first = ids.tolist().index(token_id)
        assert ends[first] == len(f"the {token}")
        assert ids[-1] == token_id
        assert ends[-1] == len(text)


@pytest.mark.parametrize("name", CONTROL)
def test_control_tokens_have_no_bytes_and_no_length_in_a_stream(tokenizer, name):
    control = [t for t in CONTROL[name] if t != "<tool>"]
    for token in control:
        token_id = tokenizer(name).token_to_id(token)
        assert tokenizer(name).token_bytes(token_id) is None
        ids = tokenizer(name).tokenize("the parser")
        ends = tokenizer(name).byte_ends([token_id, *ids, token_id])
        assert ends.tolist() == [0, *tokenizer(name).byte_ends(ids), len("the parser")]


def test_an_added_token_that_is_not_special_stands_for_its_own_text(tokenizer):
    ours = tokenizer("huggingface-byte-level")
    token_id = ours.token_to_id("<tool>")
    assert ours.token_bytes(token_id) == b"<tool>"
    assert ours.byte_ends([token_id, token_id]).tolist() == [6, 12]
    assert ours.detokenize([token_id], skip_special_tokens=True) == "<tool>"


@pytest.mark.parametrize("name", ["sentencepiece-v1", "sentencepiece-v3", "tekken", "rank-file"])
def test_decoding_names_control_tokens_or_leaves_them_out(tokenizer, name):
    ours = tokenizer(name)
    ids, _ = ours.encode_with_byte_ends("<s>the parser</s><s>ends</s>", parse_special=True)
    assert ours.detokenize(ids.tolist()) == "<s>the parser</s><s>ends</s>"
    assert "<s>" not in ours.detokenize(ids.tolist(), skip_special_tokens=True)
    assert ours.detokenize([ours.eos_id], skip_special_tokens=True) == ""


def test_the_dummy_prefix_of_each_stretch_between_control_tokens_has_no_bytes(tokenizer):
    for name in ("sentencepiece-v1", "huggingface-metaspace"):
        ours = tokenizer(name)
        words = ours.tokenize("the parser")
        stream = [ours.bos_id, *words, ours.eos_id, ours.bos_id, *words]
        assert ours.byte_ends(stream)[-1] == 2 * len("the parser")


def test_special_ids_of_huggingface_come_from_the_configuration_beside_it(tokenizer):
    assert tokenizer("huggingface-unigram").pad_id == 0
    assert tokenizer("huggingface-wordpiece").pad_id == 0
    wordpiece = tokenizer("huggingface-wordpiece")
    assert wordpiece.bos_id == wordpiece.token_to_id("[CLS]")
    assert wordpiece.eos_id == wordpiece.token_to_id("[SEP]")
    nfc = tokenizer("huggingface-nfc")
    assert nfc.eos_id == nfc.token_to_id("<|end|>")


def test_special_ids_without_a_configuration_follow_the_usual_names(tokenizer):
    ours = tokenizer("huggingface-metaspace")
    assert (ours.unk_id, ours.bos_id, ours.eos_id, ours.pad_id) == (0, 1, 2, None)


@pytest.mark.parametrize(
    ("part", "stripped"),
    [
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}, (3, 6)),
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"}, (3, 7)),
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"}, (4, 8)),
        ({"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}, (3, 6)),
    ],
    ids=["always", "first", "never", "old-flag"],
)
def test_metaspace_says_which_stretches_have_a_dummy_prefix(tmp_path, part, stripped):
    document = {
        "added_tokens": [{"id": 0, "content": "</s>", "special": True, "single_word": False}],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [part]},
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"</s>": 0, "▁the": 1}, "unk_token": "</s>"},
    }
    document["added_tokens"][0] |= {"lstrip": False, "rstrip": False, "normalized": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    ours = build_tokenizer(TokenizerConfig(model=str(tmp_path)))
    assert ours.byte_ends([0, 1, 0, 1]).tolist() == [0, stripped[0], stripped[0], stripped[1]]


def test_included_special_tokens_cover_nothing(tokenizer_path):
    ours = build_tokenizer(TokenizerConfig(model=str(tokenizer_path("huggingface-metaspace"))))
    with_special = type(ours)(
        tokenizer_path("huggingface-metaspace"),
        {"library": "huggingface"},
        include_special_tokens=True,
    )
    ids, ends = with_special.encode_with_byte_ends("the parser")
    plain, plain_ends = ours.encode_with_byte_ends("the parser")
    assert ids.tolist() == [1, *plain, 2]
    assert ends.tolist() == [0, *plain_ends, 10]
    ids, ends = with_special.encode_with_byte_ends("▁the parser")
    assert (ids[0], ids[-1], ends[0], ends[-1]) == (1, 2, 0, 13)


def test_a_special_token_that_merges_could_spell_stays_text(tokenizer_path, tmp_path):
    source = tokenizer_path("huggingface-byte-level") / "tokenizer.json"
    document = json.loads(source.read_text(encoding="utf-8"))
    left, right = document["model"]["merges"][0]
    document["added_tokens"].append(
        {
            "id": document["model"]["vocab"][left + right],
            "content": left + right,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    ours = build_tokenizer(TokenizerConfig(model=str(tmp_path)))
    token_id = ours.token_to_id(left + right)
    written = (left + right).replace("Ġ", " ")
    assert ours.token_bytes(token_id) is None
    assert token_id not in ours.tokenize(f"{written}x {written}")
    assert ours.detokenize(ours.tokenize(f"{written}x {written}")) == f"{written}x {written}"


def test_bytes_of_the_fallback_that_a_trainer_flagged_as_special_stay_bytes(
    tokenizer_path, tmp_path
):
    source = tokenizer_path("huggingface-metaspace") / "tokenizer.json"
    document = json.loads(source.read_text(encoding="utf-8"))
    row = document["added_tokens"][0]
    document["added_tokens"] = [
        {**row, "content": piece, "id": token_id}
        for piece, token_id in document["model"]["vocab"].items()
        if piece in ("<unk>", "<s>", "</s>") or piece.startswith("<0x")
    ]
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    ours = build_tokenizer(TokenizerConfig(model=str(tmp_path)))
    theirs = Tokenizer.from_file(str(file))
    text = "the 🤷 parser"
    ids = ours.tokenize(text)
    assert ids == theirs.encode(text, add_special_tokens=False).ids
    assert b"".join(map(ours.token_bytes, ids)) == f" {text}".encode()
    assert ours.detokenize(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("decoder", [{}, {"added_tokens_decoder": {}}], ids=["legacy", "decoder"])
@pytest.mark.parametrize("config", [None, {"eos_token": "<a>"}], ids=["map-alone", "both"])
@pytest.mark.parametrize("name", ["<b>", {"content": "<b>"}], ids=["name", "object"])
def test_a_map_of_special_tokens_names_what_it_names_in_transformers(
    tmp_path, decoder, config, name
):
    tokenizer = Tokenizer(models.BPE({"a": 0, "</s>": 1}, []))
    tokenizer.add_special_tokens(["<a>", "<b>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, **decoder}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": name}))
    ours = MegatronTokenizer.from_pretrained(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours.eos_id == theirs.eos_token_id
    ours.save_pretrained(tmp_path / "saved")
    assert MegatronTokenizer.from_pretrained(tmp_path / "saved").eos_id == ours.eos_id


def test_a_piece_with_the_name_of_a_special_token_is_none_where_others_are(tmp_path):
    tokenizer = Tokenizer(models.BPE({"<": 0, "/s>": 1, "</s>": 2}, [("<", "/s>")]))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert MegatronTokenizer.from_pretrained(tmp_path).eos_token == "<|endoftext|>"


@pytest.mark.parametrize("added", [[], ["  "]], ids=["alone", "beside-white-space"])
@pytest.mark.parametrize(
    "names", [{}, {"pad_token": "<p>"}, {"additional_special_tokens": ["<t>"]}]
)
def test_names_that_a_user_adds_leave_the_special_tokens_of_the_file(tmp_path, added, names):
    tokenizer = Tokenizer(models.BPE({"<s>": 0, "</s>": 1, "a": 2}, []))
    tokenizer.add_tokens(added)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = MegatronTokenizer.from_pretrained(tmp_path, **names)
    assert (ours.bos_id, ours.eos_id) == (0, 1)


@pytest.mark.parametrize(
    "named", [{"pad_token": "[PAD]"}, {"additional_special_tokens": ["[PAD]"]}]
)
def test_a_name_of_the_configuration_that_the_file_lacks_is_told(tmp_path, named):
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.add_special_tokens(["<a>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": "<a>", **named}))
    with pytest.warns(UserWarning, match=r"names \[PAD\], which tokenizer.json lacks"):
        MegatronTokenizer.from_pretrained(tmp_path)
    PreTrainedTokenizerFast.from_pretrained(tmp_path).save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert MegatronTokenizer.from_pretrained(tmp_path).token_to_id("[PAD]") == 2


@pytest.mark.parametrize(
    "model", [models.BPE({"a": 0}, []), models.Unigram([("a", 0.0)], None)], ids=["bpe", "unigram"]
)
def test_added_tokens_behind_a_hole_have_the_ids_of_the_file_in_every_direction(tmp_path, model):
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<b>", "<c>"])
    document = json.loads(tokenizer.to_str())
    for row, token_id in zip(document["added_tokens"], (2, 7), strict=True):
        row["id"] = token_id
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.warns(UserWarning, match="other ids than in transformers, where they are 1 to 2"):
        ours = MegatronTokenizer.from_pretrained(tmp_path, parse_special_tokens=True)
    assert ours.text_to_ids("<b>a<c>") == [2, 0, 7]
    assert ours.detokenize([2, 0, 7]) == "<b> a <c>"
    assert ours.detokenize([2, 0, 7], skip_special_tokens=True) == "a"


def test_what_transformers_saves_of_a_tokenizer_has_the_same_ids(tokenizer, tmp_path):
    ours = tokenizer("huggingface-byte-level")
    ours._tokenizer.tokenizer.save_pretrained(tmp_path)
    saved = MegatronTokenizer.from_pretrained(tmp_path)
    assert saved.text_to_ids("a<tool>") == ours.text_to_ids("a<tool>")

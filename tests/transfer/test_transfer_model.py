"""A model with another tokenizer: what is copied, what is made, and what the folder says."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from megatron_ext.cli.main import main
from megatron_ext.errors import CheckpointError, ConfigError, MegatronExtError
from megatron_ext.huggingface.tensor_files import TensorPlan, write_checkpoint
from megatron_ext.projection import SparseProjection
from megatron_ext.projection.nemo.legacy_file import write_legacy_file
from megatron_ext.tokenizers import MegatronTokenizer, TokenizerConfig, build_tokenizer
from megatron_ext.transfer.options import TransferOptions
from megatron_ext.transfer.row_sources import row_sources
from megatron_ext.transfer.write_model import transfer, transfer_model
from tests.huggingface.tiny_models import VOCAB_SIZE, save_model, tensors_of
from tests.process_group import run_ranks
from tests.tokenizers.tokenizer_files import nfkc_sentencepiece, rank_file
from tests.transfer.transfer_ranks import run_verbs, vocabulary_shards

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_tensor_parallel_ranks_have_the_rows_of_one_process(tmp_path, untied, new_tokenizer):
    transfer_model(untied, new_tokenizer, tmp_path / "new")
    whole = tensors_of(tmp_path / "new")
    ranks = run_ranks(2, vocabulary_shards, tmp_path / "new")
    for name, *shards in zip((EMBEDDING, HEAD), *ranks, strict=True):
        rows = torch.cat(shards)
        assert torch.equal(rows[: len(whole[name])], whole[name].float())
        assert not rows[len(whole[name]) :].any()


def test_a_checkpoint_of_ours_is_the_folder_imported(tmp_path, untied, new_tokenizer):
    init = ["transfer", "init", str(untied), "--tokenizer", str(new_tokenizer), "--output"]
    folder, ours, back = (str(tmp_path / name) for name in ("folder", "ours", "back"))
    commands = [
        [*init, folder],
        [*init, ours, "--as-checkpoint"],
        ["export-hf", ours, back],
    ]
    run_ranks(1, run_verbs, commands)
    expected, found = tensors_of(tmp_path / "folder"), tensors_of(tmp_path / "back")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "ours", "back"}


def test_the_same_tokenizer_leaves_every_tensor_as_it_is(tmp_path, untied):
    transfer_model(untied, untied, tmp_path / "new")
    before, after = tensors_of(untied), tensors_of(tmp_path / "new")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert after[EMBEDDING].shape[0] == VOCAB_SIZE


@pytest.mark.parametrize("method", ["fvt", "fvt-asymmetric", "omp", "mean"])
def test_common_tokens_and_all_other_tensors_are_bit_for_bit_what_they_were(
    tmp_path, untied, new_tokenizer, donor, method
):
    options = TransferOptions(method=method, donor=donor if method == "omp" else None, k=8)
    report = transfer_model(untied, new_tokenizer, tmp_path / "new", options)
    before, after = tensors_of(untied), tensors_of(tmp_path / "new")
    sources = row_sources(_tokenizer(new_tokenizer), _tokenizer(untied))
    new = np.flatnonzero(sources.copied >= 0)
    assert report.copied == len(new) > 200
    assert before.keys() == after.keys()
    for name in before:
        if name in (EMBEDDING, HEAD):
            assert torch.equal(after[name][new], before[name][sources.copied[new]])
            mean = before[name][:276].float().mean(0).to(torch.bfloat16)
            assert torch.equal(after[name][sources.unmatched], mean.expand(1, -1))
        else:
            assert torch.equal(after[name], before[name]), name
    assert report.means[:1] == ["<extra>"]
    assert json.loads((tmp_path / "new" / "transfer.json").read_text())["copied"] == len(new)


def test_pieces_weigh_alike_in_the_input_and_by_their_bytes_in_an_asymmetric_head(
    tmp_path, untied, new_tokenizer
):
    transfer_model(
        untied, new_tokenizer, tmp_path / "new", TransferOptions(method="fvt-asymmetric")
    )
    before, after = tensors_of(untied), tensors_of(tmp_path / "new")
    old = _tokenizer(untied)
    sources = row_sources(_tokenizer(new_tokenizer), old)
    uneven = 0
    for token_id in sources.spelled.tolist():
        pieces = list(sources.pieces[token_id])
        sizes = torch.tensor([len(old.token_bytes(piece)) for piece in pieces]).double()
        uneven += len(sizes.unique()) > 1
        rows = before[EMBEDDING][pieces].double()
        torch.testing.assert_close(
            after[EMBEDDING][token_id].double(), rows.mean(0), rtol=2**-8, atol=1e-6
        )
        weighted = (before[HEAD][pieces].double() * (sizes / sizes.sum())[:, None]).sum(0)
        torch.testing.assert_close(after[HEAD][token_id].double(), weighted, rtol=2**-8, atol=1e-6)
    assert uneven > 0


def test_permuted_ids_permute_the_logits_and_nothing_else(tmp_path, untied):
    """The same vocabulary under other ids."""
    folder = tmp_path / "permuted"
    shutil.copytree(untied, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    values = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = values["model"]["vocab"]
    moved = {i: (i * 7 + 3) % len(vocabulary) for i in range(len(vocabulary))}
    values["model"]["vocab"] = {piece: moved[i] for piece, i in vocabulary.items()}
    for entry in values["added_tokens"]:
        entry["id"] = moved[entry["id"]]
    (folder / "tokenizer.json").write_text(json.dumps(values))
    _transferred(untied, folder, tmp_path / "new")
    texts = ["the other thing", "then the theory"]
    for text in texts:
        logits, new_logits = _logits(untied, text), _logits(tmp_path / "new", text)
        order = torch.tensor([moved[i] for i in range(len(moved))])
        assert torch.equal(new_logits[:, order], logits[:, : len(moved)])
        assert _generated(untied, text) == _generated(tmp_path / "new", text)


def test_a_larger_vocabulary_keeps_every_old_row(tmp_path, untied):
    folder = tmp_path / "larger"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(untied)
    tokenizer.add_tokens(["theory of the other thing"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "<tool>"]})
    tokenizer.save_pretrained(folder)
    report = transfer_model(
        untied, folder, tmp_path / "new", TransferOptions(pad_to_multiple_of=64)
    )
    before, after = tensors_of(untied), tensors_of(tmp_path / "new")
    count = _tokenizer(untied).vocab_size
    assert (report.new_ids, report.new_rows) == (count + 3, 320)
    for name in (EMBEDDING, HEAD):
        assert torch.equal(after[name][:count], before[name][:count])
        assert not after[name][count + 3 :].any()
        assert after[name][count : count + 3].any(dim=1).all()
    assert report.means == ["<think>", "<tool>"]
    assert report.combined == 1


def test_a_tied_head_stays_tied_by_the_rule_of_the_input_or_is_untied(
    tmp_path, tied, new_tokenizer
):
    options = TransferOptions(method="fvt-asymmetric")
    assert transfer_model(tied, new_tokenizer, tmp_path / "tied", options).is_tied
    untied = replace(options, unties=True)
    assert not transfer_model(tied, new_tokenizer, tmp_path / "untied", untied).is_tied
    one, two = tensors_of(tmp_path / "tied"), tensors_of(tmp_path / "untied")
    assert HEAD not in one
    assert torch.equal(one[EMBEDDING], two[EMBEDDING])
    assert not torch.equal(two[HEAD], two[EMBEDDING])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "untied")
    assert torch.equal(model.lm_head.weight, two[HEAD])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tied")
    assert torch.equal(model.lm_head.weight, one[EMBEDDING])


def test_norms_of_combined_rows_are_calibrated_on_request(tmp_path, untied, new_tokenizer):
    options = TransferOptions(calibrates_norms=True)
    transfer_model(untied, new_tokenizer, tmp_path / "new", options)
    before, after = tensors_of(untied)[HEAD].float(), tensors_of(tmp_path / "new")[HEAD].float()
    sources = row_sources(_tokenizer(new_tokenizer), _tokenizer(untied))
    wanted = before[:276].norm(dim=1).mean().expand(len(sources.spelled))
    torch.testing.assert_close(after[sources.spelled].norm(dim=1), wanted, rtol=1e-2, atol=0)


def test_stop_tokens_follow_and_ids_of_the_old_vocabulary_do_not(tmp_path, new_tokenizer, capsys):
    old = save_model("qwen3", tmp_path / "old")
    file = old / "generation_config.json"
    values = json.loads(file.read_text())
    values |= {"eos_token_id": [2, 0, 250], "suppress_tokens": [5], "temperature": 0.7}
    file.write_text(json.dumps(values))
    words = ["transfer", "init", str(old), "--tokenizer", str(new_tokenizer)]
    main([*words, "--output", str(tmp_path / "new")])
    printed = capsys.readouterr().out
    assert "nothing stands for the old stop tokens [250]" in printed
    assert "suppress_tokens" in printed
    found = json.loads((tmp_path / "new" / "generation_config.json").read_text())
    assert found["eos_token_id"] == [0, 2]
    assert "suppress_tokens" not in found
    assert (found["temperature"], found["max_new_tokens"]) == (0.7, 8)


def test_transformers_loads_it_with_the_new_tokenizer(tmp_path, untied, new_tokenizer):
    transfer_model(untied, new_tokenizer, tmp_path / "new")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new")
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert model.config.vocab_size == len(tokenizer)
    assert [config[f"{kind}_token_id"] for kind in ("bos", "eos", "pad")] == [1, 0, 2]
    ids = torch.tensor([tokenizer("the weather")["input_ids"]])
    assert torch.isfinite(model(ids).logits).all()


@pytest.mark.parametrize("kind", ["tiktoken", "model of another name", "saved"])
def test_a_tokenizer_of_any_kind_comes_along(tmp_path, untied, kind):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    if kind == "tiktoken":
        shutil.copyfile(rank_file(tmp_path), folder / "words.tiktoken")
    else:
        shutil.copyfile(nfkc_sentencepiece(tmp_path), folder / "words.model")
    if kind == "saved":
        whole = MegatronTokenizer.from_pretrained(folder, prompt_format="identity")
        folder = tmp_path / "saved"
        whole.save_pretrained(folder)
    transfer_model(untied, folder, tmp_path / "new")
    new, expected = _tokenizer(tmp_path / "new"), _tokenizer(folder)
    assert new.fingerprint() == expected.fingerprint()
    assert new.prompt_format == expected.prompt_format
    names = {file.name for file in (tmp_path / "new").iterdir()}
    assert {file.name for file in folder.iterdir()} <= names


def test_a_tokenizer_that_does_not_survive_a_copy_is_refused(tmp_path, untied, monkeypatch):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    shutil.copyfile(nfkc_sentencepiece(tmp_path), folder / "words.model")
    whole = _tokenizer(folder)
    # A folder's tokenizer is the file of this name, if there is one.
    (folder / "tokenizer.model").write_bytes(b"another")
    monkeypatch.setattr(
        "megatron_ext.transfer.write_model.build_tokenizer",
        lambda config: whole if config.model == str(folder) else build_tokenizer(config),
    )
    with pytest.raises(CheckpointError, match=r"is not the tokenizer; got the copy"):
        transfer_model(untied, folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_shares_may_come_from_a_file_of_the_known_tools(tmp_path, untied, new_tokenizer):
    projection = SparseProjection.from_tokenizers(
        _tokenizer(new_tokenizer), _tokenizer(untied), top_k=32, decay=1.0
    )
    write_legacy_file(projection, tmp_path / "map.pt")
    words = ["projection", "embed", str(untied), "--tokenizer", str(new_tokenizer)]
    main([*words, str(tmp_path / "given"), "--projection", str(tmp_path / "map.pt")])
    main([*words, str(tmp_path / "spelled")])
    first, second = (tensors_of(tmp_path / name) for name in ("given", "spelled"))
    for name in (EMBEDDING, HEAD):
        torch.testing.assert_close(first[name], second[name], rtol=2**-7, atol=1e-6)
    rows = np.flatnonzero(projection.is_exact_row)
    assert torch.equal(first[HEAD][rows], second[HEAD][rows])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "omp"}, "omp reads a donor"),
        ({"method": "fvt", "donor": True}, "omp reads a donor"),
        ({"method": "omp", "donor": "other"}, "the donor has another vocabulary"),
        ({"method": "omp", "donor": True, "k": 10_000}, "too few common tokens.*got 10000"),
        ({"pad_to_multiple_of": 0}, "rows cannot be padded"),
        ({"keeps_digits": True}, "the old digits cannot be kept"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_written(
    tmp_path, untied, new_tokenizer, donor, change, message
):
    if "donor" in change:
        change = {**change, "donor": untied if change["donor"] == "other" else donor}
    if change.get("keeps_digits"):
        new_tokenizer = tmp_path / "plain"
        new_tokenizer.mkdir()
        shutil.copyfile(nfkc_sentencepiece(tmp_path), new_tokenizer / "words.model")
    with pytest.raises(ConfigError, match=message):
        transfer(untied, new_tokenizer, tmp_path / "new", TransferOptions(**change))
    assert not (tmp_path / "new").exists()


def test_what_is_there_and_what_does_not_fit_is_refused(tmp_path, untied, new_tokenizer):
    words = ["transfer", "init", str(untied), "--output", str(tmp_path / "new"), "--tokenizer"]
    with pytest.raises((MegatronExtError, SystemExit)):
        main([*words, str(new_tokenizer / "nothing.json")])
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "kept").touch()
    with pytest.raises((MegatronExtError, SystemExit)):
        main([*words, str(new_tokenizer)])
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["kept"]


def test_a_tokenizer_is_named_by_its_folder_its_file_or_a_run(tmp_path, untied, new_tokenizer):
    (tmp_path / "run").mkdir()
    _tokenizer(new_tokenizer).save_pretrained(tmp_path / "run" / "tokenizer")
    places = (new_tokenizer, new_tokenizer / "tokenizer.json", tmp_path / "run")
    for number, place in enumerate(places):
        output = str(tmp_path / f"new{number}")
        main(["transfer", "init", str(untied), "--tokenizer", str(place), "--output", output])
    weights = [(tmp_path / f"new{n}" / "model.safetensors").read_bytes() for n in range(3)]
    assert weights[1:] == weights[:1] * 2
    prints = {_tokenizer(tmp_path / f"new{n}").fingerprint() for n in range(3)}
    assert prints == {_tokenizer(new_tokenizer).fingerprint()}


def test_digits_that_are_cut_alike_leave_the_tokenizer_as_it_is(tmp_path, untied, new_tokenizer):
    transfer(untied, new_tokenizer, tmp_path / "new", TransferOptions(keeps_digits=True))
    assert _tokenizer(tmp_path / "new").fingerprint() == _tokenizer(new_tokenizer).fingerprint()
    kept, given = (
        (folder / "tokenizer.json").read_bytes() for folder in (tmp_path / "new", new_tokenizer)
    )
    assert kept == given


def test_every_byte_is_a_token_on_request(tmp_path, untied, capsys):
    words = ["transfer", "init", str(untied), "--to-bytes", "--output"]
    main([*words, str(tmp_path / "new")])
    new, old = _tokenizer(tmp_path / "new"), _tokenizer(untied)
    before, after = tensors_of(untied), tensors_of(tmp_path / "new")
    place = {old.token_bytes(i): i for i in range(old.vocab_size)}
    for name in (EMBEDDING, HEAD):
        rows = [place[bytes([byte])] for byte in range(256)]
        assert torch.equal(after[name][:256], before[name][rows])
        assert torch.equal(after[name][new.eos_id], before[name][old.eos_id])
    text = "Ещё one 日本\x00"
    ids = new.text_to_ids(text)
    assert len(ids) == len(text.encode())
    assert bytes(ids) == text.encode()


def test_weights_get_the_permissions_that_any_new_file_gets(tmp_path):
    tensor = torch.zeros(2)
    plan = TensorPlan(name="weight", shape=(2,), dtype=tensor.dtype)
    write_checkpoint(
        tmp_path / "model",
        config={},
        files=[[plan], [plan]],
        read=lambda plans: {"weight": tensor},
        write_others=lambda folder: None,
    )
    (tmp_path / "plain").touch()
    modes = {file.stat().st_mode for file in (tmp_path / "model").iterdir()}
    assert modes == {(tmp_path / "plain").stat().st_mode}


def _transferred(model, tokenizer, output):
    transfer_model(model, tokenizer, output)


def _tokenizer(folder):
    return build_tokenizer(TokenizerConfig(model=str(folder)))


def _logits(folder, text):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return model(ids).logits[0]


def _generated(folder, text):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt")
    # The old model's rows behind its ids are no tokens.
    suppressed = list(range(len(tokenizer), model.config.vocab_size)) or None
    new = model.generate(**ids, max_new_tokens=6, do_sample=False, suppress_tokens=suppressed)
    return tokenizer.decode(new[0])

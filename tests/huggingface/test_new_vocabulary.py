"""A model with another tokenizer has every weight but its vocabulary's, which are ``P E``."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_ext.cli.main import main
from megatron_ext.errors import CheckpointError, MegatronExtError
from megatron_ext.huggingface.new_vocabulary import projected_rows, write_with_vocabulary
from megatron_ext.huggingface.tensor_files import TensorPlan, write_checkpoint
from megatron_ext.projection import SparseProjection
from megatron_ext.projection.nemo.legacy_file import write_legacy_file
from megatron_ext.tokenizers import MegatronTokenizer, TokenizerConfig, build_tokenizer
from tests.huggingface.tiny_models import save_model, save_tokenizer, tensors_of
from tests.tokenizers.tokenizer_files import nfkc_sentencepiece, rank_file

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def new_tokenizer(tmp_path_factory):
    """Words of its own, and another order of control tokens."""
    folder = tmp_path_factory.mktemp("new")
    save_tokenizer(
        folder,
        text="a question of the weather and of other things",
        control_tokens=["</s>", "<s>", "<pad>", "<extra>"],
    )
    return folder


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_vocabulary_is_projected_and_all_else_is_kept(tmp_path, new_tokenizer, name):
    old = save_model(name, tmp_path / "old", dtype=torch.bfloat16)
    main(
        ["projection", "embed", str(old), str(tmp_path / "new"), "--tokenizer", str(new_tokenizer)]
    )
    before, after = tensors_of(old), tensors_of(tmp_path / "new")
    projection = _projection(new_tokenizer, old)
    dense = np.zeros(projection.shape)
    rows = np.repeat(np.arange(projection.shape[0]), np.diff(projection.indptr))
    np.add.at(dense, (rows, projection.indices), projection.values)
    assert after.keys() == before.keys()
    for key, tensor in before.items():
        if key not in (EMBEDDING, HEAD):
            assert torch.equal(after[key], tensor), key
            continue
        expected = torch.from_numpy(dense) @ tensor[: projection.shape[1]].double()
        expected[projection.empty_rows] = tensor[: projection.shape[1]].double().mean(0)
        # A rounding to bf16.
        torch.testing.assert_close(after[key].double(), expected, rtol=2**-8, atol=1e-6)
        exact = np.flatnonzero(projection.is_exact_row)
        assert len(exact) > 200
        columns = projection.indices[projection.indptr[exact]]
        assert torch.equal(after[key][exact], tensor[columns])
    assert len(projection.empty_rows) == 1


def test_transformers_loads_it_with_the_new_tokenizer(tmp_path, new_tokenizer):
    old = save_model("qwen3", tmp_path / "old")
    main(
        ["projection", "embed", str(old), str(tmp_path / "new"), "--tokenizer", str(new_tokenizer)]
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new")
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    generation = json.loads((tmp_path / "new" / "generation_config.json").read_text())
    assert model.config.vocab_size == len(tokenizer)
    for values in (config, generation):
        assert [values[f"{kind}_token_id"] for kind in ("bos", "eos", "pad")] == [1, 0, 2]
    assert generation["max_new_tokens"] == 8
    ids = torch.tensor([tokenizer("the weather")["input_ids"]])
    assert torch.isfinite(model(ids).logits).all()


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


@pytest.mark.parametrize("kind", ["tiktoken", "model of another name", "saved"])
def test_a_tokenizer_of_any_kind_comes_along(tmp_path, kind):
    old, folder = save_model("qwen3", tmp_path / "old"), tmp_path / "tokenizer"
    folder.mkdir()
    if kind == "tiktoken":
        shutil.copyfile(rank_file(tmp_path), folder / "words.tiktoken")
    else:
        shutil.copyfile(nfkc_sentencepiece(tmp_path), folder / "words.model")
    if kind == "saved":
        whole = MegatronTokenizer.from_pretrained(folder, prompt_format="identity")
        folder = tmp_path / "saved"
        whole.save_pretrained(folder)
    main(["projection", "embed", str(old), str(tmp_path / "new"), "--tokenizer", str(folder)])
    new, expected = (
        build_tokenizer(TokenizerConfig(model=str(path))) for path in (tmp_path / "new", folder)
    )
    assert new.fingerprint() == expected.fingerprint()
    assert new.prompt_format == expected.prompt_format
    assert {file.name for file in folder.iterdir()} <= {
        file.name for file in (tmp_path / "new").iterdir()
    }


def test_a_tokenizer_that_does_not_survive_a_copy_is_refused_before_anything_is_written(tmp_path):
    old, folder = save_model("qwen3", tmp_path / "old"), tmp_path / "tokenizer"
    folder.mkdir()
    shutil.copyfile(nfkc_sentencepiece(tmp_path), folder / "words.model")
    tokenizer = build_tokenizer(TokenizerConfig(model=str(folder)))
    projection = SparseProjection.from_tokenizers(tokenizer, _tokenizer(old), top_k=32, decay=1.0)
    # A folder's tokenizer is the file of this name, if there is one.
    (folder / "tokenizer.model").write_bytes(b"another")
    with pytest.raises(
        CheckpointError, match=r"is not the tokenizer; got the copy.*begins with b'another'"
    ):
        write_with_vocabulary(
            old,
            tmp_path / "new",
            projection=projection,
            tokenizer=tokenizer,
            tokenizer_folder=folder,
        )
    assert not (tmp_path / "new").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_shares_may_come_from_a_file_of_the_known_tools(tmp_path, new_tokenizer, capsys):
    old = save_model("llama", tmp_path / "old")
    words = ["projection", "embed", str(old), "--tokenizer", str(new_tokenizer)]
    main([*words, str(tmp_path / "spelled")])
    content = _projection(new_tokenizer, old)
    write_legacy_file(content, tmp_path / "map.pt")
    main([*words, str(tmp_path / "given"), "--projection", str(tmp_path / "map.pt")])
    assert "note:" not in capsys.readouterr().err
    first, second = (tensors_of(tmp_path / name) for name in ("spelled", "given"))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_the_mean_of_a_row_without_entries_leaves_padding_out():
    projection = SparseProjection.from_entries(
        np.array([0, 1, 1]), np.array([2, 0, 1]), np.array([1.0, 0.25, 0.75]), (3, 3)
    )
    old = torch.tensor([[1.0], [2.0], [6.0], [100.0]])
    assert projected_rows(projection, old).tolist() == [[6.0], [1.75], [3.0]]


def test_what_is_there_and_what_does_not_fit_is_refused(tmp_path, new_tokenizer):
    old = save_model("llama", tmp_path / "old")
    words = ["projection", "embed", str(old), str(tmp_path / "new"), "--tokenizer"]
    _projection(new_tokenizer, new_tokenizer).save(tmp_path / "other.safetensors")
    with pytest.raises((MegatronExtError, SystemExit)):
        main([*words, str(new_tokenizer), "--projection", str(tmp_path / "other.safetensors")])
    with pytest.raises((MegatronExtError, SystemExit)):
        main([*words, str(new_tokenizer / "tokenizer.json")])
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "kept").touch()
    with pytest.raises((MegatronExtError, SystemExit)):
        main([*words, str(new_tokenizer)])
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["kept"]


def _projection(new, old):
    return SparseProjection.from_tokenizers(_tokenizer(new), _tokenizer(old), top_k=32, decay=1.0)


def _tokenizer(folder):
    return build_tokenizer(TokenizerConfig(model=str(folder)))

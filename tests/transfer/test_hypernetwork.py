"""A hypernetwork begins as the mean of the pieces, learns, and is used for its own model alone."""

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ext.cli.main import main
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.transfer.hypernetwork import Hypernetwork, HypernetworkConfig, padded
from megatron_ext.transfer.options import TransferOptions
from megatron_ext.transfer.row_sources import row_sources
from megatron_ext.transfer.train_hypernetwork import (
    HypernetworkTraining,
    train_hypernetwork,
)
from megatron_ext.transfer.write_model import transfer_model
from tests.huggingface.tiny_models import tensors_of

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TEXTS = ["the weather of the other thing, then there is the weather and a theory. "] * 6
SMALL = {"layers": 1, "hidden": 16, "batch_size": 2, "seq_length": 16, "vocabulary_size": 600}


def network(**sizes):
    torch.manual_seed(3)
    config = {"model": "m", "width": 6, "parts": 2, "hidden": 8, "layers": 1, "most_pieces": 3}
    return Hypernetwork(HypernetworkConfig(**{**config, **sizes}))


def test_an_untrained_one_is_the_mean_of_the_pieces():
    rows = torch.randn(20, 12)
    pieces = [[3], [4, 5], [6, 7, 8], [1, 2, 3, 4]]
    expected = torch.stack([rows[ids].mean(0) for ids in pieces])
    torch.testing.assert_close(network().predict(rows, pieces), expected)
    assert network().predict(rows, []).shape == (0, 12)


def test_other_tokens_and_padding_do_not_change_a_prediction():
    rows, trained = torch.randn(20, 12), network()
    torch.nn.init.normal_(trained.out.weight)
    alone = trained(rows, padded([[4, 5]], rows.device))
    beside = trained(rows, padded([[1, 2, 3], [4, 5]], rows.device))[1:]
    torch.testing.assert_close(alone, beside)
    assert not torch.allclose(alone, rows[[4, 5]].mean(0))
    # The order of the pieces counts.
    assert not torch.allclose(alone, trained(rows, padded([[5, 4]], rows.device)))


def test_training_brings_predictions_closer_and_is_repeated_by_its_seed(untied):
    options = HypernetworkTraining(steps=40, lr=1e-2, hidden_share=0.8, seed=1, **SMALL)
    told = []
    trained = train_hypernetwork(untied, TEXTS, options, tell=told.append)
    again = train_hypernetwork(untied, TEXTS, options, tell=lambda line: None)
    distances = [float(re.search(r"rows ([\d.]+)", line)[1]) for line in told]
    assert distances[-1] < distances[0]
    for name, weight in trained.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


@pytest.mark.parametrize("is_tied", [False, True])
def test_init_copies_first_and_predicts_the_rest(tmp_path, untied, tied, new_tokenizer, is_tied):
    model, made = tied if is_tied else untied, tmp_path / "hypernet"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    (tmp_path / "text.txt").write_text(" ".join(TEXTS))
    data = ["--data", str(tmp_path / "text.txt"), "--output", str(made), "--steps", "2"]
    main(["transfer", "train-hypernet", str(model), *data, *flags])
    trained = Hypernetwork.load(made)
    torch.nn.init.normal_(trained.out.weight, std=0.1)
    changed = tmp_path / "changed"
    trained.save(changed)
    options = TransferOptions(method="hypernet", hypernet=changed)
    transfer_model(model, new_tokenizer, tmp_path / "new", options)
    transfer_model(model, new_tokenizer, tmp_path / "fvt")
    before, mean, after = (tensors_of(it) for it in (model, tmp_path / "fvt", tmp_path / "new"))
    old, new = (build_tokenizer(TokenizerConfig(model=str(it))) for it in (model, new_tokenizer))
    sources = row_sources(new, old)
    names = [EMBEDDING] if is_tied else [EMBEDDING, HEAD]
    rows = torch.cat([before[name][: old.vocab_size].float() for name in names], dim=1)
    expected = trained.predict(rows, [sources.pieces[i] for i in sources.spelled]).chunk(
        len(names), dim=1
    )
    spelled = torch.from_numpy(sources.spelled)
    for name in before:
        same = torch.ones(len(after[name]), dtype=torch.bool)
        if name in names:
            same[spelled] = False
            predicted = expected[names.index(name)].to(after[name].dtype)
            assert torch.equal(after[name][spelled], predicted)
        assert torch.equal(after[name][same], mean[name][same])
    # The same model but for one number of its head, or of its only matrix.
    other = tmp_path / "touched"
    rows = tensors_of(model)[names[-1]][: old.vocab_size][-1:].float()
    shutil.copytree(model, other)
    for file in other.glob("*.safetensors"):
        tensors = load_file(file)
        if names[-1] in tensors:
            tensors[names[-1]][old.vocab_size - 1] = (rows[0] + 1).to(tensors[names[-1]].dtype)
            save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="another model"):
        transfer_model(other, new_tokenizer, tmp_path / "other", options)
    assert not (tmp_path / "other").exists()


def test_what_cannot_be_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="reads a hypernetwork"):
        TransferOptions(method="hypernet")
    with pytest.raises(ConfigError, match="predicts norms"):
        TransferOptions(method="hypernet", hypernet=tmp_path, calibrates_norms=True)
    with pytest.raises(CheckpointError):
        Hypernetwork.load(tmp_path)
    (tmp_path / "hypernetwork.json").write_text('{"width": 1}')
    with pytest.raises(CheckpointError, match="no hypernetwork can be read"):
        Hypernetwork.load(tmp_path)
    with pytest.raises(ConfigError, match="hardly more than bytes"):
        HypernetworkTraining(vocabulary_size=100)
    with pytest.raises(ConfigError, match="multiple of 4"):
        network(hidden=10)

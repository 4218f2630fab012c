"""Loss masks through megatron-core's own GPT dataset and blends."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.megatron_lm.masked_gpt_dataset import MaskedGPTDataset
from megatron_ext.preprocessing import preprocess as preprocess_module
from megatron_ext.tokenizers import TokenizerConfig
from tests.preprocessing.chat_of_bytes import BEGIN, EOD, TRAINED, ChatOfBytes, conversation
from tests.preprocessing.runs import run, write_json_lines

SEQUENCE_LENGTH = 24
SFT = TokenizerConfig(library="byte-level", mode="sft")


@pytest.fixture
def prefixes(tmp_path, monkeypatch):
    """Two datasets of conversations, in which a trained token is known by its id."""
    return [_write(tmp_path, name, monkeypatch) for name in ("a", "long")]


def _write(folder, name, monkeypatch, *, trains_all=False):
    tokenizer = ChatOfBytes(trains_all=trains_all)
    monkeypatch.setattr(preprocess_module, "build_tokenizer", lambda config: tokenizer)
    rows = [
        conversation(*(f"{name}{i} {'x' * (i * k % 17)}" for k in range(1, 2 + i % 4)))
        for i in range(60)
    ]
    file = write_json_lines(folder / f"{name}.jsonl", ({"messages": row} for row in rows))
    run(file, output=folder / name, tokenizer=SFT, append_eod=not trains_all)
    return str(folder / f"{name}_messages_document")


def build(kind, prefixes, folder, **options):
    """The datasets of the splits, through megatron-core's builder."""
    weights = None if len(prefixes) == 1 else [1.0, 2.0]
    config = GPTDatasetConfig(
        random_seed=7,
        sequence_length=SEQUENCE_LENGTH,
        blend=(prefixes, weights),
        split="8,2,0",
        # A blend caches its indices under a process group only.
        path_to_cache=str(folder / "cache") if weights is None else None,
        tokenizer=ChatOfBytes(),
        **{
            "reset_position_ids": False,
            "reset_attention_mask": False,
            "eod_mask_loss": False,
            **options,
        },
    )
    sizes = [None, None, None] if weights is None else [150, 40, 0]
    datasets = BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()
    return [dataset for dataset in datasets if dataset is not None]


@pytest.mark.parametrize("extra_token", [True, False], ids=["extra-token", "no-extra-token"])
@pytest.mark.parametrize("eod_mask_loss", [True, False], ids=["eod-masked", "eod"])
@pytest.mark.parametrize("count", [1, 2], ids=["one-dataset", "blend"])
def test_a_position_is_trained_where_the_token_that_it_predicts_is(
    prefixes, tmp_path, count, eod_mask_loss, extra_token
):
    options = {
        "eod_mask_loss": eod_mask_loss,
        "add_extra_token_to_sequence": extra_token,
        "drop_last_partial_validation_sequence": False,
    }
    masked = build(MaskedGPTDataset, prefixes[:count], tmp_path, **options)
    plain = build(GPTDataset, prefixes[:count], tmp_path, **options)
    trained_count = 0
    for ours, theirs in itertools.chain.from_iterable(
        zip(a, b, strict=True) for a, b in zip(masked, plain, strict=True)
    ):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - {"loss_mask"}:
            assert np.array_equal(ours[name], theirs[name])
        tokens, labels = theirs["tokens"], theirs["labels"]
        # An EOD is trained behind an answer.
        is_trained = (labels >= TRAINED) | ((labels == EOD) & (tokens >= TRAINED))
        assert torch.equal(ours["loss_mask"], theirs["loss_mask"] * is_trained)
        trained_count += int(ours["loss_mask"].sum())
    assert trained_count > 500


def test_no_position_predicts_from_one_document_into_the_next(tmp_path, monkeypatch):
    prefix = _write(tmp_path, "a", monkeypatch, trains_all=True)
    train, _ = build(MaskedGPTDataset, [prefix], tmp_path)
    labels = torch.stack([sample["labels"] for sample in train])
    mask = torch.stack([sample["loss_mask"] for sample in train])
    assert torch.equal(mask == 0, labels == BEGIN)
    assert (labels == BEGIN).sum() > 30


def test_a_sample_that_fills_a_batch_trains_nothing(prefixes, tmp_path):
    train, _ = build(MaskedGPTDataset, prefixes[:1], tmp_path)
    assert train[None]["loss_mask"].sum() == 0


def test_indices_that_are_loaded_late_and_workers_of_a_loader_give_the_same(prefixes, tmp_path):
    train, _ = build(MaskedGPTDataset, prefixes[:1], tmp_path)
    expected = torch.stack([sample["loss_mask"] for sample in train])
    late, _ = build(MaskedGPTDataset, prefixes[:1], tmp_path, defer_npy_index_mmap=True)
    assert torch.equal(torch.stack([sample["loss_mask"] for sample in late]), expected)
    loader = torch.utils.data.DataLoader(
        train, batch_size=4, num_workers=1, multiprocessing_context="fork"
    )
    assert torch.equal(torch.cat([batch["loss_mask"] for batch in loader]), expected)


def _no_mask(folder, end):
    (folder / f"a_messages_loss_mask.{end}").unlink()


def _others_mask(folder, end):
    (folder / f"long_messages_loss_mask.{end}").replace(folder / f"a_messages_loss_mask.{end}")


def _tokens_as_mask(folder, end):
    mask = folder / f"a_messages_loss_mask.{end}"
    (folder / f"a_messages_document.{end}").replace(mask)
    (folder / f"a_messages_document.{end}").hardlink_to(mask)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_no_mask, r"a_messages_loss_mask\.idx: .* no loss mask; make both"),
        (_others_mask, "the loss mask is of another shape"),
        (_tokens_as_mask, "the loss mask is of another type"),
    ],
)
def test_a_mask_that_is_not_of_the_tokens_is_refused(prefixes, tmp_path, spoil, message):
    for end in ("bin", "idx"):
        spoil(tmp_path, end)
    with pytest.raises(DataError, match=message):
        build(MaskedGPTDataset, prefixes[:1], tmp_path)


def test_a_name_that_is_not_ours_is_refused(prefixes, tmp_path):
    for end in ("bin", "idx"):
        Path(f"{prefixes[0]}.{end}").rename(tmp_path / f"other.{end}")
    with pytest.raises(ConfigError, match="other: no loss mask goes by the name"):
        build(MaskedGPTDataset, [str(tmp_path / "other")], tmp_path)


def test_the_sum_of_all_masks_is_what_the_report_says(prefixes, tmp_path):
    mask = np.fromfile(tmp_path / "a_messages_loss_mask.bin", np.uint8)
    tokens = np.fromfile(tmp_path / "a_messages_document.bin", np.uint16)
    assert mask.sum() == (tokens >= TRAINED).sum() + ((tokens == EOD) & np.roll(mask, 1)).sum()

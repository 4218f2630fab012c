"""megatron-core's own datasets, driven by tokenizers of every library."""

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from megatron.core.datasets.bert_dataset import (
    BERTMaskedWordPieceDataset,
    BERTMaskedWordPieceDatasetConfig,
)
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.t5_dataset import (
    T5MaskedWordPieceDataset,
    T5MaskedWordPieceDatasetConfig,
)
from megatron.core.datasets.utils import Split
from megatron.core.tokenizers import MegatronTokenizer as TheirTokenizer
from megatron.core.tokenizers import MegatronTokenizerBase
from megatron.core.tokenizers.text import MegatronTokenizerText as TheirText
from megatron.core.tokenizers.text.libraries.abstract_tokenizer import MegatronTokenizerTextAbstract

from megatron_ext.tokenizers import MegatronTokenizer, MegatronTokenizerText
from tests.fork_server import run_python
from tests.tokenizers.tokenizer_files import SENTENCES

SEQUENCE_LENGTH = 32
LIBRARIES = (
    "sentencepiece-v1",
    "tekken",
    "json-rank-list",
    "huggingface-byte-level",
    "huggingface-wordpiece",
    "byte-level",
    "null",
)


def documents(tokenizer: MegatronTokenizerText) -> list[str]:
    if tokenizer.library == "null":
        return [" ".join(map(str, range(i, i + 20))) for i in range(60)]
    return SENTENCES[:80]


def write_documents(tokenizer: MegatronTokenizerText, prefix: Path) -> str:
    """As ``tools/preprocess_data.py --append-eod`` does; a document's sentences are its halves."""
    builder = IndexedDatasetBuilder(
        f"{prefix}.bin", dtype=DType.optimal_dtype(tokenizer.vocab_size)
    )
    for text in documents(tokenizer):
        ids = tokenizer.tokenize(text)
        if not ids:
            continue
        if tokenizer.eod is not None:
            ids.append(tokenizer.eod)
        builder.add_document(ids, [len(ids)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def gpt_config(tokenizer: MegatronTokenizerText, **options: Any) -> GPTDatasetConfig:
    return GPTDatasetConfig(
        random_seed=3,
        sequence_length=SEQUENCE_LENGTH,
        tokenizer=tokenizer,
        **{
            "split": "8,1,1",
            "reset_position_ids": False,
            "reset_attention_mask": False,
            "eod_mask_loss": True,
            **options,
        },
    )


def gpt_dataset(
    tokenizer: MegatronTokenizerText, folder: Path, split: Split = Split.train, **options: Any
) -> GPTDataset:
    folder.mkdir(exist_ok=True)
    prefix = write_documents(tokenizer, folder / "documents")
    config = gpt_config(tokenizer, blend=([prefix], None), **options)
    low_level = GPTDataset.build_low_level_dataset(prefix, config)
    indices = np.arange(GPTDataset.numel_low_level_dataset(low_level), dtype=np.int32)
    return GPTDataset(low_level, prefix, indices, None, split, config)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_tokenizer_is_one_of_megatron_cores(opened, name):
    tokenizer = opened(name)
    assert isinstance(tokenizer, MegatronTokenizerBase)
    assert isinstance(tokenizer, TheirText)
    assert isinstance(tokenizer._tokenizer, MegatronTokenizerTextAbstract)


def test_megatron_core_reads_the_metadata_that_we_write(opened, tmp_path):
    ours = opened("sentencepiece-v1")
    ours.save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "tokenizer.model"
    for model_type in ("saved", None, "gpt"):
        if model_type != "saved":
            MegatronTokenizer.write_metadata(
                file, "sentencepiece", model_type=model_type, overwrite=True
            )
        theirs = TheirTokenizer.from_pretrained(str(file))
        assert theirs.tokenize("the parser") == ours.tokenize("the parser")


@pytest.mark.parametrize("name", LIBRARIES)
def test_gpt_samples_are_the_documents_tokens(opened, tmp_path, name):
    tokenizer = opened(name)
    dataset = gpt_dataset(tokenizer, tmp_path)
    stored = IndexedDataset(str(tmp_path / "documents"))
    assert [row[:-1].tolist() if tokenizer.eod is not None else row.tolist() for row in stored] == [
        ids for ids in map(tokenizer.tokenize, documents(tokenizer)) if ids
    ]
    tokens = np.concatenate([dataset[i]["tokens"].numpy() for i in range(len(dataset))])
    assert len(tokens) == len(dataset) * SEQUENCE_LENGTH
    assert set(tokens.tolist()) <= {int(i) for row in stored for i in row}
    for sample in (dataset[i] for i in range(len(dataset))):
        at_end = sample["tokens"] == (-1 if tokenizer.eod is None else tokenizer.eod)
        assert not sample["loss_mask"][at_end].any()
        assert sample["loss_mask"][~at_end].all() or tokenizer.pad_id is not None


@pytest.mark.parametrize("name", [name for name in LIBRARIES if name != "huggingface-wordpiece"])
def test_mock_gpt_samples_come_out(opened, tmp_path, name):
    tokenizer = opened(name)
    config = gpt_config(tokenizer)
    assert config.mock
    low_level = MockGPTDataset.build_low_level_dataset(None, config)
    assert low_level[0][-1] == tokenizer.eod
    indices = np.arange(50, dtype=np.int32)
    dataset = MockGPTDataset(low_level, None, indices, 20, Split.train, config)
    assert all(dataset[i]["tokens"].max() < tokenizer.vocab_size for i in range(20))


@pytest.mark.parametrize("name", ["sentencepiece-v1", "tekken", "byte-level"])
def test_blends_are_built_and_cached_by_what_the_tokenizer_says_of_itself(opened, tmp_path, name):
    tokenizer = opened(name)
    prefixes = [write_documents(tokenizer, tmp_path / part) for part in ("one", "two")]
    config = gpt_config(tokenizer, blend=(prefixes, [0.3, 0.7]))
    train, valid, test = BlendedMegatronDatasetBuilder(
        GPTDataset, [40, 8, 8], lambda: True, config
    ).build()
    assert len(train) == 40
    assert len(train[39]["tokens"]) == SEQUENCE_LENGTH
    assert valid is not None
    assert test is not None


def cached(tokenizer: MegatronTokenizerText, folder: Path) -> set[str]:
    """Names of the caches that a dataset of this tokenizer makes."""
    cache = folder / "cache"
    before = set(os.listdir(cache)) if cache.is_dir() else set()
    gpt_dataset(tokenizer, folder, path_to_cache=str(cache))
    return set(os.listdir(cache)) - before


def test_a_cache_is_found_again_by_the_same_tokenizer_and_by_no_other(opened, tmp_path):
    assert cached(opened("json-rank-list", num_special_tokens=30), tmp_path)
    assert not cached(opened("json-rank-list", num_special_tokens=30), tmp_path)
    for options in (
        {"num_special_tokens": 31},
        {"num_special_tokens": 30, "pattern": "v1"},
        {"num_special_tokens": 30, "parse_special_tokens": True},
        {"num_special_tokens": 30, "additional_special_tokens": ["<a>"]},
        {"num_special_tokens": 30, "prompt_format": "identity"},
    ):
        assert cached(opened("json-rank-list", **options), tmp_path), options
        assert not cached(opened("json-rank-list", **options), tmp_path), options


def test_identifiers_are_json_and_equal_in_every_process(opened):
    # 0.16.1 and main name the class by its module, which moved between them: every cache is missed.
    tokenizer = opened("json-rank-list", special_tokens=("<unk>", "<s>", "</s>"), pattern="v1")
    text = json.dumps(tokenizer.unique_identifiers)
    assert json.loads(text)["class"] == "megatron_ext.MegatronTokenizerText"
    code = (
        "import json, sys; from megatron_ext.tokenizers import MegatronTokenizer\n"
        "t = MegatronTokenizer.from_pretrained(sys.argv[1], pattern='v1',\n"
        "    special_tokens=['<unk>', '<s>', '</s>'])\n"
        "print(json.dumps(t.unique_identifiers), end='')"
    )
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        assert run_python(code, tokenizer.path, env=environment).stdout == text


def test_identified_by_content_an_edited_file_misses_the_cache(tokenizer_path, tmp_path):
    # By its path alone, as in Megatron, it would find the old one.
    file = tmp_path / "tokenizer.json"
    original = (tokenizer_path("huggingface-nfc") / "tokenizer.json").read_bytes()
    found = []
    for by_content in (False, True):
        for contents in (original, original.replace(b"<|end|>", b"<|fin|>")):
            file.write_bytes(contents)
            tokenizer = MegatronTokenizer.from_pretrained(file, identify_by_content=by_content)
            found.append(json.dumps(tokenizer.unique_identifiers))
    assert found[0] == found[1]
    assert len(set(found)) == 3


# Padding and the end of document.


def pad_of_dataset(tokenizer: MegatronTokenizerText, folder: Path, **options: Any) -> Any:
    return gpt_dataset(tokenizer, folder, **options)._pad_token_id


def test_an_id_of_its_own_pads(opened, tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*pad token")
        tokenizer = opened("huggingface-byte-level", pad_token="<pad>")
        assert pad_of_dataset(tokenizer, tmp_path) == tokenizer.pad != tokenizer.eod


@pytest.mark.parametrize("allowed", [False, True], ids=["refused", "allowed"])
def test_padding_with_the_end_of_sequence_is_a_collision(opened, tmp_path, allowed):
    tokenizer = opened("huggingface-byte-level", pad_token="<|end|>")
    assert tokenizer.pad == tokenizer.eod
    with pytest.warns(UserWarning, match="pad token id in the tokenizer collides"):
        pad = pad_of_dataset(tokenizer, tmp_path, allow_ambiguous_pad_tokens=allowed)
    assert pad == (tokenizer.pad if allowed else -1)


def test_padding_with_an_end_of_document_of_its_own_is_a_collision(opened, tmp_path):
    tokenizer = opened("null", eod_id=7, pad_id=7)
    with pytest.warns(UserWarning, match="pad token id in the tokenizer collides"):
        assert pad_of_dataset(tokenizer, tmp_path) == -1


@pytest.mark.parametrize("name", ["sentencepiece-v1", "null", "json-rank-list"])
@pytest.mark.parametrize(
    "options",
    [{"drop_last_partial_validation_sequence": False}, {"add_extra_token_to_sequence": False}],
    ids=lambda options: next(iter(options)),
)
def test_without_padding_a_dataset_fills_up_and_masks_what_it_filled(
    opened, tmp_path, name, options
):
    names = {"special_tokens": ["<s>", "</s>"]} if name == "json-rank-list" else {}
    tokenizer = opened(name, **names)
    assert (tokenizer.pad, tokenizer.pad_id) == (-1, None)
    dataset = gpt_dataset(tokenizer, tmp_path, Split.valid, eod_mask_loss=False, **options)
    samples = [dataset[i] for i in range(len(dataset))]
    assert any((sample["loss_mask"] == 0).any() for sample in samples)
    assert all((sample["tokens"] >= 0).all() for sample in samples)


def test_without_padding_nothing_is_masked(opened, tmp_path):
    tokenizer = opened("sentencepiece-v1")
    assert tokenizer.pad_id is None
    dataset = gpt_dataset(tokenizer, tmp_path, eod_mask_loss=False)
    assert all(dataset[i]["loss_mask"].all() for i in range(len(dataset)))


def test_an_id_of_zero_ends_a_document_and_another_pads(opened, tmp_path):
    tokenizer = opened("byte-level", legacy=True)
    assert (tokenizer.eod, tokenizer.pad) == (0, 1)
    dataset = gpt_dataset(tokenizer, tmp_path)
    assert dataset._pad_token_id == 1
    samples = [dataset[i] for i in range(len(dataset))]
    assert any((sample["tokens"] == 0).any() for sample in samples)
    for sample in samples:
        assert ((sample["loss_mask"] == 0) == (sample["tokens"] == 0)).all()


def test_padding_of_zero_is_masked(opened, tmp_path):
    tokenizer = opened("null", pad_id=0)
    assert tokenizer.pad == 0
    dataset = gpt_dataset(tokenizer, tmp_path, eod_mask_loss=False)
    assert dataset._pad_token_id == 0
    samples = [dataset[i] for i in range(len(dataset))]
    assert any((sample["labels"] == 0).any() for sample in samples)
    for sample in samples:
        assert ((sample["loss_mask"] == 0) == (sample["labels"] == 0)).all()


# Masked language models.

MASKED = {
    "masking_probability": 0.15,
    "short_sequence_probability": 0.1,
    "masking_max_ngram": 3,
    "masking_do_full_word": True,
    "masking_do_permutation": False,
    "masking_use_longer_ngrams": False,
    "masking_use_geometric_distribution": False,
}


def write_sentences(tokenizer: MegatronTokenizerText, prefix: Path) -> str:
    """As ``tools/preprocess_data.py --split-sentences`` does."""
    builder = IndexedDatasetBuilder(
        f"{prefix}.bin", dtype=DType.optimal_dtype(tokenizer.vocab_size)
    )
    texts = [text for text in SENTENCES[:240] if tokenizer.tokenize(text)]
    for begin in range(0, len(texts) - 3, 3):
        sentences = [tokenizer.tokenize(text) for text in texts[begin : begin + 3]]
        builder.add_document(
            [token_id for ids in sentences for token_id in ids], [len(ids) for ids in sentences]
        )
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """The process group that these datasets ask for their rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def masked_dataset(kind: type, config: Any, prefix: str) -> Any:
    low_level = kind.build_low_level_dataset(prefix, config)
    indices = np.arange(kind.numel_low_level_dataset(low_level), dtype=np.int32)
    return kind(low_level, prefix, indices, 40, Split.train, config)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("classification_head", [True, False], ids=["pairs", "single"])
def test_bert_samples_come_out(opened, tmp_path, classification_head):
    tokenizer = opened("huggingface-wordpiece", mask_token="[MASK]", sep_token="[SEP]")
    prefix = write_sentences(tokenizer, tmp_path / "documents")
    config = BERTMaskedWordPieceDatasetConfig(
        random_seed=5,
        sequence_length=96,
        blend=([prefix], None),
        split="1,0,0",
        tokenizer=tokenizer,
        classification_head=classification_head,
        **MASKED,
    )
    dataset = masked_dataset(BERTMaskedWordPieceDataset, config, prefix)
    masked = 0
    for sample in (dataset[i] for i in range(40)):
        tokens, chosen = sample["text"], sample["loss_mask"] == 1
        assert tokens[0] == tokenizer.cls
        assert tokenizer.sep in tokens.tolist()
        assert chosen.any()
        masked += int((tokens[chosen] == tokenizer.mask).sum())
        whole = np.where(chosen, sample["labels"], tokens)
        shown = [tokenizer.inv_vocab[i] for i in whole.tolist() if i != tokenizer.pad]
        assert "[MASK]" not in shown
    assert masked > 40


@pytest.mark.usefixtures("one_rank")
def test_t5_samples_come_out(opened, tmp_path):
    sentinels = [f"<extra_id_{i}>" for i in range(40)]
    tokenizer = opened(
        "huggingface-wordpiece",
        mask_token="[MASK]",
        bos_token="[CLS]",
        eos_token="[SEP]",
        additional_special_tokens=sentinels,
    )
    assert [tokenizer.id_to_token(i) for i in tokenizer.additional_special_tokens_ids] == sentinels
    prefix = write_sentences(tokenizer, tmp_path / "documents")
    config = T5MaskedWordPieceDatasetConfig(
        random_seed=5,
        sequence_length=96,
        sequence_length_decoder=64,
        blend=([prefix], None),
        split="1,0,0",
        tokenizer=tokenizer,
        **{**MASKED, "masking_max_ngram": 10, "short_sequence_probability": 0.2},
    )
    dataset = masked_dataset(T5MaskedWordPieceDataset, config, prefix)
    for sample in (dataset[i] for i in range(20)):
        first = tokenizer.additional_special_tokens_ids[0]
        assert sample["text_dec"][0] == tokenizer.bos
        assert first in sample["text_enc"].tolist()
        assert first in sample["text_dec"].tolist()
        assert tokenizer.eos in sample["labels"].tolist()

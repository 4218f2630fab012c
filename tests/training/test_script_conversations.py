"""``pretrain_gpt.py --sft`` under our flags: its data set is ours, for any tokenizer library."""

import sys
from importlib.resources import files
from types import SimpleNamespace

import megatron.core
import numpy as np
import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.errors import ConfigError
from megatron_ext.megatron_lm.arguments import add_sft_arguments, check_sft_arguments
from megatron_ext.megatron_lm.script_conversations import ScriptConversations
from megatron_ext.tokenizers import build_tokenizer
from megatron_ext.tokenizers.config import TokenizerConfig
from tests.preprocessing.runs import write_json_lines
from tests.tokenizers.tokenizer_files import byte_level
from tests.training import pretrain_stand_in
from tests.training.release_parser import RELEASES, release_parser

LENGTH = 96
MISTRAL = files("mistral_common") / "data"
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
)


def _tokenizer(library, folder):
    model = {
        "sentencepiece": lambda: str(MISTRAL / "tokenizer.model.v1"),
        "tiktoken": lambda: str(MISTRAL / "tekken_240911.json"),
        "huggingface": lambda: str(byte_level(folder)),
        "byte-level": lambda: None,
    }[library]()
    config = TokenizerConfig(
        library=library, model=model, chat_template=TEMPLATE, prompt_format="auto", mode="sft"
    )
    return build_tokenizer(config)


@pytest.fixture
def records(tmp_path):
    """Conversations of three sizes, without a system message."""
    return write_json_lines(
        tmp_path / "chat.jsonl",
        [
            {
                "messages": [
                    {"role": "user", "content": f"What is {i}?"},
                    {"role": "assistant", "content": "yes " * (1 + i % 3)},
                ]
            }
            for i in range(9)
        ],
    )


def _built(path, tokenizer, monkeypatch, *words, **arguments):
    """The training data that a script's provider builds, and its arguments."""
    parser = release_parser(RELEASES[0])
    add_sft_arguments(parser)
    add_sft_arguments(parser)
    parsed = parser.parse_args(["--sft", *words])
    check_sft_arguments(parsed)
    defaults = {
        "transformer_impl": "local",
        "create_attention_mask_in_dataloader": False,
        "masked_softmax_fusion": False,
        "micro_batch_size": 1,
        "tensor_model_parallel_size": 1,
    }
    pretrain_stand_in.set_args(**{**vars(parsed), **defaults, **arguments})
    monkeypatch.setitem(sys.modules, "megatron.training", pretrain_stand_in)
    config = GPTDatasetConfig(
        random_seed=3,
        sequence_length=LENGTH,
        blend=([str(path)], None),
        split="1,0,0",
        path_to_cache=None,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=pretrain_stand_in.get_args().create_attention_mask_in_dataloader,
    )
    builder = BlendedMegatronDatasetBuilder(ScriptConversations, [9, 0, 0], lambda: True, config)
    return builder.build()[0]


@pytest.mark.parametrize("library", ["sentencepiece", "tiktoken", "huggingface", "byte-level"])
def test_the_answers_are_trained_for_any_library(library, records, tmp_path, monkeypatch):
    tokenizer = _tokenizer(library, tmp_path)
    train = _built(records, tokenizer, monkeypatch)
    for sample in train:
        # What any attention takes, at any size of a microbatch.
        assert sorted(sample) == ["labels", "loss_mask", "position_ids", "tokens"]
        trained = sample["labels"][sample["loss_mask"] == 1]
        text = tokenizer.detokenize([i for i in trained.tolist() if i != tokenizer.eod])
        assert set(text.split()) == {"yes"}


def test_every_token_but_the_first_is_trained_in_full(records, tmp_path, monkeypatch):
    tokenizer = _tokenizer("byte-level", tmp_path)
    for sample in _built(records, tokenizer, monkeypatch, "--sft-loss-mode", "full"):
        tokens, labels = sample["tokens"].numpy(), sample["labels"].numpy()
        count = int((labels != IGNORE_INDEX).sum())
        np.testing.assert_array_equal(labels[:count], tokens[1 : count + 1])
        assert tokens[count] == tokenizer.eod
        assert tokenizer.detokenize(tokens[:count].tolist()).startswith("user: What is ")


def test_packed_conversations_have_the_bounds_that_transformer_engine_reads(
    records, tmp_path, monkeypatch
):
    words = ("--sft-packing", "best-fit-decreasing", "--no-sft-shuffle")
    options = {"transformer_impl": "transformer_engine"}
    train = _built(records, _tokenizer("byte-level", tmp_path), monkeypatch, *words, **options)
    bounds = train[0]["cu_seqlens"]
    assert (bounds[0], bounds[-1]) == (0, LENGTH)
    assert (bounds.diff() > 0).all()
    assert len(bounds) > 3
    assert train[0]["max_seqlen"] == bounds.diff().max()


def test_packed_conversations_have_a_mask_for_the_local_attention(records, tmp_path, monkeypatch):
    words = ("--sft-packing", "best-fit-decreasing")
    options = {"create_attention_mask_in_dataloader": True}
    train = _built(records, _tokenizer("byte-level", tmp_path), monkeypatch, *words, **options)
    first_of_second = int((train[0]["position_ids"] == 0).nonzero()[1])
    assert train[0]["attention_mask"][0, first_of_second, :first_of_second].all()
    assert "cu_seqlens" not in train[0]


def test_a_tensor_parallel_group_gets_what_the_ranks_of_its_release_await(
    records, tmp_path, monkeypatch
):
    tokenizer = _tokenizer("byte-level", tmp_path)
    two = {"tensor_model_parallel_size": 2}
    for release, awaited in (("0.16.1", False), ("0.17.0", True), ("0.19.0", True)):
        monkeypatch.setattr(megatron.core, "__version__", release)
        sample = _built(records, tokenizer, monkeypatch, **two)[0]
        assert ("max_seqlen" in sample) == awaited
        assert "cu_seqlens" not in sample
    assert len(_built(records, tokenizer, monkeypatch, **two, micro_batch_size=2)) == 9
    monkeypatch.setattr(megatron.core, "__version__", "0.18.2")
    with pytest.raises(ConfigError, match="--micro-batch-size"):
        _built(records, tokenizer, monkeypatch, **two, micro_batch_size=2)


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        ({}, "--no-masked-softmax-fusion"),
        (
            {"create_attention_mask_in_dataloader": True, "masked_softmax_fusion": True},
            "--no-masked-softmax-fusion",
        ),
        (
            {"transformer_impl": "transformer_engine", "create_attention_mask_in_dataloader": True},
            "--no-create-attention-mask-in-dataloader",
        ),
    ],
    ids=["no-mask", "fused", "mask-for-bounds"],
)
def test_packing_without_an_attention_that_keeps_conversations_apart_is_refused(
    arguments, fix, records, tmp_path, monkeypatch
):
    tokenizer = _tokenizer("byte-level", tmp_path)
    with pytest.raises(ConfigError, match=rf"--sft-packing: .*{fix}"):
        _built(records, tokenizer, monkeypatch, "--sft-packing", "best-fit", **arguments)


def test_bounds_that_ranks_would_not_await_are_refused(records, tmp_path, monkeypatch):
    tokenizer = _tokenizer("byte-level", tmp_path)
    options = {"transformer_impl": "transformer_engine", "tensor_model_parallel_size": 2}
    words = ("--sft-packing", "best-fit")
    monkeypatch.setattr(megatron.core, "__version__", "0.17.0")
    assert "max_seqlen" in _built(records, tokenizer, monkeypatch, *words, **options)[0]
    monkeypatch.setattr(megatron.core, "__version__", "0.16.1")
    with pytest.raises(ConfigError, match=r"--tensor-model-parallel-size: .*do not await"):
        _built(records, tokenizer, monkeypatch, *words, **options)


def test_a_tokenizer_of_the_old_system_is_refused(records):
    with pytest.raises(ConfigError, match=r"--sft: .*leave --legacy-tokenizer out"):
        ScriptConversations.build_low_level_dataset(
            str(records), SimpleNamespace(tokenizer=object())
        )


def test_ranks_that_share_sequences_need_an_attention_for_it():
    parser = release_parser(RELEASES[0])
    add_sft_arguments(parser)
    words = ("--sft", "--context-parallel-size", "2", "--transformer-impl")
    check_sft_arguments(parser.parse_args([*words, "transformer_engine"]))
    with pytest.raises(ConfigError, match=r"--context-parallel-size: .*whole sequences"):
        check_sft_arguments(parser.parse_args([*words, "local"]))


def test_a_flag_of_conversations_without_sft_is_refused():
    parser = release_parser(RELEASES[0])
    add_sft_arguments(parser)
    check_sft_arguments(parser.parse_args([]))
    with pytest.raises(ConfigError, match=r"--sft-loss-mode: .*add --sft"):
        check_sft_arguments(parser.parse_args(["--sft-loss-mode", "full"]))

"""A student learns the same from a model in transformers as from it in megatron-core."""

import argparse
import os

import pytest
import yaml

from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.training.arguments import config_from_arguments
from megatron_ext.training.inputs import read_inputs
from tests.huggingface.tiny_models import save_model
from tests.process_group import run_ranks
from tests.teachers.tiny_causal_lms import save_causal_lm
from tests.training.huggingface_teacher_runs import Run, train_runs, write_texts

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
HUGGINGFACE = {"library": "huggingface"}
LIKE = {
    "hf-tp2": "megatron",
    "hf-cp2-offloaded": "megatron",
    "hf-cached": "megatron",
    "megatron-offloaded": "megatron",
}
"""Runs that are the same, by the run that they are compared with."""
ALL = bool(os.environ.get("MEGATRON_EXT_ALL_TEXT"))
if ALL:
    LIKE |= {"hf-pp2": "megatron", "hf-dskd-offloaded": "dskd"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("libraries")
    # Its head is tied, and layers of queries, keys and values have biases.
    save_model("qwen2", root / "teacher")
    save_model("llama", root / "student")
    write_texts(root)
    return root


@pytest.fixture(scope="module")
def metrics(root):
    offload = {"offload": True}
    runs = [
        Run("megatron", {}, TP2),
        Run("hf-tp2", HUGGINGFACE, TP2),
        Run("hf-cp2-offloaded", HUGGINGFACE | offload, CP2),
        Run("hf-cached", HUGGINGFACE | {"cache": str(root / "cache")}, {}),
        Run("megatron-offloaded", offload, PP2),
    ]
    if ALL:
        runs += [
            Run("hf-pp2", HUGGINGFACE, PP2),
            Run("dskd", {}, TP2, "dskd"),
            Run("hf-dskd-offloaded", HUGGINGFACE | offload, TP2, "dskd"),
        ]
    found = run_ranks(2, train_runs, root, runs, timeout_s=400)
    return found[0]


@pytest.mark.parametrize("name", LIKE)
def test_losses_are_those_of_megatron(name, metrics):
    expected, found = metrics[LIKE[name]], metrics[name]
    assert len(found) == len(expected) == 2
    for own, reference in zip(found, expected, strict=True):
        assert own["compared"] == reference["compared"] > 0
        assert own["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert own["kd"] == pytest.approx(reference["kd"], rel=1e-5)
        assert own["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)
    if name != "hf-cached":
        bits = [its[-1]["teacher_bits_per_byte"] for its in (found, expected)]
        assert bits[0] == pytest.approx(bits[1], rel=1e-5)


def _start(root, **teacher):
    """Check a run up to where models would be built."""
    values = {
        "run_dir": str(root / "refused"),
        "initial_checkpoint": str(root / "student"),
        "student": {"seq_length": 48},
        "teacher": {"library": "huggingface", "checkpoint": str(root / "teacher"), **teacher},
        "data": {"train": [str(root / "train.jsonl")]},
        "training": {"train_iters": 1, "global_batch_size": 2},
    }
    values["loss"] = {"objective": "projected_kl"}
    if "vocabulary_layout" in teacher:
        values["training"]["vocabulary_layout"] = values["teacher"].pop("vocabulary_layout")
    path = root / "refused.yaml"
    path.write_text(yaml.safe_dump(values))
    read_inputs(config_from_arguments(argparse.Namespace(config=str(path))), world_size=1)


def test_what_a_run_cannot_have_is_refused_before_a_model_is_built(root):
    _start(root, model={"seq_length": 48})
    refused = [
        (ConfigError, "longer than the model supports.*64", {"model": {"seq_length": 65}}),
        (ConfigError, "order of the ids", {"vocabulary_layout": "co_sharded"}),
        (CheckpointError, "another hidden_size", {"model": {"hidden_size": 64}}),
    ]
    for kind, message, teacher in refused:
        with pytest.raises(kind, match=message):
            _start(root, **({"model": {"seq_length": 48}} | teacher))


def test_sizes_of_any_architecture_come_from_its_folder(root):
    folder = save_causal_lm("gpt-2", root / "gpt2")
    path = root / "gpt2.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "run_dir": str(root / "gpt2-run"),
                "tokenizer": {"model": str(root / "student")},
                "student": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4},
                "teacher": {
                    "library": "huggingface",
                    "checkpoint": str(folder),
                    "tokenizer": {"model": str(root / "teacher")},
                    "model": {"seq_length": 48},
                },
                "data": {"train": [str(root / "train.jsonl")]},
                "training": {"train_iters": 1},
                "parallel": {"tensor_model_parallel_size": 1},
            }
        )
    )
    config = config_from_arguments(argparse.Namespace(config=str(path)))
    assert config.teacher is not None
    assert config.teacher.model.hidden_size == 32
    assert config.teacher.model.num_layers == 2
    assert config.teacher.model.vocab_size == 97

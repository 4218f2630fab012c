"""A student learns the same from a model in transformers as from it in megatron-core."""

import os

import pytest

from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.training.inputs import read_inputs
from tests.huggingface.tiny_models import save_model
from tests.process_group import run_ranks
from tests.teachers.tiny_causal_lms import save_causal_lm
from tests.training.cached_teacher_runs import (
    LibraryRun,
    library_values,
    read_values,
    train_libraries,
    write_texts,
)
from tests.training.run_results import assert_same_numbers
from tests.training.tiny_run import CP2, PP2, TP2

HUGGINGFACE = {"library": "huggingface"}
STATES = {"objective": "hidden_mse", "options": {"layers": [[-1, 1], [-1, -1]]}}
"""Of the teacher's first layer, which is on another stage of a pipeline than the loss, too."""
LIKE = {
    "hf-tp2": "megatron",
    "hf-cp2-offloaded": "megatron",
    "hf-cached": "megatron",
    "megatron-offloaded": "megatron",
    "hf-states": "states-pp2",
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
        LibraryRun("megatron", {}, TP2),
        LibraryRun("hf-tp2", HUGGINGFACE, TP2),
        LibraryRun("hf-cp2-offloaded", HUGGINGFACE | offload, CP2),
        LibraryRun("hf-cached", HUGGINGFACE | {"cache": str(root / "cache")}, {}),
        LibraryRun("megatron-offloaded", offload, PP2),
        LibraryRun("states-pp2", STATES, PP2),
        LibraryRun("hf-states", HUGGINGFACE | STATES, TP2),
    ]
    if ALL:
        runs += [
            LibraryRun("hf-pp2", HUGGINGFACE, PP2),
            LibraryRun("dskd", {}, TP2, "dskd"),
            LibraryRun("hf-dskd-offloaded", HUGGINGFACE | offload, TP2, "dskd"),
        ]
    found = run_ranks(2, train_libraries, root, runs, timeout_s=400)
    return found[0]


@pytest.mark.parametrize("name", LIKE)
def test_losses_are_those_of_megatron(name, metrics):
    expected, found = metrics[LIKE[name]], metrics[name]
    assert len(found) == len(expected) == 2
    assert all(row["compared"] for row in expected)
    assert_same_numbers(found, expected, ("loss", "kd"), exact=("compared",))
    if name != "hf-cached":
        bits = [its[-1]["teacher_bits_per_byte"] for its in (found, expected)]
        assert bits[0] == pytest.approx(bits[1], rel=1e-5)


def _start(root, teacher=None, training=None):
    """Check a run up to where models would be built."""
    run = LibraryRun("refused", {**HUGGINGFACE, **(teacher or {})}, {}, "projected_kl")
    values = library_values(root, run)
    values["training"] |= training or {}
    read_inputs(read_values(root / "refused.yaml", values), world_size=1)


def test_what_a_run_cannot_have_is_refused_before_a_model_is_built(root):
    _start(root)
    model, wide = {"model": {"seq_length": 65}}, {"model": {"seq_length": 48, "hidden_size": 64}}
    with pytest.raises(ConfigError, match=r"longer than the model supports.*64"):
        _start(root, model)
    with pytest.raises(ConfigError, match="order of the ids"):
        _start(root, training={"vocabulary_layout": "co_sharded"})
    with pytest.raises(CheckpointError, match="another hidden_size"):
        _start(root, wide)


def test_sizes_of_any_architecture_come_from_its_folder(root):
    folder = save_causal_lm("gpt-2", root / "gpt2")
    tokenizer = {"model": str(root / "teacher")}
    teacher = HUGGINGFACE | {"checkpoint": str(folder), "tokenizer": tokenizer}
    values = library_values(root, LibraryRun("gpt2-run", teacher, {}))
    model = read_values(root / "gpt2.yaml", values).teacher.model
    assert (model.hidden_size, model.num_layers, model.vocab_size) == (32, 2, 97)

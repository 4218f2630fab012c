"""Adapters of a run are exported for peft, merged into an export, and into a run that follows."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_ext.errors import CheckpointError
from megatron_ext.training.checkpoints.adapter_export import export_adapter
from megatron_ext.training.checkpoints.huggingface_export import export_huggingface
from megatron_ext.training.metrics import read_metrics
from tests.huggingface.run_from_folders import train_runs, write_adapter_run
from tests.huggingface.tiny_models import save_model, some_tokens, tensors_of
from tests.process_group import run_ranks

MODEL, OTHER = "gemma3", "qwen2"
"""With norms behind linear layers; and with biases of a fused layer, and norms that learn, too."""
LORA = {"rank": 3, "alpha": 6.0, "targets": ["q_proj", "v_proj", "k_proj", "o_proj", "linear_fc1"]}
TP2 = {"tensor_model_parallel_size": 2}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    for name in (MODEL, OTHER):
        save_model(name, root / name)
    norms = {"train_iters": 1, "trainable": ["norms"]}
    write_adapter_run(root, "adapted", start=MODEL, lora=LORA, **TP2)
    write_adapter_run(root, "next", start="adapted", **TP2)
    write_adapter_run(root, "mixed", start=OTHER, lora=LORA, training=norms, **TP2)
    run_ranks(2, train_runs, root, ["adapted", "next", "mixed"])
    export_adapter(root / "adapted", root / "peft")
    export_huggingface(root / "adapted", root / "merged")
    export_huggingface(root / "next", root / "after")
    return root


def test_the_merged_export_is_the_start_with_the_adapters(root):
    start, merged = tensors_of(root / MODEL), tensors_of(root / "merged")
    adapters = load_file(root / "peft" / "adapter_model.safetensors")
    stems = {key.removesuffix(".lora_A.weight") for key in adapters if ".lora_A." in key}
    assert {stem.rsplit(".", 1)[-1] for stem in stems} == {
        *(f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up"))
    }
    changed = set()
    for key, weight in start.items():
        stem = "base_model.model." + key.removesuffix(".weight")
        if stem in stems:
            a, b = (adapters[f"{stem}.lora_{side}.weight"] for side in "AB")
            assert b.abs().max() > 1e-3
            weight = weight + LORA["alpha"] / LORA["rank"] * b @ a
            changed.add(stem)
        torch.testing.assert_close(merged[key], weight, rtol=0, atol=1e-6)
    assert changed == stems


def test_a_run_that_follows_starts_from_the_merged_weights(root):
    merged, after = tensors_of(root / "merged"), tensors_of(root / "after")
    assert merged.keys() == after.keys()
    for key, weight in merged.items():
        torch.testing.assert_close(after[key], weight, rtol=0, atol=1e-6)
    adapted, following = (read_metrics(root / run) for run in ("adapted", "next"))
    assert adapted[-1]["loss"] < adapted[0]["loss"]
    assert following[-1]["student_bits_per_byte"] == pytest.approx(
        adapted[-1]["student_bits_per_byte"], rel=1e-5
    )


def test_peft_gives_the_logits_of_the_merged_model(root):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base, merged = (
        AutoModelForCausalLM.from_pretrained(root / folder) for folder in (MODEL, "merged")
    )
    settings = json.loads((root / "peft" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(root / MODEL)
    adapted = peft.PeftModel.from_pretrained(base, root / "peft")
    with torch.no_grad():
        ours, theirs = (model(some_tokens()).logits for model in (merged, adapted))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_adapters_that_are_not_everything_are_not_exported_alone(root, tmp_path):
    with pytest.raises(CheckpointError, match=r"training.trainable norms"):
        export_adapter(root / "mixed", tmp_path / "out")
    with pytest.raises(CheckpointError, match="has no adapters"):
        export_adapter(root / "next", tmp_path / "out")
    assert not (tmp_path / "out").exists()

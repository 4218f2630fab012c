"""Adapters of a run are exported for peft, merged into an export, and into a run that follows."""

import json
import os
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_ext.errors import CheckpointError
from megatron_ext.training.checkpoints.adapter_export import export_adapter
from megatron_ext.training.checkpoints.huggingface_export import export_huggingface
from megatron_ext.training.configuration.lora import LINEAR_LAYERS
from megatron_ext.training.metrics import read_metrics
from tests.huggingface.run_from_folders import train_runs, write_adapter_run
from tests.huggingface.tiny_models import COMPARED, save_model, some_tokens, tensors_of
from tests.process_group import run_ranks
from tests.training.run_results import weights_of

MODEL, OTHER = "gemma3", "qwen2"
"""With norms behind linear layers; and with biases of a fused layer, and norms that learn, too."""
LINEAR = "qwen3.5"
"""With linear attention, whose first product is four layers of HuggingFace's."""
PAIRED = "ernie4.5"
"""Whose rows of queries and keys are in another order in megatron-core."""
ADAPTED = {"adapted": MODEL, "paired": PAIRED} | ({"linear": LINEAR} if LINEAR in COMPARED else {})
"""Runs of adapters in dense layers, with the folder that they start from."""
EXPERTS = "qwen2-moe"
"""With a shared expert beside the others."""
LORA = {"rank": 3, "alpha": 6.0, "targets": ["q_proj", "v_proj", "k_proj", "o_proj", "linear_fc1"]}
OF_EXPERTS = {"rank": 2, "alpha": 6.0, "targets": [*LINEAR_LAYERS]}
TP2, EP2 = {"tensor_model_parallel_size": 2}, {"expert_model_parallel_size": 2}
ALL = bool(os.environ.get("MEGATRON_EXT_ALL_TEXT"))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    for name in {MODEL, OTHER, EXPERTS, *ADAPTED.values()}:
        save_model(name, root / name)
    norms = {"train_iters": 1, "trainable": ["norms"]}
    write_adapter_run(root, "adapted", start=MODEL, lora=LORA, **TP2)
    write_adapter_run(root, "next", start="adapted", **TP2)
    write_adapter_run(root, "mixed", start=OTHER, lora=LORA, training=norms, **TP2)
    write_adapter_run(root, "experts", start=EXPERTS, lora=OF_EXPERTS, **EP2)
    for name in ADAPTED.keys() - {"adapted"}:
        every = {"rank": 3, "alpha": 6.0}
        write_adapter_run(root, name, start=ADAPTED[name], lora=every, **TP2)
    runs = [*ADAPTED, "next", "mixed", "experts"]
    if ALL:
        write_adapter_run(root, "next-experts", start="experts", **EP2)
        write_adapter_run(root, "shared", start=EXPERTS, lora={"rank": 3}, **EP2)
        runs += ["next-experts", "shared"]
    run_ranks(2, train_runs, root, runs)
    for run in (*ADAPTED, *(["shared"] if ALL else [])):
        export_adapter(root / run, root / f"peft-{run}")
    for run in runs:
        export_huggingface(root / run, root / f"merged-{run}")
    return root


OF_LINEAR = ("out_proj", *(f"in_proj_{part}" for part in ("qkv", "z", "b", "a")))


@pytest.mark.parametrize("run", ADAPTED)
def test_the_merged_export_is_the_start_with_the_adapters(root, run):
    start, merged = tensors_of(root / ADAPTED[run]), tensors_of(root / f"merged-{run}")
    adapters = load_file(root / f"peft-{run}" / "adapter_model.safetensors")
    stems = {key.removesuffix(".lora_A.weight") for key in adapters if ".lora_A." in key}
    assert {stem.rsplit(".", 1)[-1] for stem in stems} == {
        *(f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up")),
        *(() if run == "adapted" else ("down_proj",)),
        *(OF_LINEAR if run == "linear" else ()),
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


def test_every_expert_is_exported_with_adapters_of_its_own(root):
    start, merged = tensors_of(root / EXPERTS), tensors_of(root / "merged-experts")
    stored = weights_of(root / "experts", 3)
    a, b = (stored[f"decoder.layers.mlp.experts.experts.linear_fc1.lora.{side}"] for side in "ab")
    products = OF_EXPERTS["alpha"] / OF_EXPERTS["rank"] * b @ a
    # Some experts had no token.
    assert (products.abs().amax(dim=(2, 3)) > 1e-3).sum(dim=1).min() > 1
    for layer, of_layer in enumerate(products):
        for expert, product in enumerate(of_layer):
            for name, delta in zip(("gate_proj", "up_proj"), product.chunk(2), strict=True):
                key = f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
                torch.testing.assert_close(merged[key], start[key] + delta, rtol=0, atol=1e-6)
    moved = {key for key, weight in start.items() if not torch.equal(weight, merged[key])}
    assert all(key.endswith("_proj.weight") for key in moved)
    dense = {key for key in start if key.endswith("_proj.weight") and ".experts." not in key}
    assert dense <= moved


@pytest.mark.parametrize(
    ("run", "next_run"), [("adapted", "next"), *([("experts", "next-experts")] if ALL else [])]
)
def test_a_run_that_follows_starts_from_the_merged_weights(root, run, next_run):
    merged, after = (tensors_of(root / f"merged-{name}") for name in (run, next_run))
    assert merged.keys() == after.keys()
    for key, weight in merged.items():
        torch.testing.assert_close(after[key], weight, rtol=0, atol=1e-6)
    adapted, following = (read_metrics(root / name) for name in (run, next_run))
    assert adapted[-1]["loss"] < adapted[0]["loss"]
    assert following[-1]["student_bits_per_byte"] == pytest.approx(
        adapted[-1]["student_bits_per_byte"], rel=1e-5
    )


STARTS = {"adapted": MODEL, **({"shared": EXPERTS} if ALL else {})}


@pytest.mark.parametrize("run", STARTS)
def test_peft_gives_the_logits_of_the_merged_model(root, run):
    start, exported = STARTS[run], root / f"peft-{run}"
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base, merged = (
        AutoModelForCausalLM.from_pretrained(root / folder) for folder in (start, f"merged-{run}")
    )
    settings = json.loads((exported / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(root / start)
    adapted = peft.PeftModel.from_pretrained(base, exported)
    assert {name for name, _ in adapted.named_parameters() if ".lora_" in name} == {
        re.sub(r"(lora_.)", r"\1.default", name)
        for name in load_file(exported / "adapter_model.safetensors")
    }
    with torch.no_grad():
        ours, theirs = (model(some_tokens()).logits for model in (merged, adapted))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_what_peft_cannot_have_is_not_exported_alone(root, tmp_path):
    with pytest.raises(CheckpointError, match=r"lora.targets experts.linear_fc1"):
        export_adapter(root / "experts", tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"training.trainable norms"):
        export_adapter(root / "mixed", tmp_path / "out")
    with pytest.raises(CheckpointError, match="has no adapters"):
        export_adapter(root / "next", tmp_path / "out")
    assert not (tmp_path / "out").exists()

"""Folders of models with linear attention, in the forms that are published."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megatron_ext.errors import CheckpointError
from megatron_ext.huggingface.checkpoint_files import CheckpointFiles
from megatron_ext.huggingface.model_settings import model_settings
from megatron_ext.huggingface.tensor_files import TensorReader
from megatron_ext.training.checkpoints.huggingface_export import export_huggingface
from megatron_ext.training.checkpoints.huggingface_import import import_huggingface
from megatron_ext.training.checkpoints.model_check import checked
from megatron_ext.training.configuration.config import ModelConfig
from tests.huggingface.tiny_models import COMPARED, EXPERTS, save_model, tensors_of

pytestmark = pytest.mark.skipif("qwen3.5" not in COMPARED, reason="transformers 4 has none")


def saved_anew(folder, change):
    """The folder with other tensors, in one file."""
    tensors = change(tensors_of(folder))
    for file in folder.glob("model*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors")
    return CheckpointFiles(folder)


def with_joined_experts(tensors):
    """The experts of a layer in one tensor, as Qwen3.5's are published."""
    joined = {key: tensor for key, tensor in tensors.items() if ".experts." not in key}
    layers = {key.partition(".experts.")[0] for key in tensors if ".experts." in key}
    for layer in layers:
        parts = {
            kind: [
                tensors[f"{layer}.experts.{number}.{kind}_proj.weight"]
                for number in range(EXPERTS["num_experts"])
            ]
            for kind in ("gate", "up", "down")
        }
        opened = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        joined[f"{layer}.experts.gate_up_proj"] = torch.stack(opened)
        joined[f"{layer}.experts.down_proj"] = torch.stack(parts["down"])
    return joined


def megatron_tensors(files):
    """Every tensor of megatron-core's model, by key and place."""
    model = ModelConfig(**model_settings(files), seq_length=32)
    _, tensors = checked(files, model)
    found = {}
    with TensorReader(files) as reader:
        for tensor in tensors.megatron_tensors():
            found[tensor.key, tensor.place] = torch.empty(tensor.shape)
            reader.fill(found[tensor.key, tensor.place], tensor, row=0)
    return found


def test_experts_of_a_layer_in_one_tensor_are_those_in_single_ones(tmp_path):
    folder = save_model("qwen3.5-moe", tmp_path)
    single = megatron_tensors(CheckpointFiles(folder))
    joined = megatron_tensors(saved_anew(folder, with_joined_experts))
    assert joined.keys() == single.keys()
    for key, tensor in single.items():
        assert torch.equal(joined[key], tensor), key


def test_decays_in_fp32_leave_a_folder_one_of_bf16(tmp_path):
    folder = save_model("qwen3.5", tmp_path / "before", dtype=torch.bfloat16)
    before = {
        key: tensor.float() + 1e-3 if key.endswith("A_log") else tensor
        for key, tensor in tensors_of(folder).items()
    }
    saved_anew(folder, lambda _: before)
    import_huggingface(folder, tmp_path / "checkpoint")
    export_huggingface(tmp_path / "checkpoint", tmp_path / "after")
    after = tensors_of(tmp_path / "after")
    assert after.keys() == before.keys()
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype
        assert torch.equal(after[key], tensor), key
    config = json.loads((tmp_path / "after" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    folder = save_model("qwen3.5", tmp_path)
    before = megatron_tensors(CheckpointFiles(folder))
    more = {"mtp.fc.weight": torch.ones(2), "mtp.layers.0.mlp.up_proj.weight": torch.ones(3)}
    files = saved_anew(folder, lambda tensors: tensors | more)
    with pytest.warns(UserWarning, match="mtp_num_hidden_layers layers behind the last are left"):
        after = megatron_tensors(files)
    assert after.keys() == before.keys()


def test_kinds_of_layers_without_a_pattern_are_refused(tmp_path):
    folder = save_model("qwen3.5", tmp_path)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    file.write_text(json.dumps(config | {"layer_types": kinds}))
    with pytest.raises(CheckpointError, match="layers with linear attention follow no pattern"):
        model_settings(CheckpointFiles(folder))
    del config["layer_types"]
    file.write_text(json.dumps(config | {"full_attention_interval": 3}))
    assert model_settings(CheckpointFiles(folder))["linear_attention_freq"] == 3

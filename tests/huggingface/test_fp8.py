"""Weights in FP8 with a factor for each block, as DeepSeek-V3 is published, are read in bf16."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megatron_ext.errors import CheckpointError
from megatron_ext.huggingface.checkpoint_files import CheckpointFiles
from megatron_ext.huggingface.model_settings import (
    check_tensors,
    family_of,
    model_settings,
    tensor_map,
)
from megatron_ext.huggingface.tensor_files import TensorReader
from tests.huggingface.tiny_models import save_model, tensors_of

DOWN = "model.layers.1.mlp.down_proj.weight"


def replace_weights(folder, tensors):
    """Put tensors in place of a folder's own, in one file."""
    for file in folder.glob("model*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors")


def published(folder, kind, block, factors=torch.float32):
    """A folder in FP8, with blocks that are cut at the edges; and what its weights are in bf16."""
    save_model(kind, folder, dtype=torch.bfloat16)
    tensors, expected = {}, {}
    for name, tensor in tensors_of(folder).items():
        tensors[name] = expected[name] = tensor
        if tensor.ndim < 2 or not name.endswith("_proj.weight"):
            continue
        high, wide = block or tensor.shape
        scales = torch.empty(-(-tensor.shape[0] // high), -(-tensor.shape[1] // wide))
        numbers, decoded = torch.empty_like(tensor, dtype=torch.float8_e4m3fn), tensor.clone()
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                at = (
                    slice(row * high, row * high + high),
                    slice(column * wide, column * wide + wide),
                )
                scale = (tensor[at].abs().max().float() / 448).to(factors).float()
                scales[row, column] = scale
                numbers[at] = (tensor[at].float() / scale).to(torch.float8_e4m3fn)
                decoded[at] = numbers[at].float() * scale
        tensors[name] = numbers
        tensors[f"{name}_scale_inv"] = scales.to(factors) if block else scales.squeeze()
        if not block:
            tensors[name.replace(".weight", ".activation_scale")] = torch.ones(())
        expected[name] = decoded
    replace_weights(folder, tensors)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": block}
    (folder / "config.json").write_text(json.dumps(config))
    return expected


def read_whole(files):
    """All megatron-core tensors of a folder, by key, layer and expert."""
    family, settings = family_of(files), model_settings(files)
    tensors = tensor_map(family, settings)
    check_tensors(files, tensors, family)
    found = {}
    with TensorReader(files) as reader:
        for number, tensor in enumerate(tensors.megatron_tensors()):
            blocks = [files.tensors[block.name] for block in tensor.blocks]
            rows = sum(block.rows for block in tensor.blocks)
            columns = blocks[0].shape[1:] if len(blocks[0].shape) == 2 else ()
            found[number] = torch.empty(rows, *columns)
            reader.fill(found[number], tensor, row=0)
    return found


@pytest.mark.parametrize(
    ("kind", "block", "factors"),
    [
        ("deepseek-v3", [20, 17], torch.float32),
        ("qwen3-moe", [16, 16], torch.bfloat16),
        ("llama", [5, 12], torch.float8_e8m0fnu),
        ("mistral", None, torch.float32),
    ],
)
def test_it_is_read_as_the_same_weights_in_bf16(tmp_path, kind, block, factors):
    expected = published(tmp_path / "fp8", kind, block, factors)
    save_model(kind, tmp_path / "bf16", dtype=torch.bfloat16)
    replace_weights(tmp_path / "bf16", expected)
    found, wanted = (read_whole(CheckpointFiles(tmp_path / name)) for name in ("fp8", "bf16"))
    assert len(found) > 10
    for number, tensor in wanted.items():
        assert torch.equal(found[number], tensor)


def test_any_rectangle_is_read_as_it_is_in_the_whole(tmp_path):
    whole = published(tmp_path, "llama", [5, 12])[DOWN]
    files = CheckpointFiles(tmp_path)
    tensors = tensor_map(family_of(files), model_settings(files))
    tensor = tensors.tensor("decoder.layers.mlp.linear_fc2.weight", 1)
    with TensorReader(files) as reader:
        for row, rows, column, columns in ((0, 32, 0, 48), (4, 7, 11, 14), (31, 1, 47, 1)):
            found = torch.empty(rows, columns)
            reader.fill(found, tensor, row=row, column=column)
            assert torch.equal(found, whole[row : row + rows, column : column + columns].float())


@pytest.mark.parametrize("block", [[16, 12], [128, 128], [16], "16", [0, 4], [True, 2]])
def test_factors_that_do_not_fit_are_refused(tmp_path, block):
    published(tmp_path, "llama", [5, 12])
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["weight_block_size"] = block
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="weight_block_size"):
        _ = CheckpointFiles(tmp_path).tensors


def test_a_weight_without_factors_is_refused(tmp_path):
    published(tmp_path, "llama", [5, 12])
    tensors = tensors_of(tmp_path)
    del tensors[f"{DOWN}_scale_inv"]
    replace_weights(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=rf"factors of {DOWN} do not fit it; got none"):
        _ = CheckpointFiles(tmp_path).tensors


@pytest.mark.parametrize("method", [{"quant_method": "awq"}, "awq"])
def test_another_method_is_refused(tmp_path, method):
    published(tmp_path, "llama", [5, 12])
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"quantization_config": method}))
    with pytest.raises(CheckpointError, match=r"quantised; got awq; expected .* fp8"):
        model_settings(CheckpointFiles(tmp_path))

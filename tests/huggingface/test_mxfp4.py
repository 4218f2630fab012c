"""gpt-oss in MXFP4, as it is published, is read without rounding and written in bf16."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_ext.huggingface.checkpoint_files import CheckpointFiles
from megatron_ext.huggingface.model_settings import family_of, model_settings, tensor_map
from megatron_ext.huggingface.tensor_files import TensorReader
from tests.huggingface.round_trips import round_trips
from tests.huggingface.tiny_models import save_model, tensors_of
from tests.process_group import run_ranks

SIZES = {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2}
EXPERTS = 4


def published(folder):
    """A folder with experts in MXFP4; and what transformers makes of them."""
    save_model("gpt-oss", folder, dtype=torch.bfloat16, **SIZES)
    generator = torch.Generator().manual_seed(3)
    expected, packed = {}, {}
    for layer in range(2):
        for name, rows, groups in (("gate_up", 128, 3), ("down", 96, 2)):
            shape = (EXPERTS, rows, groups)
            blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(110, 130, shape, dtype=torch.uint8, generator=generator)
            stem = f"model.layers.{layer}.mlp.experts.{name}_proj"
            packed |= {f"{stem}_blocks": blocks, f"{stem}_scales": scales}
            expected[stem] = convert_moe_packed_tensors(blocks.clone(), scales.clone())
    for file in folder.glob("*.safetensors"):
        rest = {name: tensor for name, tensor in load_file(file).items() if name not in expected}
        file.unlink()
        if rest:
            save_file(rest, file)
    save_file(packed, folder / "packed.safetensors")
    names = {n: file.name for file in folder.glob("*.safetensors") for n in load_file(file)}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (folder / "config.json").write_text(json.dumps(config))
    return expected


@pytest.mark.skipif(
    not os.environ.get("MEGATRON_EXT_ALL_TEXT"),
    reason="a run of everything: MEGATRON_EXT_ALL_TEXT=1",
)
def test_it_is_exported_in_bf16_bit_for_bit(tmp_path):
    expected = published(tmp_path / "oss")
    before = tensors_of(tmp_path / "oss")
    run_ranks(1, round_trips, {"oss": tmp_path / "oss"}, tmp_path)
    after = tensors_of(tmp_path / "exported" / "oss")
    for name, tensor in after.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, expected[name] if name in expected else before[name]), name
    assert expected.keys() <= after.keys()
    assert not [name for name in after if name.endswith(("_blocks", "_scales"))]
    config = json.loads((tmp_path / "exported" / "oss" / "config.json").read_text())
    assert "quantization_config" not in config


def test_any_rectangle_is_read_as_it_is_in_the_whole(tmp_path):
    expected = published(tmp_path)
    files = CheckpointFiles(tmp_path)
    tensors = tensor_map(family_of(files), model_settings(files))
    for part in ("linear_fc1", "linear_fc2"):
        tensor = tensors.tensor(f"decoder.layers.mlp.experts.experts.{part}.weight", 1, 2)
        whole = torch.cat([block.of(expected[block.name]) for block in tensor.blocks])
        with TensorReader(files) as reader:
            for row, rows, column, columns in ((0, None, 0, None), (5, 77, 31, 33), (63, 2, 1, 30)):
                place = slice(row, rows and row + rows), slice(column, columns and column + columns)
                found = torch.empty_like(whole[place])
                reader.fill(found, tensor, row=row, column=column)
                assert torch.equal(found, whole[place])

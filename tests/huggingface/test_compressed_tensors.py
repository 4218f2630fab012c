"""Folders of compressed-tensors and of FBGEMM are read as the products of numbers and factors."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megatron_ext.errors import CheckpointError
from megatron_ext.huggingface.checkpoint_files import CheckpointFiles
from megatron_ext.huggingface.model_settings import model_settings
from megatron_ext.huggingface.tensor_files import TensorReader
from megatron_ext.huggingface.tensor_map import Block
from tests.huggingface.test_fp8 import read_whole, replace_weights
from tests.huggingface.tiny_models import save_model, tensors_of

DOWN = "model.layers.1.mlp.down_proj.weight"
FLOAT = {"type": "float", "num_bits": 8}
INT8 = {"type": "int", "num_bits": 8}
INT4 = {"type": "int", "num_bits": 4}
GROUP = {"strategy": "group", "group_size": 8}
ASYMMETRIC = {"symmetric": False}

SCHEMES = {
    "fp8 by tensor": ("float-quantized", FLOAT | {"strategy": "tensor"}),
    "fp8 by row": ("float-quantized", FLOAT | {"strategy": "channel"}),
    "fp8 by block": (
        "float-quantized",
        FLOAT | {"strategy": "block", "block_structure": [20, 12]},
    ),
    "int8 by row": ("int-quantized", INT8 | {"strategy": "channel"}),
    "int8 by group from a zero point": ("naive-quantized", INT8 | GROUP | ASYMMETRIC),
    "int4 by group": ("pack-quantized", INT4 | GROUP | {"actorder": "weight"}),
    "int4 by group from a zero point": ("pack-quantized", INT4 | GROUP | ASYMMETRIC),
    "packed int8 by row": ("pack-quantized", INT8 | {"strategy": "channel"}),
}


def packed(numbers, bits, axis):
    """Numbers of so many bits in words of 32 bits along an axis, each counted from the least."""
    numbers = (numbers.long() + (1 << bits - 1)).movedim(axis, -1)
    count = 32 // bits
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[-1] % count))
    words = sum(numbers[..., first::count] << bits * first for first in range(count))
    return words.to(torch.int32).movedim(-1, axis).contiguous()


def quantised(shape, form, weights, factors, generator):
    """Tensors by the end of their name, and the weight that they make."""
    rows, columns = shape
    high, wide = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "group": (1, weights.get("group_size")),
        "block": weights.get("block_structure"),
    }[weights["strategy"]]
    grid = -(-rows // high), -(-columns // wide)
    half = 1 << weights["num_bits"] - 1
    scales = (torch.rand(grid, generator=generator) + 0.5).to(factors) * 0.01

    def on_weights(values):
        tall = values.repeat_interleave(high, 0)[:rows]
        return tall.repeat_interleave(wide, 1)[:, :columns].float()

    if weights["type"] == "float":
        numbers = torch.randn(shape, generator=generator).mul(60).to(torch.float8_e4m3fn)
    else:
        numbers = torch.randint(-half, half, shape, generator=generator).to(torch.int8)
    parts, zeros = {".weight_scale": scales}, torch.zeros(grid, dtype=torch.int8)
    if not weights.get("symmetric", True):
        zeros = torch.randint(-half, half, grid, generator=generator).to(torch.int8)
        parts[".weight_zero_point"] = zeros
    if form == "pack-quantized":
        parts[".weight_packed"] = packed(numbers, weights["num_bits"], axis=1)
        parts[".weight_shape"] = torch.tensor(shape)
        if ".weight_zero_point" in parts:
            parts[".weight_zero_point"] = packed(zeros, weights["num_bits"], axis=0)
    else:
        parts[".weight"] = numbers
        parts[".input_scale"] = torch.ones(1)
    weight = (numbers.float() - on_weights(zeros)) * on_weights(scales)
    return parts, weight.to(torch.float16 if factors == torch.float16 else torch.bfloat16)


def published(folder, kind, scheme, factors=torch.bfloat16):
    """A folder in a scheme; and what its weights are without it."""
    form, weights = SCHEMES[scheme]
    generator = torch.Generator().manual_seed(5)
    save_model(kind, folder, dtype=torch.bfloat16)
    tensors, expected = {}, {}
    for name, tensor in tensors_of(folder).items():
        tensors[name] = expected[name] = tensor
        if tensor.ndim == 2 and name.endswith("_proj.weight"):
            del tensors[name]
            parts, expected[name] = quantised(tensor.shape, form, weights, factors, generator)
            stem = name.removesuffix(".weight")
            tensors |= {f"{stem}{end}": part for end, part in parts.items()}
    replace_weights(folder, tensors)
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    configure(
        folder, quant_method="compressed-tensors", format=form, config_groups=groups, ignore=["x"]
    )
    return expected


def configure(folder, **values):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"quantization_config": values}))


@pytest.mark.parametrize(
    ("scheme", "kind", "factors"),
    [
        ("fp8 by tensor", "llama", torch.float32),
        ("fp8 by row", "qwen3-moe", torch.bfloat16),
        ("fp8 by block", "llama", torch.float32),
        ("int8 by row", "qwen2", torch.bfloat16),
        ("int8 by group from a zero point", "llama", torch.float16),
        ("int4 by group", "qwen3-moe", torch.bfloat16),
        ("int4 by group from a zero point", "llama", torch.bfloat16),
        ("packed int8 by row", "mistral", torch.float16),
    ],
)
def test_it_is_read_as_the_products(tmp_path, scheme, kind, factors):
    expected = published(tmp_path / "quantised", kind, scheme, factors)
    save_model(kind, tmp_path / "plain", dtype=torch.bfloat16)
    replace_weights(tmp_path / "plain", expected)
    found, wanted = (read_whole(CheckpointFiles(tmp_path / n)) for n in ("quantised", "plain"))
    assert len(found) > 10
    for number, tensor in wanted.items():
        assert torch.equal(found[number], tensor)
    files = CheckpointFiles(tmp_path / "quantised")
    assert files.tensors[next(n for n in expected if n.endswith("q_proj.weight"))].read_as == (
        "F16" if factors == torch.float16 else "BF16"
    )


@pytest.mark.parametrize("scheme", ["int4 by group from a zero point", "fp8 by block"])
def test_any_rectangle_is_read_as_it_is_in_the_whole(tmp_path, scheme):
    whole = published(tmp_path, "llama", scheme)[DOWN]
    with TensorReader(CheckpointFiles(tmp_path)) as reader:
        assert torch.equal(reader.whole(DOWN), whole)
        for row, rows, column, columns in ((3, 18, 11, 14), (31, 1, 47, 1)):
            place = slice(row, row + rows), slice(column, column + columns)
            assert torch.equal(reader.rows(Block(DOWN, 0, 32), *place), whole[place])


def test_rows_with_a_factor_each_are_read_of_fbgemm(tmp_path):
    whole = published(tmp_path, "llama", "fp8 by row")[DOWN]
    configure(tmp_path, quant_method="fbgemm_fp8", activation_scale_ub=1200.0)
    with TensorReader(CheckpointFiles(tmp_path)) as reader:
        assert torch.equal(reader.whole(DOWN), whole)


def test_tensors_with_a_factor_each_are_read_of_autofp8(tmp_path):
    whole = published(tmp_path, "llama", "fp8 by tensor")[DOWN]
    configure(tmp_path, quant_method="fp8", activation_scheme="static", ignored_layers=["lm_head"])
    with TensorReader(CheckpointFiles(tmp_path)) as reader:
        assert torch.equal(reader.whole(DOWN), whole)


def scheme_of(form="pack-quantized", others=None, **weights):
    weights = INT4 | GROUP | weights
    group = {"weights": weights}
    return {"format": form, "config_groups": {"group_0": group}, **(others or {})}


REFUSED = {
    "another format": (scheme_of("nvfp4-pack-quantized"), "got format nvfp4-pack-quantized; expe"),
    "columns in another order": (scheme_of(actorder="group"), "got actorder group; expected acto"),
    "sparse weights": (
        scheme_of(others={"sparsity_config": {"format": "sparse-24-bitmask"}}),
        "got sparsity_config sparse-24-bitmask; expected all weights",
    ),
    "turned weights": (
        scheme_of(others={"transform_config": {"config_groups": {"R1": {}}}}),
        "got transform_config; expected weights that are not transformed",
    ),
    "floats of four bits": (scheme_of(type="float"), "got type float, num_bits 4, strategy group"),
    "groups of no size": (scheme_of(group_size=None), "got type int.* group_size None; expected"),
    "groups of another size": (
        scheme_of(group_size=16),
        r"factors of model\S+ do not fit it; got BF16 \[\d+, \d\]; expected .* of int of 4 bits by "
        "1 rows x 16 columns",
    ),
    "zero points that are not there": (
        scheme_of(symmetric=False),
        "8 columns with a zero point; correct",
    ),
    "schemes as a list": ({"format": "x", "config_groups": []}, r"got config_groups \[\]; exp"),
    "no scheme": ({"format": "x"}, "got BF16 .*; expected .* of no scheme"),
}


def test_a_quantised_tensor_of_no_number_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    configure(tmp_path, quant_method="compressed-tensors", **scheme_of())
    parts = {f"{DOWN}_packed": torch.zeros(32, 0, dtype=torch.int32)}
    save_file(parts | {f"{DOWN}_scale": torch.zeros(32, 0)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"factors of {DOWN} do not fit it; got F32 \[32, 0"):
        _ = CheckpointFiles(tmp_path).tensors


@pytest.mark.parametrize("fault", REFUSED)
def test_another_scheme_is_refused(tmp_path, fault):
    published(tmp_path, "llama", "int4 by group")
    values, message = REFUSED[fault]
    configure(tmp_path, quant_method="compressed-tensors", **values)
    files = CheckpointFiles(tmp_path)
    model_settings(files)
    with pytest.raises(CheckpointError, match=message) as error:
        _ = files.tensors
    assert "\n" not in str(error.value)
    # A teacher that transformers runs is checked for its files alone.
    assert f"{DOWN}_packed" in files.stored

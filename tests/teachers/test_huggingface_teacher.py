"""A HuggingFace teacher says of packed rows what the model says of each text alone."""

import importlib
from dataclasses import replace
from importlib.util import find_spec
from typing import get_args, get_type_hints

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_ext.distributed.context_parallel import ContextRank
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import CheckpointError, ConfigError, MissingDependencyError
from megatron_ext.teachers.base import text_batches
from megatron_ext.teachers.causal_lm import load_causal_lm
from megatron_ext.teachers.huggingface_teacher import HuggingFaceTeacher
from megatron_ext.teachers.megatron_teacher import HostWeights, OffloadedTeacher
from megatron_ext.teachers.weight_precision import WeightPrecision, round_weights
from megatron_ext.training.configuration.config import TeacherConfig
from tests.process_group import run_ranks
from tests.teachers.tiny_causal_lms import (
    LOGITS,
    MODELS,
    VOCAB_SIZE,
    own_logits,
    packed_rows,
    save_causal_lm,
    some_texts,
)

WIDTH = 104
"""Columns of all ranks, padding included."""


def microbatches():
    """Three, so that one of two ranks has more of them; not all as long."""
    texts = some_texts(7, 5, 12, 9, 3, 16)
    return [
        packed_rows([texts[:2], texts[2:3]], 16),
        packed_rows([texts[3:5], texts[5:]], 16),
        packed_rows([texts[4:5], texts[1:2]], 8),
    ]


def share_rows(rank, folders):
    """For each model and microbatch this rank's columns of whole rows, and its part of rows."""
    group = dist.group.WORLD
    assert group is not None
    width = WIDTH // 2
    half = VocabShard(
        start=rank * width, stop=(rank + 1) * width, vocab_size=VOCAB_SIZE, group=group
    )
    whole = VocabShard(start=0, stop=WIDTH, vocab_size=VOCAB_SIZE)
    context = ContextRank.of(group)
    assert context is not None
    found = []
    for folder in folders:
        model = load_causal_lm(folder, dtype=torch.float32, device=torch.device("cpu"))
        tensor_parallel = HuggingFaceTeacher(model, shard=half, group=group)
        context_parallel = HuggingFaceTeacher(model, shard=whole, group=group, context=context)
        cut = [
            batch._replace(
                tokens=context.cut(batch.tokens), position_ids=context.cut(batch.position_ids)
            )
            for batch in microbatches()
        ]
        both = zip(
            tensor_parallel.targets(microbatches()), context_parallel.targets(cut), strict=True
        )
        found.append([(one.to_logits(), other.to_logits()) for one, other in both])
    return found


SHARD = VocabShard(start=0, stop=WIDTH, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: save_causal_lm(name, root / name) for name in MODELS}


def _load(folder, dtype=torch.float32, precision=None):
    cpu = torch.device("cpu")
    return load_causal_lm(folder, dtype=dtype, device=cpu, weight_precision=precision)


def _assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_have_the_logits_of_their_texts_alone(folders, name):
    texts = some_texts(7, 12, 3, 15, 15, 22)
    batches = [packed_rows([texts[:3], texts[3:4]], 23), packed_rows([texts[4:5], texts[5:]], 23)]
    teacher = HuggingFaceTeacher(_load(folders[name]), shard=SHARD)
    found = teacher.targets(batches)
    logits = torch.cat([targets.to_logits() for targets in found])
    assert {targets.kind for targets in found} == {"logits" if name in LOGITS else "hidden"}
    assert logits.shape == (4, 23, WIDTH)
    expected = own_logits(folders[name], texts)
    rows = [torch.cat(expected[:3]), expected[3], expected[4], expected[5]]
    for row, of_row in zip(logits, rows, strict=True):
        _assert_close(row[: len(of_row), :VOCAB_SIZE], of_row)
        assert not row[len(of_row) :].any()
        assert not row[:, VOCAB_SIZE:].any()


def test_texts_of_like_length_run_together_within_the_size_of_the_microbatch():
    texts = some_texts(2, 9, 2, 9, 2, 2)
    batch = packed_rows([texts[:2], texts[2:4], texts[4:]], 12)
    found = [(*own.places.shape, own.lengths.tolist()) for own in text_batches(batch.rows)]
    assert found == [(4, 9, [9, 9, 2, 2]), (2, 2, [2, 2])]
    places = torch.cat(
        [torch.from_numpy(own.places[own.places >= 0]) for own in text_batches(batch.rows)]
    )
    labelled = (batch.rows.labels.flatten() >= 0).nonzero().flatten()
    assert torch.equal(places.unique(), labelled)
    # Of rows without labels nobody knows what is padding.
    unlabelled = replace(batch.rows, labels=None)
    assert sum(own.lengths.sum() for own in text_batches(unlabelled)) == batch.tokens.numel()


def test_short_floats_keep_what_kind_of_head_it_is(folders):
    for name in ("llama", "gemma 2", "phi", "granite"):
        model, exact = _load(folders[name], torch.bfloat16), _load(folders[name])
        assert model.kind == exact.kind
        assert model.scale == pytest.approx(exact.scale, rel=1e-3)
        (targets,) = HuggingFaceTeacher(model, shard=SHARD).targets(microbatches()[:1])
        assert targets.to_logits().dtype == torch.bfloat16


ROUNDING = {"int8": (1 / 250, 0.0), "fp8": (0.0, 2**-4), "int4": (1 / 15, 0.0)}
"""Largest error of a weight, as a share of the row's largest weight and as one of its own: half a
step of 1/127, and half a step of three bits of mantissa; of int4 half a step of 2/15, the most that
a group's weights are apart."""


@pytest.mark.parametrize("precision", ROUNDING)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma 2", "phi"])
def test_rounded_weights_are_those_of_linear_layers_and_close(folders, name, precision):
    pytest.importorskip("torchao")
    model, exact = _load(folders[name], precision=precision), _load(folders[name])
    assert model.kind == exact.kind
    layers = {n: m for n, m in exact.module.named_modules() if isinstance(m, torch.nn.Linear)}
    head = {"lm_head"} & layers.keys()
    of_row, of_weight = ROUNDING[precision]
    for layer_name, layer in layers.items():
        rounded = model.module.get_submodule(layer_name).weight
        if layer_name in head:
            assert torch.equal(rounded, layer.weight)
            continue
        assert type(rounded).__name__ != "Parameter"
        used = rounded.dequantize()
        bound = of_row * layer.weight.abs().amax(-1, keepdim=True) + of_weight * layer.weight.abs()
        assert ((used - layer.weight).abs() <= bound + 1e-7).all()
        assert not torch.equal(used, layer.weight)
        layer.weight.data.copy_(used)
    # The same numbers as of plain layers with the weights as they are after rounding.
    found, expected = (
        HuggingFaceTeacher(each, shard=SHARD).targets(microbatches()) for each in (model, exact)
    )
    for one, other in zip(found, expected, strict=True):
        _assert_close(one.to_logits(), other.to_logits())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int4_keeps_half_a_byte_of_a_weight_and_rounds_each_group_of_columns(dtype):
    """Against the definition, in fp64: 16 levels from the least to the largest of 32 columns, or
    from 0 where that is beyond them."""
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    layer = torch.nn.Linear(96, 5).to(dtype)
    with torch.no_grad():
        layer.weight[1, :32] = 0
        layer.weight[2, 32:64].abs_()
    exact, model = layer.weight.detach().double(), torch.nn.Sequential(layer)
    model.get_output_embeddings = lambda: None
    round_weights(model, "int4")
    stored = {name: tensor for name, tensor in layer.state_dict().items() if "weight" in name}
    kept = sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
    assert kept == 5 * (96 // 2 + 3 * (dtype.itemsize + 1))
    groups = exact.view(5, 3, 32)
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True)
    step = (high.clamp(min=0) - low) / 15
    zero = (-low / step).round()
    expected = ((groups / step).round() + zero).clamp(0, 15).sub(zero) * step
    expected = expected.nan_to_num().flatten(1)
    assert layer.weight.dtype == dtype
    difference = (layer.weight.double() - expected).abs().view(5, 3, 32)
    if dtype == torch.float32:
        assert (difference <= 1e-5 * step).all()
    else:
        # A step of bf16 has eight bits, so that what is between two levels may go to either.
        assert (difference <= 1.1 * step).all()
        assert (difference > 0.2 * step).float().mean() < 0.1
    assert not layer.weight[1, :32].any()


def test_int4_refuses_rows_that_have_no_whole_bytes():
    pytest.importorskip("torchao")
    model = torch.nn.Sequential(torch.nn.Linear(7, 2))
    model.get_output_embeddings = lambda: None
    with pytest.raises(CheckpointError, match=r"0\.weight.*7 columns.*int8 or fp8"):
        round_weights(model, "int4")


def test_a_configuration_has_the_precisions_that_there_are():
    (accepted,) = (
        get_args(each)
        for each in get_args(get_type_hints(TeacherConfig)["weight_precision"])
        if each is not type(None)
    )
    assert accepted == get_args(WeightPrecision)


@pytest.mark.skipif(find_spec("torchao") is not None, reason="torchao is installed")
def test_rounding_without_torchao_names_what_to_install(folders):
    with pytest.raises(MissingDependencyError, match=r"torchao.*megatron-ext\[torchao\]"):
        _load(folders["llama"], precision="int8")


def test_a_head_that_is_scaled_stays_a_product(folders):
    assert _load(folders["granite"]).scale == pytest.approx(1 / 3, rel=1e-6)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma 2", "phi"])
def test_ids_that_a_model_has_no_rows_of_are_zero(folders, name):
    """Gemma 3 1B comes with a tokenizer of one more id."""
    shard = VocabShard(start=0, stop=WIDTH, vocab_size=VOCAB_SIZE + 2)
    texts = some_texts(9, 5)
    unknown = torch.tensor([3, VOCAB_SIZE + 1, 5])
    model = load_causal_lm(
        folders[name], dtype=torch.float32, device=torch.device("cpu"), vocab_size=VOCAB_SIZE + 2
    )
    assert model.kind == ("logits" if name in LOGITS else "hidden")
    (targets,) = HuggingFaceTeacher(model, shard=shard).targets(
        [packed_rows([[*texts, unknown]], 17)]
    )
    (logits,) = targets.to_logits()
    _assert_close(logits[:14, :VOCAB_SIZE], torch.cat(own_logits(folders[name], texts)))
    assert not logits[:, VOCAB_SIZE:].any()
    assert logits[14:, :VOCAB_SIZE].isfinite().all()


def test_ranks_that_share_rows_have_their_part_of_what_one_alone_has(folders):
    names = ["llama", "gemma 2"]
    ranks = run_ranks(2, share_rows, [folders[name] for name in names])
    for name, *of_ranks in zip(names, *ranks, strict=True):
        alone = HuggingFaceTeacher(_load(folders[name]), shard=SHARD).targets(microbatches())
        for i, targets in enumerate(alone):
            whole = targets.to_logits()
            columns = torch.cat([own[i][0] for own in of_ranks], dim=-1)
            _assert_close(columns, whole)
            for rank, own in enumerate(of_ranks):
                expected = ContextRank(rank=rank, size=2).cut(whole)
                _assert_close(own[i][1], expected)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma 2"])
def test_an_offloaded_teacher_predicts_the_same_and_has_no_weights_between(folders, name):
    expected = HuggingFaceTeacher(_load(folders[name]), shard=SHARD).targets(microbatches())
    teacher = HuggingFaceTeacher(_load(folders[name]), shard=SHARD, keeps_head=True)
    sizes = sum(parameter.nbytes for parameter in teacher.module.parameters())
    weights = HostWeights([teacher.module])
    offloaded = OffloadedTeacher(teacher, weights)
    assert weights.bytes == sizes
    for _ in range(2):
        assert not any(parameter.numel() for parameter in teacher.module.parameters())
        found = offloaded.targets(microbatches())
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.to_logits(), other.to_logits())


def test_kept_weights_stay():
    linear, other = torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)
    before = linear.bias.detach().clone()
    # Tied: a weight of two modules is one.
    tied = torch.nn.Linear(3, 2)
    tied.weight = linear.weight
    weights = HostWeights([linear, other, tied], kept=[linear.bias])
    assert torch.equal(linear.bias, before)
    assert weights.bytes == 4 * (3 * 2 + 2 * 2 + 2 + 2)
    with pytest.raises(RuntimeError):
        linear(torch.ones(3))
    with weights.on_device():
        assert linear.weight.shape == (2, 3)
        assert tied.weight is linear.weight
        linear(torch.ones(3))


def test_folders_that_cannot_be_loaded_say_so_in_one_line(folders, tmp_path, monkeypatch):
    pickled = save_causal_lm("llama", tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="no weights in safetensors"):
        _load(pickled)
    partial = save_causal_lm("qwen2", tmp_path / "partial")
    tensors = load_file(partial / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        _load(partial)
    config = partial / "config.json"
    config.write_text(config.read_text().replace('"qwen2"', '"never heard of"'))
    with pytest.raises(CheckpointError, match="transformers cannot load") as raised:
        _load(partial)
    assert "\n" not in str(raised.value)
    import transformers

    monkeypatch.setattr(transformers, "__version__", "4.55.4")
    with pytest.raises(ConfigError, match=r"got version 4\.55\.4; .*pip install"):
        _load(folders["llama"])

    def import_module(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(ConfigError, match="pip install"):
        _load(folders["llama"])

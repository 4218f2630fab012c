"""Models are made of the layers that a machine has, and a launch says what it runs on."""

import pytest
import torch
from megatron.core.transformer.transformer_block import HAVE_TE, TransformerBlockSubmodules

from megatron_ext.errors import ConfigError
from megatron_ext.training.configuration.config import ModelConfig, ParallelConfig
from megatron_ext.training.megatron_models import cpu_megatron
from megatron_ext.training.megatron_models.cpu_megatron import (
    announce_device,
    in_precision_of_device,
)
from megatron_ext.training.megatron_models.layer_specs import layer_spec
from megatron_ext.training.megatron_models.norms import TorchNorm
from tests.training.tiny_run import changed, student_run


@pytest.mark.skipif(HAVE_TE, reason="Transformer Engine is installed, so its layers are used")
def test_a_gpu_without_transformer_engine_gets_torch_layers_and_a_torch_norm(monkeypatch):
    monkeypatch.setattr(cpu_megatron, "is_installed", lambda: False)
    model = ModelConfig(num_layers=4, hidden_size=8, num_attention_heads=2)
    parallel = ParallelConfig(pipeline_model_parallel_size=2)
    spec = layer_spec(model, parallel, stage=0, has_adapters=False)
    assert isinstance(spec, TransformerBlockSubmodules)
    assert len(spec.layer_specs) == 2
    assert spec.layer_norm is TorchNorm


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"NVIDIA H{index}00")


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


@pytest.mark.usefixtures("gpu")
def test_a_gpu_is_named_with_the_ranks_by_the_first(monkeypatch, capsys):
    for name, value in {"RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    announce_device(require_gpu=True)
    assert capsys.readouterr().out == "device: cuda:1 NVIDIA H100, 8 ranks\n"
    monkeypatch.setenv("RANK", "1")
    announce_device(require_gpu=True)
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("gpu")
def test_a_gpu_takes_bf16_unless_a_precision_is_given(tmp_path):
    training = student_run(tmp_path, "run").training
    assert in_precision_of_device(training, is_given=True) is training
    assert in_precision_of_device(training, is_given=False) == changed(training, precision="bf16")


@pytest.mark.usefixtures("cpu")
def test_a_cpu_keeps_fp32(tmp_path):
    training = student_run(tmp_path, "run").training
    assert in_precision_of_device(training, is_given=False).precision == "fp32"


@pytest.mark.usefixtures("cpu")
def test_a_cpu_comes_with_its_reason(monkeypatch, capsys):
    announce_device(require_gpu=False)
    assert capsys.readouterr().out == "device: cpu (no CUDA device is visible), 1 rank\n"
    monkeypatch.setattr(torch.version, "cuda", None)
    announce_device(require_gpu=False)
    assert "is built without CUDA), 1 rank" in capsys.readouterr().out


@pytest.mark.usefixtures("cpu")
def test_a_cpu_is_refused_where_a_gpu_is_required_by_every_rank(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ConfigError, match="got no CUDA device is visible; start where"):
        announce_device(require_gpu=True)

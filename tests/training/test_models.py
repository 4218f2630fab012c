import pytest
import torch
from megatron.core.transformer.transformer_block import HAVE_TE, TransformerBlockSubmodules

from megatron_ext.training import cpu_megatron, models
from megatron_ext.training.config import ModelConfig, ParallelConfig
from megatron_ext.training.layers import TorchNorm
from tests.process_group import run_ranks
from tests.training.rank_functions import first_layer


def test_the_stages_of_a_pipeline_draw_different_weights(tmp_path):
    first, second = run_ranks(2, first_layer, tmp_path)
    assert first.shape == second.shape
    assert not torch.isclose(first, second).any(dim=1).all()
    # Of the same distribution all the same.
    torch.testing.assert_close(first.std(), second.std(), rtol=0.1, atol=0)


@pytest.mark.skipif(HAVE_TE, reason="Transformer Engine is installed, so its layers are used")
def test_a_gpu_without_transformer_engine_gets_torch_layers_and_a_torch_norm(monkeypatch):
    monkeypatch.setattr(cpu_megatron, "is_installed", lambda: False)
    model = ModelConfig(num_layers=4, hidden_size=8, num_attention_heads=2)
    spec = models._layer_spec(model, ParallelConfig(pipeline_model_parallel_size=2))
    assert isinstance(spec, TransformerBlockSubmodules)
    assert len(spec.layer_specs) == 2
    assert spec.layer_norm is TorchNorm

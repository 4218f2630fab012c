"""A HuggingFace checkpoint computes in megatron-core what it computes in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.huggingface.model_ranks import logits_of
from tests.huggingface.tiny_models import MODELS, save_model, some_tokens
from tests.process_group import run_ranks

LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2vp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hf")
    return {name: save_model(name, root / name) for name in MODELS}


@pytest.fixture(scope="module")
def logits(folders: dict[str, Path]) -> dict[tuple[str, str], torch.Tensor]:
    found = {}
    for world_size, layouts in ((1, {"alone": {}}), (2, LAYOUTS)):
        for of_rank in run_ranks(world_size, logits_of, folders, layouts):
            found |= of_rank
    return found


@pytest.mark.parametrize("layout", ["alone", *LAYOUTS])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(
    folders: dict[str, Path],
    logits: dict[tuple[str, str], torch.Tensor],
    name: str,
    layout: str,
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
    with torch.no_grad():
        expected = model(some_tokens()).logits
    assert expected.std() > 0.5, "logits that say nothing agree with anything"
    # fp32 sums in another order, through four layers.
    torch.testing.assert_close(
        logits[name, layout], expected, rtol=0, atol=2e-5 * float(expected.abs().max())
    )

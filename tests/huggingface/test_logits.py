"""A HuggingFace checkpoint computes in megatron-core what it computes in transformers."""

import copy
import os
from functools import cache
from math import prod

import pytest
import torch
import transformers
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_ext.huggingface.checkpoint_files import CheckpointFiles
from megatron_ext.huggingface.rotary import rotary_settings
from tests.huggingface.model_ranks import RankLogits, gradients_of, logits_of
from tests.huggingface.tiny_models import COMPARED as MODELS
from tests.huggingface.tiny_models import (
    LLAMA3_ROPE,
    in_words_of_release,
    save_model,
    some_tokens,
    weights_of_logits,
)
from tests.process_group import run_ranks

Ranks = dict[tuple[str, str], list[RankLogits]]
"""By model and layout."""

LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2vp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
}

OF_EXPERTS = tuple(
    name for name, (_, options) in MODELS.items() if any("experts" in option for option in options)
)
OF_LAYER_NUMBERS = (
    "gemma2",
    "gemma3",
    "olmo3",
    "gpt-oss",
    "exaone4",
    "smollm3-yarn",
    "deepseek-v2",
    "deepseek-v3",
    "qwen3.5",
    "llama",
)
"""Models of layers that differ by their number, which two chunks a stage count otherwise, and one
of equal layers."""

NAMES = {layout: tuple(MODELS) for layout in ("alone", *LAYOUTS)} | {"ep2": OF_EXPERTS}
if not os.environ.get("MEGATRON_EXT_ALL_TEXT"):
    NAMES["pp2vp2"] = tuple(name for name in OF_LAYER_NUMBERS if name in MODELS)
"""Models under each layout: without experts, ``ep2`` is two replicas of the model alone."""
CASES = [(name, layout) for layout, names in NAMES.items() for name in names]

OF_OWN_LAYERS = (
    "gemma2",
    "gemma3",
    "phi3",
    "phi4-mini",
    "olmo3",
    "smollm3-yarn",
    "granite",
    "gpt-neox",
    "gpt-oss",
    *(name for name in ("qwen3.5", "qwen3.5-moe", "qwen3-next") if name in MODELS),
)
"""Models that megatron-core builds with layers, norms or hooks of ours."""


NOT_BEFORE_5 = {
    "gpt-oss": "clamps experts at 7, whatever swiglu_limit says",
    "deepseek-v3": "takes experts outside the chosen groups where all scores inside are negative",
}
"""What transformers 4 computes otherwise than 5."""

IS_BEFORE_5 = int(transformers.__version__.partition(".")[0]) < 5


def by_transformers(name, folder):
    """A model of ``MODELS`` as transformers builds it."""
    if IS_BEFORE_5 and name in NOT_BEFORE_5:
        pytest.skip(f"transformers {transformers.__version__} {NOT_BEFORE_5[name]}")
    # Its fused attention leaves Gemma 2's cap of scores out before 5.
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    return {name: save_model(name, root / name) for name in MODELS}


@pytest.fixture(scope="module")
def ranks(folders):
    found = {}
    for world_size, layouts in ((1, {"alone": {}}), (2, LAYOUTS)):
        asked = {layout: (sizes, NAMES[layout]) for layout, sizes in layouts.items()}
        of_ranks = run_ranks(world_size, logits_of, folders, asked)
        found |= {key: [of_rank[key] for of_rank in of_ranks] for key in of_ranks[0]}
    return found


@pytest.fixture(scope="module")
def logits_by_transformers(folders):
    @cache
    def logits(name):
        model = by_transformers(name, folders[name])
        with torch.no_grad():
            return model(some_tokens()).logits

    return logits


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_logits_are_those_of_transformers(logits_by_transformers, ranks, name, layout):
    expected = logits_by_transformers(name)
    assert expected.std() > 0.5, "logits that say nothing agree with anything"
    found = [rank.logits for rank in ranks[name, layout] if rank.logits is not None]
    # Of two pipeline stages one has the head; two replicas share experts.
    assert len(found) == (2 if layout in ("tp2", "ep2") else 1)
    for logits in found:
        # fp32 sums in another order, through four layers.
        torch.testing.assert_close(
            logits, expected, rtol=0, atol=2e-5 * float(expected.abs().max())
        )


def test_gradients_under_tensor_parallelism_are_those_of_transformers(folders):
    comparable = [name for name in OF_OWN_LAYERS if not (IS_BEFORE_5 and name in NOT_BEFORE_5)]
    asked = {name: folders[name] for name in comparable}
    layout = LAYOUTS["tp2"] | {"sequence_parallel": True}
    found, _ = run_ranks(2, gradients_of, asked, layout)
    for name, folder in asked.items():
        model = by_transformers(name, folder)
        (model(some_tokens()).logits * weights_of_logits()).sum().backward()
        expected = {name: weight.grad for name, weight in model.named_parameters()}
        if "gpt_neox.embed_in.weight" in expected and "lm_head.weight" in expected:
            # transformers 5 calls it so in memory alone.
            expected["embed_out.weight"] = expected.pop("lm_head.weight")
        expected = dict(_of_single_experts(expected, found[name]))
        # Of no gradient.
        biases = {key for key in found[name] if key.endswith("e_score_correction_bias")}
        assert found[name].keys() - biases == expected.keys()
        for key in expected:
            gradient = found[name][key]
            # fp32 sums in another order, through the layers and back.
            atol = 1e-4 * float(expected[key].abs().max())
            torch.testing.assert_close(gradient, expected[key], rtol=0, atol=atol)


def _of_single_experts(gradients, names):
    """Gradients of experts, which transformers joins in memory, by the names in files."""
    for key, gradient in gradients.items():
        stem, _, part = key.partition(".experts.")
        if not part or key in names:
            yield key, gradient
            continue
        for expert, own in enumerate(gradient):
            halves = {"down_proj": [own], "gate_up_proj": own.chunk(2)}[part]
            for kind, half in zip(part.removesuffix("_proj").split("_"), halves, strict=True):
                yield f"{stem}.experts.{expert}.{kind}_proj.weight", half


@pytest.mark.parametrize("name", MODELS)
def test_a_rank_reads_what_it_has_and_no_more(folders, ranks, name):
    tensors = CheckpointFiles(folders[name]).tensors
    sizes = {name: prod(tensor.shape) for name, tensor in tensors.items()}
    vocabulary = next(size for name, size in sizes.items() if "embed_" in name)
    norms = sum(size for name, size in sizes.items() if _is_of_every_rank(name))
    assert [rank.elements_read for rank in ranks[name, "alone"]] == [sum(sizes.values())]
    # Norms, routers, biases of whole outputs, narrow products and the padding of an odd vocabulary
    # are all that two ranks do not halve.
    tp2 = [rank.elements_read for rank in ranks[name, "tp2"]]
    assert sum(tp2) == sum(sizes.values()) + norms
    assert max(tp2) - min(tp2) < vocabulary / 10
    experts = sum(size for key, size in sizes.items() if ".experts." in key)
    assert (experts > 0) == (name in OF_EXPERTS)
    if experts:
        assert sum(r.elements_read for r in ranks[name, "ep2"]) == 2 * sum(sizes.values()) - experts
    pp2 = sum(rank.elements_read for rank in ranks[name, "pp2"])
    # A tied head is on the last stage too.
    is_tied = not {"lm_head.weight", "embed_out.weight"} & sizes.keys()
    assert pp2 == sum(sizes.values()) + vocabulary * is_tied


def _is_of_every_rank(name):
    routers = (
        "mlp.gate.weight",
        "moe.gate.weight",
        "shared_expert_gate.weight",
        "mlp.router.weight",
    )
    narrow = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight", "e_score_correction_bias")
    biases = (
        "attention.dense.bias",
        "dense_4h_to_h.bias",
        "o_proj.bias",
        "router.bias",
        "down_proj_bias",
    )
    return "norm" in name or name.endswith((*routers, *narrow, *biases))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_scaled_rotary_embeddings_are_those_of_transformers(factor):
    scaling = {**LLAMA3_ROPE, "factor": factor}
    rope = in_words_of_release({"rope_parameters": scaling})
    config = LlamaConfig(head_dim=64, max_position_embeddings=131072, **rope)
    expected = LlamaRotaryEmbedding(config).inv_freq
    settings = rotary_settings({"rope_parameters": scaling}, where="here")
    rotary = RotaryEmbedding(
        64,
        1.0,
        rotary_base=settings["rotary_base"],
        rope_scaling=settings["use_rope_scaling"],
        rope_scaling_factor=settings["rope_scaling_factor"],
        use_cpu_initialization=True,
    )
    torch.testing.assert_close(rotary.inv_freq, expected, rtol=1e-6, atol=0)


PARTLY = {"low_freq_factor": 1.0, "high_freq_factor": 2.5, "factor": 16.0}
LONG = {"short_factor": [1.0, 1.5] * 4, "long_factor": [2.0] * 8}
LENGTH = "original_max_position_embeddings"
OF_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", LENGTH)
SCALINGS = {
    "llama3": {"rope_type": "llama3", **{name: LLAMA3_ROPE[name] for name in OF_LLAMA3}},
    "llama3 with other factors": {"rope_type": "llama3", **PARTLY, LENGTH: 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, LENGTH: 64},
    "yarn of the longest sequence": {"rope_type": "yarn", "factor": 4.0},
    "longrope with a factor": {"rope_type": "longrope", "factor": 3.0, **LONG, LENGTH: 64},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}


@pytest.mark.skipif(IS_BEFORE_5, reason="releases before 5 take lengths from other keys")
@pytest.mark.parametrize("first_length", [None, 32])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_and_magnitudes_are_those_of_transformers(scaling, first_length):
    values = {"head_dim": 16, "max_position_embeddings": 256, "rope_scaling": SCALINGS[scaling]}
    if first_length is not None:
        values[LENGTH] = first_length
    # rope_scaling takes the place of these, the base included.
    values |= {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    found = rotary_settings(copy.deepcopy(values), where="here")
    expected = LlamaRotaryEmbedding(LlamaConfig(**values))
    if found["use_rope_scaling"]:
        # megatron-core's own, which the test above compares.
        assert first_length is None
        return
    powers = found["rotary_base"] ** (-torch.arange(8, dtype=torch.float64) / 8)
    frequencies = powers / torch.tensor(found["rotary_divisors"] or [1.0] * 8)
    torch.testing.assert_close(frequencies.float(), expected.inv_freq, rtol=1e-6, atol=0)
    assert found["rotary_magnitude"] == pytest.approx(expected.attention_scaling)
    assert found["rotary_longest"] == {
        "dynamic": 256,
        "longrope with a factor": first_length or 64,
    }.get(scaling)

"""Of a checkpoint that reads images, the text model is read, trained and written."""

import json
import os

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from megatron_ext.errors import CheckpointError
from megatron_ext.huggingface.checkpoint_files import CheckpointFiles
from megatron_ext.huggingface.model_settings import family_of, model_settings
from megatron_ext.huggingface.text_part import text_config
from megatron_ext.teachers.causal_lm import load_causal_lm
from tests.huggingface.model_ranks import logits_of
from tests.huggingface.round_trips import round_trips
from tests.huggingface.tiny_models import LINEAR, SIZES, save_tokenizer, some_tokens, tensors_of
from tests.process_group import run_ranks

MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e6}}
SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {"intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
EVERY_MODEL = {
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 8}, SIGLIP),
    "qwen2-vl": (
        "Qwen2VL",
        MROPE,
        {"embed_dim": 16, "hidden_size": 32, "depth": 1, "num_heads": 2},
    ),
    "qwen2.5-vl": ("Qwen2_5_VL", MROPE, {"hidden_size": 16, **QWEN_VISION}),
    "qwen3-vl": (
        "Qwen3VL",
        {"head_dim": 8, **MROPE},
        {"hidden_size": 16, **QWEN_VISION, "deepstack_visual_indexes": [0]},
    ),
    "qwen3.5": ("Qwen3_5", LINEAR, {"hidden_size": 16, **QWEN_VISION}),
    "mistral3": (
        "Mistral3",
        {"model_type": "mistral", "sliding_window": None, "head_dim": 8},
        {"model_type": "pixtral", **SIGLIP},
    ),
    "llava": ("Llava", {"model_type": "llama"}, {"model_type": "clip_vision_model", **SIGLIP}),
}
"""transformers' name, and what the configurations of text and images differ in."""

MODELS = {
    name: model
    for name, model in EVERY_MODEL.items()
    if name in ("gemma3", "qwen2.5-vl", "qwen3-vl", "qwen3.5")
    or os.environ.get("MEGATRON_EXT_ALL_TEXT")
}


def save_whole(name, folder):
    """A tiny model of text and images, with random weights."""
    kind, text, vision = MODELS[name]
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"this transformers has no {kind}")
    torch.manual_seed(len(name))
    config = getattr(transformers, f"{kind}Config")(
        text_config={**SIZES, **text}, vision_config=vision
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    model.save_pretrained(folder, max_shard_size="60KB")
    save_tokenizer(folder)
    with torch.no_grad():
        return model.eval()(input_ids=some_tokens()).logits


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("wholes")


@pytest.fixture(scope="module")
def expected(root):
    return {name: save_whole(name, root / name) for name in MODELS}


@pytest.fixture(scope="module")
def found(root, expected):
    folders = {name: root / name for name in expected}
    run_ranks(1, round_trips, folders, root)
    layouts = {"tp2": ({"tensor_model_parallel_size": 2}, [*folders])}
    return run_ranks(2, logits_of, folders, layouts)


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_text_are_those_of_the_whole_model(name, expected, found):
    logits = expected[name]
    assert logits.std() > 0.5
    for rank in found:
        atol = 2e-5 * float(logits.abs().max())
        torch.testing.assert_close(rank[name, "tp2"].logits, logits, rtol=0, atol=atol)


@pytest.mark.parametrize("name", MODELS)
def test_the_text_model_is_exported_bit_for_bit_and_loads(name, root, expected, found):
    exported = root / "exported" / name
    before, after = tensors_of(root / name), tensors_of(exported)
    files = CheckpointFiles(root / name)
    stored = files.tensors
    assert after.keys() == stored.keys()
    assert files.weight_files == {tensor.file for tensor in stored.values()}
    for key, tensor in after.items():
        assert torch.equal(tensor, before[stored[key].name])
    model = AutoModelForCausalLM.from_pretrained(exported)
    with torch.no_grad():
        logits = model(some_tokens()).logits
    atol = 1e-5 * float(logits.abs().max())
    torch.testing.assert_close(logits, expected[name], rtol=0, atol=atol)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_runs_the_whole_model_as_a_teacher(name, root, expected):
    teacher = load_causal_lm(root / name, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        output = teacher(some_tokens(), None)
    assert teacher.kind == "hidden"
    atol = 1e-5 * float(expected[name].abs().max())
    torch.testing.assert_close(output @ teacher.head.T, expected[name], rtol=0, atol=atol)


def test_published_configurations_of_early_releases_are_read(tmp_path):
    early = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
        "sliding_window": 32,
        "use_sliding_window": False,
        "max_window_layers": 4,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vision_config": {"depth": 1},
        "vision_start_token_id": 3,
        "image_token_id": 4,
        "vocab_size": 301,
    }
    (tmp_path / "config.json").write_text(json.dumps(early))
    files = CheckpointFiles(tmp_path)
    assert family_of(files).architecture == "Qwen2ForCausalLM"
    settings = model_settings(files)
    assert (settings["rotary_base"], settings["window_size"]) == (1_000_000, None)
    assert not settings["untie_embeddings_and_output_weights"]
    assert "image_token_id" not in files.config
    assert files.config["torch_dtype"] == "bfloat16"
    assert text_config(early, ["lm_head.weight"])["tie_word_embeddings"] is False


def test_sizes_that_gemma_3_leaves_out_are_those_of_transformers(tmp_path):
    # As google/gemma-3-4b-it has it.
    published = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152},
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    settings = model_settings(CheckpointFiles(tmp_path))
    whole = transformers.Gemma3Config(
        **{k: v for k, v in published.items() if k != "architectures"}
    )
    expected = whole.get_text_config()
    assert settings["vocab_size"] == expected.vocab_size == 262_208
    assert settings["num_attention_heads"] == expected.num_attention_heads
    assert settings["num_query_groups"] == expected.num_key_value_heads
    assert settings["kv_channels"] == expected.head_dim
    assert settings["window_size"] == expected.sliding_window
    assert settings["full_attention_interval"] == 6
    assert (settings["rotary_base"], settings["local_rotary_base"]) == (1_000_000, 10_000)
    assert settings["rotary_seq_len_interpolation_factor"] == 8
    published["quantization_config"] = {"quant_method": "bitsandbytes"}
    (tmp_path / "config.json").write_text(json.dumps(published))
    with pytest.raises(CheckpointError, match="weights are quantised; got bitsandbytes; expected"):
        model_settings(CheckpointFiles(tmp_path))

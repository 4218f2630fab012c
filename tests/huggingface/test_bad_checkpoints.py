"""A folder that is not what its configuration says is refused in one line with the file."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.huggingface.checkpoint_files import (
    CheckpointFiles,
    copy_side_files,
    is_checkpoint_folder,
)
from megatron_ext.huggingface.families import FAMILIES
from megatron_ext.huggingface.model_settings import model_config, model_settings, settings_of
from megatron_ext.huggingface.rotary import LLAMA3, rotary_settings
from megatron_ext.huggingface.tensor_files import TensorPlan, shards, write_checkpoint
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.training.checkpoints.folder import find_checkpoint
from megatron_ext.training.checkpoints.huggingface_export import export_huggingface, family_config
from megatron_ext.training.checkpoints.model_check import checked, full_settings
from megatron_ext.training.checkpoints.tokenizer import KeptTokenizer
from megatron_ext.training.configuration.config import ModelConfig
from megatron_ext.training.configuration.yaml_file import with_huggingface_models
from tests.huggingface.tiny_models import COMPARED, MODELS, VOCAB_SIZE, hf_config, save_model
from tests.training.tiny_run import write_rank_list


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_model("llama", tmp_path_factory.mktemp("bad") / "llama")


@pytest.fixture
def folder(llama, tmp_path):
    return Path(shutil.copytree(llama, tmp_path / "llama"))


def _model(folder, **others):
    return ModelConfig(**{**model_settings(CheckpointFiles(folder)), "seq_length": 32, **others})


def _edit(file, **values):
    def edit(folder):
        path = folder / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return edit


def _change_tensors(change):
    def edit(folder):
        index = folder / "model.safetensors.index.json"
        file = folder / json.loads(index.read_text())["weight_map"]["model.norm.weight"]
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)
        names = {name: path.name for path in folder.glob("*.safetensors") for name in _names(path)}
        index.write_text(json.dumps({"weight_map": names}))

    return edit


def _names(file):
    return list(load_file(file))


def _cut(folder):
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-10])


def _only_pickles(folder):
    for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"whatever")


FAULTS = {
    "an architecture that is not known": (
        _edit("config.json", architectures=["FalconForCausalLM"]),
        r"config.json: this architecture is not read; got FalconForCausalLM; expected one of Llama",
    ),
    "state-space models": (
        _edit("config.json", architectures=["FalconH1ForCausalLM"]),
        r"config.json: this architecture is not read: layers of state-space.*library: huggingface",
    ),
    "a text model of no family": (
        _edit(
            "config.json",
            architectures=["Mistral3ForConditionalGeneration"],
            text_config={"model_type": "lfm2"},
        ),
        r"config.json: this architecture is not read: its text model, of type lfm2, is of no",
    ),
    "dense layers among those of experts": (
        _edit(
            "config.json", architectures=["Qwen3MoeForCausalLM"], num_experts=4, mlp_only_layers=[0]
        ),
        r"config.json: megatron-core has no Qwen3Moe\w+ with such a mlp_only_layers; got \[0\]",
    ),
    "biases": (
        _edit("config.json", attention_bias=True),
        r"config.json: megatron-core has no LlamaForCausalLM with such a attention_bias; got True",
    ),
    "windows without a pattern": (
        _edit(
            "config.json",
            architectures=["Qwen2ForCausalLM"],
            use_sliding_window=True,
            max_window_layers=2,
        ),
        r"config.json: layers with a window follow no pattern; got full_attention, full_att",
    ),
    "windows in layers that depend on the release of transformers": (
        _edit(
            "config.json",
            architectures=["Qwen2MoeForCausalLM"],
            use_sliding_window=True,
            sliding_window=8,
        ),
        r"config.json: layers with a window follow no pattern; got no layer_types; expected full",
    ),
    "a pattern of windows in letters": (
        _edit(
            "config.json",
            architectures=["Exaone4ForCausalLM"],
            sliding_window=8,
            sliding_window_pattern="LLLG",
        ),
        r"config.json: layers with a window follow no pattern; got no layer_types; expected full",
    ),
    "a single expert of sigmoid scores": (
        _edit(
            "config.json",
            architectures=["MiniMaxM2ForCausalLM"],
            num_local_experts=4,
            num_experts_per_tok=1,
        ),
        r"by its score, a MiniMaxM2\w+ by 1; got num_experts_per_tok 1; expected 2 or more; as a",
    ),
    "attention to later tokens": (
        _edit("config.json", is_causal=False),
        r"config.json: megatron-core has no LlamaForCausalLM with such a is_causal; got False",
    ),
    "quantised weights": (
        _edit("config.json", quantization_config={"quant_method": "gptq"}),
        r"the weights are quantised; got gptq",
    ),
    "another scaling of rotary embeddings": (
        _edit("config.json", rope_parameters={"rope_type": "proportional", "rope_theta": 1e4}),
        r"scaled in a way that megatron-core has not; got .*proportional",
    ),
    "rotary embeddings of a form that is unknown": (
        _edit("config.json", rope_parameters={"rope_type": ["yarn"], "rope_theta": 1e4}),
        r"config.json: the rotary embeddings are malformed; got .*rope_parameters .*\['yarn'\]",
    ),
    "a missing key": (
        _edit("config.json", intermediate_size=None),
        r"config.json: a key is missing; expected intermediate_size",
    ),
    "a configuration of another model": (
        _edit("config.json", intermediate_size=56),
        r"safetensors: the tensor model.layers.0.mlp.gate_proj.weight has another shape .*"
        r"got \[48, 32\]; expected \[56, 32\]",
    ),
    "a missing tensor": (
        _change_tensors(lambda tensors: tensors.pop("model.norm.weight")),
        r"has not all tensors of its configuration; got no model.norm.weight",
    ),
    "a tensor too much": (
        _change_tensors(lambda tensors: tensors.update(extra=torch.ones(3))),
        r"safetensors: the checkpoint has tensors that do not belong to a Llama.*; got extra",
    ),
    "a file cut short": (_cut, r"-00002-.*: the file is not as long as its header says"),
    "a missing file": (
        lambda folder: sorted(folder.glob("*.safetensors"))[0].unlink(),
        r"-00001-.*: cannot read a file of the checkpoint; got No such file",
    ),
    "files outside of the folder": (
        _edit("model.safetensors.index.json", weight_map={"a": "../other.safetensors"}),
        r"index.json: the index does not say which file has which tensor",
    ),
    "pickles": (_only_pickles, r"no weights in safetensors files; got pytorch_model.bin, a pickle"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_refused(folder, fault):
    spoil, message = FAULTS[fault]
    checked(CheckpointFiles(folder), _model(folder))
    spoil(folder)
    with pytest.raises(CheckpointError, match=message) as error:
        checked(CheckpointFiles(folder), _model(folder))
    assert "\n" not in str(error.value)


def test_a_model_that_is_configured_otherwise_is_refused(folder):
    with pytest.raises(CheckpointError, match="with another num_attention_heads; got 2; expected"):
        checked(CheckpointFiles(folder), _model(folder, num_attention_heads=2))


def test_a_repeated_tied_head_and_old_buffers_do_not_matter(folder):
    _edit("config.json", tie_word_embeddings=True)(folder)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    _change_tensors(lambda tensors: tensors.update(buffer))(folder)
    _, tensors = checked(CheckpointFiles(folder), _model(folder))
    assert "lm_head.weight" not in tensors.shapes()


def test_a_window_that_sequences_reach_is_the_one_that_the_folder_says(folder):
    _edit("config.json", architectures=["MistralForCausalLM"], sliding_window=16)(folder)
    for length, window, is_refused in (
        (32, 16, False),
        (32, 8, True),
        (32, None, True),
        (16, None, False),
    ):
        model = _model(folder, seq_length=length, window_size=window)
        assert model.has_window == (window is not None)
        with (
            pytest.raises(CheckpointError, match="another window_size")
            if is_refused
            else nullcontext()
        ):
            checked(CheckpointFiles(folder), model)


WINDOWS = {
    "none": ({"use_sliding_window": False}, None, None),
    "in the last layers, of which there are none": ({"max_window_layers": 4}, None, None),
    "in every layer": ({"max_window_layers": 0}, 16, 5),
    "in all but every third": (
        {"layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"]},
        16,
        3,
    ),
}


@pytest.mark.parametrize("kinds", WINDOWS)
def test_layers_have_the_windows_that_the_folder_says(folder, kinds):
    changes, window, interval = WINDOWS[kinds]
    qwen = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 16}
    _edit("config.json", **{**qwen, **changes})(folder)
    settings = model_settings(CheckpointFiles(folder))
    assert (settings["window_size"], settings["full_attention_interval"]) == (window, interval)


@pytest.mark.parametrize(
    ("kinds", "interval"), [(None, None), (["sliding_attention"] * 3 + ["full_attention"], 4)]
)
def test_layers_of_mistral_are_of_two_kinds_where_the_folder_says_so(folder, kinds, interval):
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": 16}
    _edit("config.json", **mistral, **({"layer_types": kinds} if kinds else {}))(folder)
    settings = model_settings(CheckpointFiles(folder))
    assert (settings["window_size"], settings["full_attention_interval"]) == (16, interval)


OF_OTHERS = {
    "sliding_window": 8,
    "use_sliding_window": True,
    "query_pre_attn_scalar": 2,
    "attn_logit_softcapping": 1.0,
    "final_logit_softcapping": 1.0,
    "rope_local_base_freq": 100.0,
    "no_rope_layers": [0, 1, 1, 1],
    "norm_topk_prob": False,
    "attention_multiplier": 2.0,
    "residual_multiplier": 3.0,
    "logits_scaling": 4.0,
    "embedding_multiplier": 3.0,
    "swiglu_limit": 0.1,
    "layer_norm_eps": 0.5,
}
"""Keys that change what models of some families compute."""


@pytest.mark.parametrize("name", COMPARED)
def test_keys_of_other_families_change_nothing(name):
    kind, _ = COMPARED[name]
    family, config = FAMILIES[f"{kind}ForCausalLM"], hf_config(name).to_dict()
    expected = settings_of(family, config, where="here")
    assert settings_of(family, {**OF_OTHERS, **config}, where="here") == expected


@pytest.mark.parametrize("name", COMPARED)
def test_a_base_that_is_left_out_is_that_of_transformers(name):
    family = FAMILIES[f"{COMPARED[name][0]}ForCausalLM"]
    config = AutoConfig.for_model(family.model_type).to_dict()
    said = {"rope_parameters", "rope_theta", "rope_scaling", "rope_local_base_freq"}
    silent = {key: value for key, value in config.items() if key not in said}
    found, expected = (
        rotary_settings({**family.defaults, **keys}, where="here") for keys in (silent, config)
    )
    for base in ("rotary_base", "local_rotary_base"):
        assert found[base] == expected[base]


def test_a_model_of_latent_attention_from_nowhere_is_written_with_its_heads(tmp_path):
    folder = save_model("deepseek-v3", tmp_path)
    _edit("config.json", rope_parameters={"rope_type": "default", "rope_theta": 1e4})(folder)
    config = model_config(full_settings(_model(folder)), max_position_embeddings=64)
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert config["num_key_value_heads"] == 4


@pytest.mark.parametrize("name", [*MODELS, *sorted({*COMPARED} & {"qwen3.5", "qwen3-next"})])
def test_settings_make_a_configuration_that_gives_them_again(name, tmp_path):
    folder = save_model(name, tmp_path)
    settings = full_settings(_model(folder))
    config = model_config(settings, max_position_embeddings=64)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert full_settings(_model(tmp_path)) == settings


def test_a_model_with_sinks_that_is_not_stretched_says_so(tmp_path):
    folder = save_model("gpt-oss", tmp_path)
    plain = {"rotary_divisors": None, "rotary_magnitude": 1.0}
    settings = full_settings(_model(folder)) | plain
    config = model_config(settings, max_position_embeddings=64)
    assert config["architectures"] == ["GptOssForCausalLM"]
    # Where nothing is said, transformers stretches it.
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert full_settings(_model(tmp_path)) == settings
    del config["rope_parameters"], config["rope_scaling"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert _model(tmp_path).rotary_divisors is not None


def test_a_written_olmo3_has_one_base_in_both_kinds_of_layers(tmp_path):
    folder = save_model("olmo3", tmp_path)
    plain = {"rotary_divisors": None, "rotary_magnitude": 1.0}
    settings = full_settings(_model(folder)) | plain
    config = model_config(settings, max_position_embeddings=64)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert full_settings(_model(tmp_path)) == settings
    bases = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert [of_kind["rope_theta"] for of_kind in bases.values()] == [1e5, 1e5]


def test_layers_that_predict_further_tokens_are_left_out_and_said_so(tmp_path):
    folder = save_model("deepseek-v3", tmp_path / "whole")
    _edit("config.json", num_nextn_predict_layers=1)(folder)
    checked(CheckpointFiles(folder), _model(folder))
    more = {
        "model.layers.4.eh_proj.weight": torch.ones(3),
        "model.layers.4.enorm.weight": torch.ones(2),
    }
    _change_tensors(lambda tensors: tensors.update(more))(folder)
    with pytest.warns(UserWarning, match="num_nextn_predict_layers layers behind the last are"):
        _, tensors = checked(CheckpointFiles(folder), _model(folder))
    assert not more.keys() & tensors.shapes().keys()
    kept = tmp_path / "checkpoint" / "huggingface"
    shutil.copytree(folder, kept)
    config, _ = family_config(kept.parent, _model(folder), full_settings(_model(folder)))
    assert config["num_nextn_predict_layers"] == 0


def test_experts_that_are_chosen_otherwise_are_refused(tmp_path):
    folder = save_model("deepseek-v3", tmp_path)
    _edit("config.json", num_experts_per_tok=6)(folder)
    with pytest.raises(CheckpointError, match=r"groups of experts.*per_tok 6, topk_group 2; expe"):
        _model(folder)
    _edit("config.json", n_group=1, topk_group=1)(folder)
    assert _model(folder).moe_router_num_groups is None


def test_a_model_that_no_architecture_is_has_no_configuration(folder):
    settings = full_settings(_model(folder)) | {"add_qkv_bias": True, "qk_layernorm": True}
    with pytest.raises(CheckpointError, match=r"add_qkv_bias.*qk_layernorm"):
        model_config(settings, max_position_embeddings=64)


def test_sequences_beyond_the_short_factors_of_longrope_are_refused(tmp_path):
    folder = save_model("phi4-mini", tmp_path)
    assert _model(folder).rotary_magnitude == pytest.approx((1 + 1 / 5) ** 0.5)
    with pytest.raises(
        ConfigError, match=r"long factors of LongRoPE.*seq_length 33, rotary_longest 3"
    ):
        _model(folder, seq_length=33)
    # Divisors of longer sequences are not kept, without which none can be written.
    with pytest.raises(CheckpointError, match="no architecture"):
        model_config(full_settings(_model(folder)), max_position_embeddings=64)


def test_keys_of_both_releases_of_transformers_say_the_same(folder):
    newer = model_settings(CheckpointFiles(folder))
    scaling = {"type": "llama3", "factor": 32.0, **LLAMA3}
    _edit("config.json", rope_parameters=None, rope_theta=500000.0, rope_scaling=scaling)(folder)
    assert model_settings(CheckpointFiles(folder)) == newer
    assert newer["use_rope_scaling"]
    assert newer["rope_scaling_factor"] == 32.0


def test_a_configuration_takes_model_and_tokenizer_from_folders(folder):
    section = {"checkpoint": str(folder), "model": {"seq_length": 17}}
    for teachers in ({"a": section}, [{"name": "a", **section}]):
        values = {"teachers": teachers, "student": {"hf": str(folder), "num_layers": 2}}
        filled = with_huggingface_models(values)
        teacher = filled["teachers"][0 if isinstance(teachers, list) else "a"]
        assert teacher["model"]["hidden_size"] == 32
        assert teacher["model"]["seq_length"] == 17
        assert teacher["tokenizer"]["model"] == str(folder)
        assert filled["student"]["num_layers"] == 2
        assert filled["student"]["vocab_size"] == VOCAB_SIZE
    assert "hidden_size" not in section["model"]


def test_a_checkpoint_of_ours_without_a_model_asks_for_its_keys(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "iter_0000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "metadata.json").write_text("{}")
    (checkpoint.parent / "latest").write_text(checkpoint.name)
    file = checkpoint / "huggingface" / "config.json"
    fix = r"export-hf writes of it, or give teacher\.model and teacher\.tokenizer"
    with pytest.raises(CheckpointError, match=rf"teacher\.checkpoint: .*got no {file}; .*{fix}"):
        with_huggingface_models({"teacher": {"checkpoint": str(tmp_path)}})
    values = {"teacher": {"checkpoint": str(tmp_path), "model": {"num_layers": 2}}}
    assert with_huggingface_models(values)["teacher"] == values["teacher"]


def test_every_file_but_weights_is_kept_whatever_its_name(folder: Path, tmp_path: Path) -> None:
    kept = {"qwen.tiktoken", "tokenization_qwen.py", "spiece.model", "preprocessor_config.json"}
    left = {"pytorch_model.bin", "model.safetensors.index.json", "README.md", ".gitattributes"}
    for name in kept | left:
        (folder / name).write_text("x")
    template = Path("additional_chat_templates", "rag.jinja")
    (folder / template.parent).mkdir()
    (folder / template).write_text("x")
    copy_side_files(folder, tmp_path / "copy")
    assert (tmp_path / "copy" / template).read_text() == "x"
    names = {path.name for path in (tmp_path / "copy").iterdir()}
    assert kept | {"config.json", "tokenizer.json"} <= names
    assert not names & left
    assert not [name for name in names if name.endswith(".safetensors")]


def test_a_tokenizer_of_bytes_is_not_given_the_file_of_the_folder(folder: Path) -> None:
    values = {"initial_checkpoint": str(folder), "tokenizer": {"library": "byte-level"}}
    assert with_huggingface_models(values)["tokenizer"] == {"library": "byte-level"}


def test_a_folder_without_an_architecture_is_no_checkpoint(folder, tmp_path):
    assert is_checkpoint_folder(folder)
    assert find_checkpoint(str(folder), where="here") == folder
    (tmp_path / "config.json").write_text("{}")
    assert not is_checkpoint_folder(tmp_path)


def test_a_folder_that_is_exported_already_is_told_what_it_is(folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"llama: this is a HuggingFace folder; .* as it is"):
        export_huggingface(folder, tmp_path / "again")


def test_files_are_cut_by_size_and_appear_together(tmp_path):
    plans = [
        TensorPlan(name=name, shape=(size,), dtype=torch.float32)
        for name, size in {"a": 10, "b": 10, "c": 40, "d": 1}.items()
    ]
    files = shards(plans, max_shard_bytes=80)
    assert [[plan.name for plan in file] for file in files] == [["a", "b"], ["c"], ["d"]]

    def read(plans):
        if plans[0].name == "d":
            raise OSError(28, "No space left on device")
        return {plan.name: torch.ones(plan.shape) for plan in plans}

    with pytest.raises(CheckpointError, match="out: cannot write the folder; got No space left"):
        write_checkpoint(
            tmp_path / "out", config={}, files=files, read=read, write_others=lambda folder: None
        )
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    with pytest.raises(CheckpointError, match="something is there already"):
        write_checkpoint(
            tmp_path / "out", config={}, files=[], read=read, write_others=lambda folder: None
        )


def test_files_of_a_library_that_the_folder_does_not_name_are_of_its_tokenizer(
    folder: Path, tmp_path: Path
) -> None:
    ranks, kept = write_rank_list(tmp_path), tmp_path / "checkpoint" / "huggingface"
    tokenizer = build_tokenizer(TokenizerConfig(library="tiktoken", model=str(ranks)))
    tokenizer.save_pretrained(tmp_path / "checkpoint" / "tokenizer")
    kept.mkdir()
    for name, file in (("config.json", folder / "config.json"), (ranks.name, ranks)):
        shutil.copyfile(file, kept / name)
    (kept / "tokenizer_config.json").write_text("{}")
    assert KeptTokenizer(tmp_path / "checkpoint").is_of_huggingface
    (kept / ranks.name).write_text("[]")
    assert not KeptTokenizer(tmp_path / "checkpoint").is_of_huggingface

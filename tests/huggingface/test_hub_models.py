"""Models by their names on the hub: the cache, a server that stands in for it, and what is left."""

import json
import re

import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.cli.main import main
from megatron_ext.errors import CheckpointError
from megatron_ext.huggingface import hub
from megatron_ext.training.checkpoints.folder import find_checkpoint
from megatron_ext.training.configuration.yaml_file import with_huggingface_models
from tests.cli.run_files import refusal
from tests.huggingface.tiny_models import save_model
from tests.tokenizers.test_hub import COMMIT, cached, served

constants = pytest.importorskip("huggingface_hub.constants")

CONFIG = json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
WHOLE = {
    "config.json": CONFIG,
    "model.safetensors.index.json": INDEX,
    "model-1.safetensors": "first",
    "model-2.safetensors": "second",
    "tokenizer.json": "{}",
}
TEMPLATE = {"additional_chat_templates/rag.jinja": "{{ 1 }}"}
NOT_WANTED = {
    "pytorch_model.bin": "pickle",
    "modeling_other.py": "code",
    "consolidated.safetensors": "the same again",
    "original/model.safetensors": "and again",
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A cache of the test's own, and a working folder without models."""
    hub._local_folder.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def snapshot(home, name):
    return home / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT


@pytest.fixture
def online(monkeypatch):
    """A hub with a whole model and with one of pickles; what was asked of it."""
    repositories = {
        "org/whole": {**WHOLE, **TEMPLATE, **NOT_WANTED},
        "org/pickles": {"config.json": CONFIG, "pytorch_model.bin": "pickle"},
    }
    with served(repositories) as (address, handler):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr("huggingface_hub.hf_api.ENDPOINT", address, raising=False)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", address, raising=False)
        yield handler


def test_a_cached_model_is_found_without_a_request_by_its_name(home):
    cached(home, "org/whole", WHOLE)
    folder = snapshot(home, "org/whole")
    for name in ("org/whole", f"org/whole@{COMMIT}", "org/whole@main"):
        assert find_checkpoint(name, where="x") == folder
    # A path stays a path, also one that is misspelled.
    (home / "work" / "org").mkdir()
    with pytest.raises(CheckpointError, match="org/whole, which does not exist; expected"):
        find_checkpoint("org/whole", where="x")
    for path in ("./org/whole", "a/b/c", str(home / "none"), "whole", "org/../x"):
        assert hub.hub_model(path, where="x") is None


def cached_model(home):
    """The folder of a model ``org/real`` in the cache."""
    save_model("llama", home / "made")
    files = {path.name: path for path in (home / "made").iterdir()}
    cached(home, "org/real", {"config.json": files.pop("config.json").read_text()})
    folder = snapshot(home, "org/real")
    for name, path in files.items():
        (folder / name).write_bytes(path.read_bytes())
    return folder


def test_a_run_takes_the_model_of_a_name_and_records_its_folder(home):
    folder = cached_model(home)
    values = {"initial_checkpoint": "org/real", "teacher": {"checkpoint": "org/real@main"}}
    filled = with_huggingface_models(values)
    assert filled["initial_checkpoint"] == filled["teacher"]["checkpoint"] == str(folder)
    assert filled["student"]["num_layers"] == filled["teacher"]["model"]["num_layers"]
    filled = with_huggingface_models({"student": {"hf": "org/real", "seq_length": 8}})
    assert filled["student"]["hf"] == str(folder)
    assert values["initial_checkpoint"] == "org/real"


def test_a_transfer_takes_model_and_tokenizer_of_a_name(home):
    folder = cached_model(home)
    (home / "words.txt").write_text("weather\n")
    words = ["--tokens", str(home / "words.txt"), "--output", str(home / "longer")]
    main(["transfer", "extend", "org/real", *words])
    main(["transfer", "init", str(folder), "--tokenizer", "org/real", "--output", str(home / "as")])
    ids = [json.loads((home / name / "transfer.json").read_text()) for name in ("longer", "as")]
    assert [report["new_ids"] - report["old_ids"] for report in ids] == [1, 0]


def test_what_is_missing_is_fetched_and_nothing_that_could_run(home, online):
    # A cache with the configuration alone, as another tool leaves it.
    cached(home, "org/whole", {"config.json": CONFIG})
    folder = find_checkpoint("org/whole", where="x")
    assert folder == snapshot(home, "org/whole")
    fetched = (path for path in folder.rglob("*") if path.is_file())
    assert {path.relative_to(folder).as_posix() for path in fetched} == {*WHOLE, *TEMPLATE}
    asked = " ".join(online.asked)
    assert not any(name in asked for name in NOT_WANTED)
    online.asked.clear()
    hub._local_folder.cache_clear()
    assert find_checkpoint("org/whole", where="x") == folder
    assert online.asked == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/pickles", "no weights in safetensors files; got org/pickles with pytorch_model.bin"),
        ("org/none", r"no checkpoint found; got org/none, which does not exist here; the hub: 404"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_clear_error(online, name, message):
    with pytest.raises(CheckpointError, match=f"^teacher.checkpoint: .*{re.escape(message)}"):
        find_checkpoint(name, where="teacher.checkpoint")
    assert not [path for path in online.asked if path.endswith(".bin")]


def test_without_the_hubs_library_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(hub, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"org/none, which does not exist here; .*ggingface]"):
        find_checkpoint("org/none", where="x")


@pytest.mark.parametrize("verb", [("import-hf", "org/none@v1", "out"), ("generate",)])
def test_a_verb_out_of_reach_of_the_hub_says_what_to_download(capsys, home, verb):
    words = verb if len(verb) > 1 else (*verb, "--model", "org/none@v1", "--prompt", "a")
    try:
        said = refusal(capsys, *words)
    finally:
        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
    assert said.count("\n") == 1
    assert said.endswith("hf download org/none --revision v1\n")

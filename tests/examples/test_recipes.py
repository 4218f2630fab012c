"""Every recipe is a run: its keys are known, its models fit its layout and its machine."""

import argparse
import re
import shlex
from math import prod
from pathlib import Path

import pytest

from megatron_ext.errors import CheckpointError
from megatron_ext.huggingface.checkpoint_files import CheckpointFiles
from megatron_ext.huggingface.families import FAMILIES
from megatron_ext.huggingface.model_settings import model_settings
from megatron_ext.huggingface.tensor_map import TensorMap
from megatron_ext.training.configuration.arguments import (
    add_config_arguments,
    config_from_arguments,
)
from tests.examples.published_models import BILLIONS, CONFIGS, write_config

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "megatron_ext" / "cli" / "recipes").glob("*.yaml"))
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("recipes")
    for name in CONFIGS:
        write_config(root / "models" / name, name)
    return root


@pytest.fixture(params=RECIPES, ids=lambda file: file.stem)
def recipe(request, models, monkeypatch):
    monkeypatch.chdir(models)
    return config_from_arguments(argparse.Namespace(config=str(request.param)))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_without_its_models_names_the_first(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"initial_checkpoint: no checkpoint .* got models/"):
        config_from_arguments(argparse.Namespace(config=str(file)))


def test_a_recipe_divides_over_its_processes(recipe, request):
    first_lines = next(f for f in RECIPES if f.stem in request.node.name).read_text()[:200]
    processes = 8 if "8 GPUs" in first_lines else 1
    parallel, training = recipe.parallel, recipe.training
    model_parallel = (
        parallel.tensor_model_parallel_size
        * parallel.pipeline_model_parallel_size
        * parallel.context_parallel_size
    )
    assert processes % model_parallel == 0
    replicas = processes // model_parallel
    assert training.global_batch_size % (training.micro_batch_size * replicas) == 0
    assert training.precision == "bf16"
    assert recipe.distils


def test_models_and_tokenizers_are_those_of_the_folders(recipe):
    assert recipe.tokenizer.model == recipe.initial_checkpoint
    sides = [(recipe.initial_checkpoint, recipe.student)]
    for teacher in recipe.named_teachers.values():
        assert teacher.tokenizer.model == teacher.checkpoint
        sides.append((teacher.checkpoint, teacher.model))
    for folder, model in sides:
        assert model.hidden_size == CONFIGS[Path(str(folder)).name]["hidden_size"]


@pytest.mark.parametrize("name", BILLIONS)
def test_the_shapes_have_as_many_parameters_as_is_published(models, name):
    files = CheckpointFiles(models / "models" / name)
    settings = model_settings(files)
    (architecture,) = files.config["architectures"]
    shapes = TensorMap(FAMILIES[architecture].rules, settings).shapes()
    if not settings["untie_embeddings_and_output_weights"]:
        del shapes["lm_head.weight"]
    assert sum(map(prod, shapes.values())) / 1e9 == pytest.approx(BILLIONS[name], abs=0.006)


def test_the_page_has_every_recipe_and_names_no_other():
    named = set(re.findall(r"(\w+\.yaml)\b", PAGE))
    assert named == {file.name for file in RECIPES}


def test_the_command_of_the_readme_is_a_run(models, tmp_path, monkeypatch):
    for owner in ("meta-llama", "Qwen"):
        # Where there is a folder of the owner, names on the hub are paths.
        (tmp_path / owner).symlink_to(models / "models")
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    command = re.search(r"-m megatron_ext distill (.*?[^\\])\n", readme, re.DOTALL)[1]
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    config = config_from_arguments(parser.parse_args(shlex.split(command.replace("\\\n", " "))))
    assert config.tokenizer.model == config.initial_checkpoint == "meta-llama/Llama-3.2-1B"
    assert config.named_teachers["teacher"].checkpoint == "Qwen/Qwen3-4B"
    config.parallel.layout.replicas(8)

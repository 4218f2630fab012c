"""Completion in shells, and the schema of configurations for editors."""

import json
import re
import shutil
import subprocess
from importlib.resources import files

import pytest
import yaml

from megatron_ext.cli.completion import commands
from megatron_ext.cli.main import VERBS, main
from megatron_ext.cli.schema import configuration_schema
from megatron_ext.training.configuration.arguments import config_flags

ASK = {
    "bash": """source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _megatron_ext
               printf '%s\\n' "${COMPREPLY[@]}" """,
    # What zsh offers is what the script hands to these three.
    "zsh": """compdef() { }; _files() { }; compadd() { shift; print -l -- "$@" }
              _describe() { local -a list; list=("${(@P)argv[-1]}"); print -l -- "${list[@]%%:*}" }
              source "$0"; words=("$@"); CURRENT=$#; _megatron_ext""",
    "fish": """source "$argv[1]"; complete -C (string join -- ' ' $argv[2..-1])""",
}
TYPED = {
    "di": {"distill"},
    "distill --precision ''": {"bf16", "fp32"},
    "distill --config run.yaml --teacher-cac": {"--teacher-cache"},
    "distill --no-allow-other": {"--no-allow-other-tokenizer"},
    "projection buil": {"build", "build-projection-matrix"},
    "projection build --student-mo": {"--student-model"},
    "ls ''": {"objectives", "formats", "tasks", "families", "recipes"},
    "help doc": {"doctor"},
}


@pytest.fixture
def printed(capsys):
    def printed(*words):
        main(list(words))
        return capsys.readouterr().out

    return printed


@pytest.mark.parametrize("shell", ASK)
def test_a_shell_completes_verbs_actions_flags_and_choices(printed, tmp_path, shell):
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(printed("completion", shell))
    for typed, expected in TYPED.items():
        words = ["megatron-ext", *(word.strip("'") for word in typed.split())]
        before = ["-c", ASK[shell], str(script)]
        asked = subprocess.run(
            [program, *before, *words], capture_output=True, text=True, check=True, timeout=60
        )
        assert asked.stderr == ""
        offered = {line.split("\t")[0] for line in asked.stdout.splitlines()}
        # zsh filters what it is offered by itself.
        begun = {word for word in offered if word.startswith(words[-1])}
        assert begun == expected, typed


def test_every_verb_and_flag_can_be_completed():
    listed = {command.path: command for command in commands()}
    assert set(VERBS) < set(listed)
    flags = {flag.name for flag in listed["distill"].flags}
    assert {flag.name for flag in config_flags()} < flags
    assert "learning rate" in next(f.about for f in listed["distill"].flags if f.name == "--lr")


def problems(schema, value, root, place="run"):
    """Places where a value is not what a schema describes; of the keywords that ours uses."""
    if "$ref" in schema:
        return problems(root["$defs"][schema["$ref"].split("/")[-1]], value, root, place)
    if "anyOf" in schema:
        found = [problems(one, value, root, place) for one in schema["anyOf"]]
        return [] if [] in found else max(found, key=lambda each: max(map(len, each)))
    kinds = {"object": dict, "array": list, "string": str, "number": (int, float), "integer": int}
    kinds |= {"boolean": bool, "null": type(None)}
    if "enum" in schema:
        return [] if value in schema["enum"] else [place]
    names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    if not any(isinstance(value, kinds[name]) for name in names):
        return [place]
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return [place]
    inner = []
    if isinstance(value, dict):
        own, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        for key, item in value.items():
            of_key = own.get(key, others)
            if of_key is False:
                inner.append(f"{place}.{key}")
            elif of_key is not True:
                inner += problems(of_key, item, root, f"{place}.{key}")
    if isinstance(value, list):
        inner = [p for item in value for p in problems(schema["items"], item, root, place)]
    return inner


def test_the_schema_describes_every_key_and_the_recipes(printed):
    schema = json.loads(printed("schema"))
    assert schema == configuration_schema()
    for flag in config_flags():
        of_key = schema
        for key in flag.keys:
            section = of_key["$ref"] if "$ref" in of_key else of_key["anyOf"][0]["$ref"]
            of_key = schema["$defs"][section.split("/")[-1]]["properties"][key]
        assert of_key["description"].split()[:3] == flag.help.replace("``", "`").split()[:3]
    recipes = [path for path in files("megatron_ext.cli.recipes").iterdir() if ".yaml" in str(path)]
    assert recipes
    for recipe in recipes:
        assert problems(schema, yaml.safe_load(recipe.read_text()), schema) == []


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("optimizer: {lr: 1e-4}", None),
        ("optimizer: {lr: fast}", "run.optimizer.lr"),
        ("teachers: [{name: big, checkpoint: a}]", None),
        ("teachers: {big: {checkpoint: a}}", None),
        ("teachers: {big: {chekpoint: a}}", "run.teachers.big.chekpoint"),
        ("training: {precision: fp8}", "run.training.precision"),
        ("training: {train_iters: many}", "run.training.train_iters"),
        ("data: {train: one.jsonl}", None),
    ],
)
def test_the_schema_tells_right_values_from_wrong_ones(text, place):
    schema = configuration_schema()
    found = problems(schema, yaml.safe_load(text), schema)
    assert found == ([] if place is None else [place])

"""What a newcomer calls first: help, lists, recipes, the doctor, and the start of a run."""

import argparse
import logging
import os
import re
from importlib.metadata import version

import pytest
import yaml

from megatron_ext.cli.demo import VOCABULARY_SIZE, _write_configs, _write_tokenizers
from megatron_ext.cli.ls import LISTS
from megatron_ext.cli.main import VERBS, main, verb_parser
from megatron_ext.conversation import PROMPT_FORMAT_REGISTRY
from megatron_ext.evaluation.tasks import TASKS
from megatron_ext.huggingface.families import FAMILIES
from megatron_ext.losses import LOSS_REGISTRY
from megatron_ext.tokenizers import build_tokenizer
from megatron_ext.training.configuration.arguments import BASIC, config_flags
from megatron_ext.training.run_folder import config_values
from megatron_ext.typed_mapping import build_config
from tests.cli.run_files import refusal
from tests.fork_server import run_python
from tests.training.tiny_run import student_run


@pytest.fixture
def printed(capsys):
    """Call a verb; what it prints and its exit code."""

    def printed(*words):
        try:
            main(list(words))
            code = 0
        except SystemExit as stopped:
            code = stopped.code
        return capsys.readouterr().out, code

    return printed


def names_in(text):
    return [line.split()[0] for line in text.splitlines()]


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("objectives", sorted(LOSS_REGISTRY)),
        ("formats", list(PROMPT_FORMAT_REGISTRY)),
        ("tasks", [*TASKS, "lm_eval:NAME"]),
    ],
)
def test_a_list_has_every_name_that_a_flag_takes(printed, what, names):
    text, code = printed("ls", what)
    assert (names_in(text), code) == (names, 0)
    assert all(len(line.split(maxsplit=1)) == 2 for line in text.splitlines()), text


def test_the_list_of_families_says_which_are_not_supported(printed):
    lines = printed("ls", "families")[0].splitlines()
    supported = [line for line in lines if "not supported: " not in line]
    assert names_in("\n".join(supported)) == list(FAMILIES)
    assert len(lines) > len(supported)


def test_the_help_of_the_objective_names_every_objective():
    (words,) = (flag.help for flag in config_flags() if flag.name == "--loss-objective")
    assert set(re.findall("``([a-z_]+)``", words)) == set(LOSS_REGISTRY)


def test_every_recipe_can_be_copied_once(printed, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, _ = printed("recipes", "ls")
    assert text == printed("ls", "recipes")[0]
    for name in names_in(text):
        assert printed("recipes", "cp", name) == (f"{name}.yaml\n", 0)
        assert "teacher" in str(yaml.safe_load((tmp_path / f"{name}.yaml").read_text()))
    copied = tmp_path / f"{name}.yaml"
    copied.write_text("edited")
    assert "the file exists" in refusal(capsys, "recipes", "cp", name)
    assert copied.read_text() == "edited"
    for begun in (name[:-1], "gemma3"):
        assert f"did you mean '{begun}" in refusal(capsys, "recipes", "cp", begun)


@pytest.mark.parametrize(
    "verb", ["distill", "cache-teacher", "train", "align", "inspect", "tokenize"]
)
def test_the_short_help_is_a_part_of_the_whole(printed, verb):
    short, code = printed(verb, "--help")
    whole, _ = printed(verb, "--help-all")
    assert code == 0
    hidden = int(re.search(r"^(\d+) more flags: .* --help-all$", short, re.MULTILINE)[1])
    # One line may have several names of a flag.
    flags = [set(re.findall(r"^  (-\S+)", text, re.MULTILINE)) for text in (short, whole)]
    assert flags[0] < flags[1]
    assert len(flags[1] - flags[0]) == hidden
    assert len(short.splitlines()) < min(190, len(whole.splitlines()))


@pytest.mark.parametrize("verb", ["train", "sft"])
def test_a_verb_without_a_teacher_lists_no_flag_that_it_refuses(printed, verb):
    whole, _ = printed(verb, "--help-all")
    flags = re.findall(r"^  (--[\w-]+)", whole, re.MULTILINE)
    refused = ("--teacher", "--projection", "--data-rollouts", "--loss-objective", "--loss-kd")
    assert "--loss-ce-weight" in flags
    assert not [flag for flag in flags if flag.startswith(refused)]


@pytest.mark.parametrize("words", [["evaluate"], ["report"], ["projection", "build"]])
def test_a_help_that_shows_all_is_that_of_help_all(printed, words):
    assert printed(*words, "--help-all") == printed(*words, "--help")
    assert "help-all" not in printed(*words, "--help")[0]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_and_action_can_be_quiet_and_be_debugged(verb):
    def leaves(parser):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                return [leaf for inner in action.choices.values() for leaf in leaves(inner)]
        return [parser]

    for leaf in leaves(verb_parser(verb)):
        assert {"-q", "--quiet", "--debug"} <= set(leaf._option_string_actions), leaf.prog


def test_quiet_leaves_out_notes_and_keeps_errors(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ["inspect", "--tokenizer-library", "byte-level", "nothing.jsonl"]
    main(words)
    told = capsys.readouterr()
    assert told.err == "note: there is no file nothing.jsonl, so it is shown as a text\n"
    main([*words, "-q"])
    assert capsys.readouterr() == (told.out, "")
    words = ["inspect", "--quiet", "--tokenizer-model", "nothing", "text"]
    assert "the tokenizer does not exist" in refusal(capsys, *words)


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_debug_shows_where_an_error_arose_and_ends_with_its_line(capsys, monkeypatch, how):
    words = ["align", "--tokenizer-model", "nothing", "--teacher-tokenizer-model", "x", "t"]
    line = refusal(capsys, *words)
    if how == "variable":
        monkeypatch.setenv("MEGATRON_EXT_DEBUG", "1")
    else:
        words.append("--debug")
    try:
        with pytest.raises(SystemExit) as ended:
            main(words)
    finally:
        logging.getLogger("megatron_ext").setLevel(logging.NOTSET)
    shown = capsys.readouterr().err
    assert ended.value.code == 2
    assert shown.startswith("Traceback")
    assert "tokenizer_files.py" in shown
    assert shown.endswith(line)


def test_help_is_asked_for_as_a_verb_too(printed):
    assert printed("help", "report") == printed("report", "--help")
    assert printed("help") == printed("--help")


def test_every_flag_of_the_short_help_is_a_flag():
    assert {flag.name for flag in config_flags()} >= BASIC


def test_the_doctor_names_the_extra_of_what_is_missing(printed, monkeypatch):
    from megatron_ext.cli import doctor

    text, code = printed("doctor")
    assert code == 0, text
    assert f"torch {version('torch')}" in text
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "regex" else "999")
    text, code = printed("doctor")
    assert 'missing: regex (pip install "megatron-ext[audit]")' in text
    assert re.search(r"^megatron-core +999 does not fit; expected <0.20,>=0.16.1$", text, re.M)
    assert code == 1


def test_every_setting_is_printed_where_it_is_asked_for(tmp_path, capsys):
    values = config_values(student_run(tmp_path, "run"))
    values["data"]["train"] = ["absent.txt"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    command = ["distill", "--config", str(tmp_path / "run.yaml")]
    for flags in ([], ["--print-config"]):
        with pytest.raises(SystemExit):
            main([*command, *flags])
        assert ("  clip_grad: " in capsys.readouterr().out) is bool(flags)


def test_the_demo_writes_configurations_that_are_complete(tmp_path):
    from megatron_ext.training.configuration.config import DistillConfig

    tokenizers = _write_tokenizers(tmp_path / "data")
    for path in _write_configs(tmp_path, tokenizers):
        values = yaml.safe_load(path.read_text())
        config = build_config(DistillConfig, values, ".".join)
        assert config.run_dir.startswith(str(tmp_path))
        assert build_tokenizer(config.tokenizer).vocab_size == VOCABULARY_SIZE


def test_a_list_that_there_is_not_is_refused_with_those_that_there_are(capsys):
    errors = refusal(capsys, "ls", "objective")
    assert "did you mean 'objectives'?" in errors
    assert all(name in errors for name in LISTS)


def test_threads_that_wait_leave_their_core_to_others():
    program = (
        "import os, sys; from megatron_ext.cli.main import main; sys.argv = ['', 'ls', 'recipes']; "
        "main(); assert 'torch' not in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"
    )
    environment = {name: v for name, v in os.environ.items() if name != "OMP_WAIT_POLICY"}
    for given, used in ((environment, "PASSIVE"), ({**environment, "OMP_WAIT_POLICY": "A"}, "A")):
        assert run_python(program, env=given).stdout.splitlines()[-1] == used

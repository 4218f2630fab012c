"""``megatron-ext run``: a script's own command line, untouched."""

import json
import os
import subprocess
import sys

import pytest

from megatron_ext.cli.main import main
from tests.cli.run_files import REPOSITORY, refusal

SCRIPT = "import json, sys; print(json.dumps([__name__, sys.argv]))\n"


def in_a_process(folder, *words, launcher=("-m", "megatron_ext")):
    """The verb in a process of its own, which it takes over."""
    return subprocess.run(
        [sys.executable, *launcher, "run", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def folder(tmp_path):
    """A folder with a script."""
    (tmp_path / "own.py").write_text(SCRIPT, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--lr", "1e-4", "positional", "--", "-x"),
        ("--help",),
        ("run", "--version"),
        ("--tokenizer-model=a b",),
    ],
    ids=["none", "flags", "help", "verb-and-version", "equals"],
)
def test_what_follows_the_script_is_the_scripts(folder, words):
    finished = in_a_process(folder, "own.py", *words)
    assert json.loads(finished.stdout) == ["__main__", ["own.py", *words]]


def test_the_console_script_runs_it_too(folder):
    launcher = ("-c", "from megatron_ext.cli.main import main; main()")
    finished = in_a_process(folder, "own.py", "-v", launcher=launcher)
    assert json.loads(finished.stdout) == ["__main__", ["own.py", "-v"]]


@pytest.mark.parametrize(
    ("script", "code"),
    [("raise SystemExit(7)", 7), ("raise SystemExit", 0), ("raise KeyError('x')", 1), ("", 0)],
)
def test_the_exit_status_is_the_scripts(folder, script, code):
    (folder / "own.py").write_text(script, encoding="utf-8")
    assert in_a_process(folder, "own.py").returncode == code


def test_an_error_of_the_script_keeps_its_traceback(folder):
    (folder / "own.py").write_text("def f():\n    raise KeyError('x')\nf()\n", encoding="utf-8")
    errors = in_a_process(folder, "own.py").stderr
    assert 'own.py", line 2, in f' in errors
    assert "KeyError: 'x'" in errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: script"),
        (["absent.py"], "absent.py: the script does not exist"),
        (["."], "the script does not exist"),
    ],
)
def test_a_command_line_without_a_script_is_one_line(words, message, capsys):
    errors = refusal(capsys, "run", *words)
    assert errors.count("\n") == 1
    assert message in errors


def test_the_help_of_the_verb_shows_how_it_is_used(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    assert "torchrun --nproc-per-node 8 -m megatron_ext run" in capsys.readouterr().out

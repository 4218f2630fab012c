"""Commands of pages have flags that there are; those of docs/distillation.md run in turn."""

import argparse
import os
import re
import shlex
import subprocess
import sys
from importlib import import_module

import pytest

from tests.cli.run_files import REPOSITORY

AFTER_THE_WALK = ("evaluation", "reports", "tokenizers", "projection")
"""Pages with commands that go on where the walk ends."""
WALK = REPOSITORY / "docs" / "distillation.md"
CONFIG = REPOSITORY / "examples" / "distillation" / "distill.yaml"
SHORTER = {
    "make_checkpoints.py": ["--steps", "4"],
    "distill": ["--train-iters", "2", "--lr-warmup-iters", "1", "--global-batch-size", "4"],
    "evaluate": ["--limit", "1"],
}
"""What is added to commands whose words have this."""


_SHELL = re.compile(r"^```bash\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def commands(page):
    """The words of each, in order."""
    blocks = _SHELL.findall(page.read_text(encoding="utf-8"))
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def verb_of(words):
    """The verb of a command of this package and its arguments, by whatever it is started."""
    if words[0] == "megatron-ext":
        return words[1:]
    if words[0] == "torchrun" or words[:3] == ["python", "-m", "megatron_ext"]:
        return words[words.index("megatron_ext") + 1 :]
    return None


PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
OF_VERBS = {page: [verb for words in commands(page) if (verb := verb_of(words))] for page in PAGES}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if OF_VERBS[page]], ids=lambda page: page.stem
)
def test_every_command_has_flags_that_there_are(page):
    for verb, *arguments in OF_VERBS[page]:
        module = import_module(f"megatron_ext.cli.{verb.replace('-', '_')}")
        parser = argparse.ArgumentParser(allow_abbrev=False)
        module.add_arguments(parser)
        parser.parse_args(arguments[: arguments.index(">")] if ">" in arguments else arguments)


def test_the_configuration_of_the_page_is_that_of_the_example():
    shown, *_ = re.findall(r"^```yaml\n(.*?)^```\n", WALK.read_text(), re.DOTALL | re.MULTILINE)
    comment, _, settings = CONFIG.read_text().partition("\n")
    assert comment.startswith("#")
    assert shown == settings


@pytest.mark.skipif(
    not os.environ.get("MEGATRON_EXT_ALL_TEXT"), reason="two minutes: MEGATRON_EXT_ALL_TEXT=1"
)
def test_the_walk_leads_to_a_student_that_transformers_loads(tmp_path):
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    for words in [*commands(WALK), *_commands_after_the_walk()]:
        for mark, more in SHORTER.items():
            if any(word.endswith(mark) for word in words):
                words = [*words, *_not_given(more, words)]
        _run([*_program(words[0]), *words[1:]], tmp_path)
    (script,) = re.findall(r"^```py\n(.*?)^```\n", WALK.read_text(), re.DOTALL | re.MULTILINE)
    assert _run([sys.executable, "-c", script], tmp_path).startswith("A function is")
    assert (tmp_path / "runs" / "walk" / "report.html").stat().st_size > 10_000


def _commands_after_the_walk():
    """Commands on other pages that name nothing but what the walk left."""
    pages = [REPOSITORY / "docs" / f"{name}.md" for name in AFTER_THE_WALK]
    found = [words for page in pages for words in commands(page)]
    own = [words for words in found if any("runs/walk" in word for word in words)]
    return [words for words in own if "chat.jsonl" not in words]


def _not_given(more, words):
    pairs = zip(more[::2], more[1::2], strict=True)
    return [word for flag, value in pairs if flag not in words for word in (flag, value)]


def _program(name):
    modules = {"python": [], "megatron-ext": ["-m", "megatron_ext"]}
    modules["torchrun"] = ["-m", "torch.distributed.run"]
    return [sys.executable, *modules[name]]


def _run(command, folder):
    finished = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert finished.returncode == 0, f"{' '.join(command)}\n{finished.stderr[-3000:]}"
    return finished.stdout

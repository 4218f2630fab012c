import argparse
from functools import reduce

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.training.configuration.arguments import (
    add_config_arguments,
    config_flags,
    config_from_arguments,
    is_given,
)

FILE = """
run_dir: runs/a
tokenizer:
  library: tiktoken
  model: a.json
student: {num_layers: 2, hidden_size: 8, num_attention_heads: 2}
teacher:
  tokenizer: {model: b.model}
  model: {num_layers: 4, hidden_size: 16, num_attention_heads: 4}
  checkpoint: runs/b
data: {train: [x.txt]}
optimizer: {lr: 0.5}
training: {train_iters: 10}
"""


@pytest.fixture
def read(tmp_path):
    """The configuration of flags, beside a file that has ``FILE`` but for ``changes``."""

    def read(words, *changes):
        file, text = tmp_path / "run.yaml", FILE
        for before, after in changes:
            assert before in text
            text = text.replace(before, after)
        file.write_text(text)
        parser = argparse.ArgumentParser(exit_on_error=False)
        add_config_arguments(parser)
        return config_from_arguments(parser.parse_args(["--config", str(file), *words.split()]))

    return read


def value_of(config, keys):
    return reduce(getattr, keys.split("."), config)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param(
            "",
            {"optimizer.lr": 0.5, "student.num_layers": 2, "loss.temperature": None},
            id="the-file-speaks",
        ),
        pytest.param(
            "--lr 3e-4 --train-iters 7",
            {"optimizer.lr": 3e-4, "training.train_iters": 7, "student.num_layers": 2},
            id="a-flag-wins-and-leaves-its-neighbours",
        ),
        pytest.param("--loss-temperature 2", {"loss.temperature": 2.0}, id="absent-section"),
        pytest.param(
            "--teacher-hidden-size 32 --hidden-size 64 --teacher-tokenizer-library sentencepiece "
            "--tokenizer-mode text --teacher-checkpoint runs/c",
            {
                "teacher.model.hidden_size": 32,
                "student.hidden_size": 64,
                "teacher.tokenizer.library": "sentencepiece",
                "tokenizer.library": "tiktoken",
                "teacher.checkpoint": "runs/c",
            },
            id="prefix-of-the-teacher",
        ),
        pytest.param("--data-append-eod", {"data.append_eod": True}, id="switch"),
        pytest.param("--no-data-append-eod", {"data.append_eod": False}, id="switched-off"),
        pytest.param(
            "--data-train a.txt b.jsonl --seed 1", {"data.train": ("a.txt", "b.jsonl")}, id="list"
        ),
        pytest.param(
            '--loss-options {"top_k":8,"tail":"bucket"}',
            {"loss.options": {"top_k": 8, "tail": "bucket"}},
            id="mapping",
        ),
        pytest.param("--clip-grad 0", {"optimizer.clip_grad": 0.0}, id="zero"),
    ],
)
def test_flags_are_read_over_the_file(read, words, expected):
    config = read(words, ("lr: 0.5", "lr: 0.5, clip_grad: 3"))
    assert {keys: value_of(config, keys) for keys in expected} == expected


def test_flags_alone_describe_a_run():
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    words = "--run-dir r --tokenizer-model a --num-layers 1 --hidden-size 8 --num-attention-heads 2"
    more = "--data-train x --train-iters 1 --loss-objective next_token"
    config = config_from_arguments(parser.parse_args(f"{words} {more}".split()))
    assert config.teacher is None
    assert config.student.hidden_size == 8


@pytest.mark.parametrize(
    ("words", "change", "expected"),
    [
        ("", "train_iters: 10", False),
        ("--precision fp32", "train_iters: 10", True),
        ("", "train_iters: 10, precision: bf16", True),
    ],
    ids=["neither", "flag", "file"],
)
def test_it_is_known_whether_a_key_is_given(tmp_path, words, change, expected):
    file = tmp_path / "run.yaml"
    file.write_text(FILE.replace("train_iters: 10", change))
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    arguments = parser.parse_args(["--config", str(file), *words.split()])
    assert is_given(arguments, "training", "precision") == expected
    assert is_given(arguments, "training", "train_iters")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--loss-options top_k=8", "argument --loss-options: not"),
        ("--loss-options [8]", "argument --loss-options: not"),
        ("--lr fast", "argument --lr: invalid float value: 'fast'"),
    ],
)
def test_an_error_in_a_flags_value_names_the_flag(read, words, message):
    with pytest.raises(argparse.ArgumentError, match=message):
        read(words)


TEACHER_SECTION = FILE[FILE.index("teacher:") : FILE.index("data:")]


@pytest.mark.parametrize(
    ("words", "change", "message"),
    [
        pytest.param(
            "--teacher-num-layers 2",
            (TEACHER_SECTION, ""),
            r"expected teacher\.tokenizer, teacher\.model\.hidden_size, .*teacher\.checkpoint; "
            r"give them in the file, or by --teacher-hidden-size --teacher-num-attention-heads",
            id="one-flag-of-a-section",
        ),
        pytest.param(
            "--seed 3",
            ("lr: 0.5", "lr: fast"),
            r"run\.yaml:12: optimizer\.lr: a value has the wrong",
            id="line-of-the-file",
        ),
        pytest.param(
            "--lr 1",
            ("optimizer: {lr: 0.5}", "optimizer: fast"),
            r"run\.yaml:12: optimizer, with --lr: a section is not a mapping",
            id="no-mapping",
        ),
        pytest.param(
            "--num-layers 0",
            ("optimizer", "optimizer"),
            r"run\.yaml:6: student, with --num-layers: num_layers must be positive",
            id="value-of-a-section",
        ),
    ],
)
def test_what_the_configuration_refuses_has_its_place(read, words, change, message):
    with pytest.raises(ConfigError, match=message):
        read(words, change)


def test_the_help_shows_every_flag_with_percent_signs_as_they_are():
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    text, names = parser.format_help(), {flag.name for flag in config_flags()}
    assert all(name in text for name in names)
    for option in ("library", "model", "mode", "prompt-format"):
        assert {f"--tokenizer-{option}", f"--teacher-tokenizer-{option}"} <= names

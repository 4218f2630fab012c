import argparse

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.training.arguments import (
    add_config_arguments,
    config_flags,
    config_from_arguments,
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
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    return path


def config(*arguments):
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_config_arguments(parser)
    return config_from_arguments(parser.parse_args(arguments))


def test_without_flags_the_file_speaks(file):
    read = config("--config", str(file))
    assert read.optimizer.lr == 0.5
    assert read.student.num_layers == 2
    assert read.loss.temperature is None


def test_a_flag_wins_over_the_file_and_leaves_its_neighbours(file):
    read = config("--config", str(file), "--lr", "3e-4", "--train-iters", "7")
    assert read.optimizer.lr == 3e-4
    assert read.training.train_iters == 7
    assert read.student.num_layers == 2


def test_a_flag_reaches_a_section_that_the_file_leaves_out(file):
    assert config("--config", str(file), "--loss-temperature", "2").loss.temperature == 2.0


def test_the_same_flag_with_the_teachers_prefix_is_the_teachers(file):
    read = config(
        *("--config", str(file), "--teacher-hidden-size", "32", "--hidden-size", "64"),
        *("--teacher-tokenizer-library", "sentencepiece", "--tokenizer-mode", "text"),
        *("--teacher-checkpoint", "runs/c"),
    )
    assert read.teacher is not None
    assert (read.teacher.model.hidden_size, read.student.hidden_size) == (32, 64)
    assert (read.teacher.tokenizer.library, read.tokenizer.library) == ("sentencepiece", "tiktoken")
    assert read.teacher.checkpoint == "runs/c"


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--data-append-eod", True), ("--no-data-append-eod", False)],
    ids=lambda value: str(value),
)
def test_a_switch_can_be_turned_both_ways(file, flag, value):
    assert config("--config", str(file), flag).data.append_eod is value


def test_a_list_takes_several_values(file):
    read = config("--config", str(file), "--data-train", "a.txt", "b.jsonl", "--seed", "1")
    assert read.data.train == ("a.txt", "b.jsonl")


def test_a_mapping_is_json(file):
    read = config("--config", str(file), "--loss-options", '{"top_k": 8, "tail": "bucket"}')
    assert read.loss.options == {"top_k": 8, "tail": "bucket"}


@pytest.mark.parametrize("text", ["top_k=8", "[8]"])
def test_what_is_no_json_object_names_the_flag(file, text):
    with pytest.raises(argparse.ArgumentError, match=r"argument --loss-options: not"):
        config("--config", str(file), "--loss-options", text)


def test_flags_alone_describe_a_run():
    read = config(
        *("--run-dir", "r", "--tokenizer-model", "a", "--num-layers", "1", "--hidden-size", "8"),
        *("--num-attention-heads", "2", "--data-train", "x", "--train-iters", "1"),
        *("--loss-objective", "next_token"),
    )
    assert read.teacher is None
    assert read.student.hidden_size == 8


def test_a_flag_of_zero_or_false_is_not_taken_for_absent(file):
    file.write_text(FILE.replace("lr: 0.5", "lr: 0.5, clip_grad: 3"))
    assert config("--config", str(file), "--clip-grad", "0").optimizer.clip_grad == 0.0


def test_an_optional_section_with_one_flag_of_it_asks_for_the_rest(file):
    start, end = FILE.index("teacher:"), FILE.index("data:")
    file.write_text(FILE[:start] + FILE[end:])
    with pytest.raises(ConfigError, match="required configuration key is missing"):
        config("--config", str(file), "--teacher-num-layers", "2")


def test_an_error_in_a_flags_value_names_the_flag(file):
    with pytest.raises(argparse.ArgumentError, match=r"argument --lr: invalid float value: 'fast'"):
        config("--config", str(file), "--lr", "fast")


def test_an_error_in_the_file_names_the_line_though_other_flags_are_given(file):
    file.write_text(FILE.replace("lr: 0.5", "lr: fast"))
    with pytest.raises(ConfigError, match=r"run\.yaml:12: optimizer\.lr: a value has the wrong"):
        config("--config", str(file), "--seed", "3")


def test_a_flag_does_not_hide_that_its_section_is_no_mapping(file):
    file.write_text(FILE.replace("optimizer: {lr: 0.5}", "optimizer: fast"))
    with pytest.raises(ConfigError, match=r"run\.yaml:12: optimizer: a section is not a mapping"):
        config("--config", str(file), "--lr", "1")


def test_a_value_that_the_configuration_refuses_names_its_section(file):
    with pytest.raises(ConfigError, match=r"run\.yaml:6: student: num_layers must be positive"):
        config("--config", str(file), "--num-layers", "0")


def test_the_documented_tokenizer_flags_exist_for_both_sides():
    names = {flag.name for flag in config_flags()}
    for option in ("library", "model", "mode", "prompt-format"):
        assert f"--tokenizer-{option}" in names
        assert f"--teacher-tokenizer-{option}" in names


def test_the_help_shows_every_flag_with_percent_signs_as_they_are():
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    text = parser.format_help()
    assert all(flag.name in text for flag in config_flags())

"""Whatever a user gets wrong is one line on standard error, a non-zero exit, and no output."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_ext.cli.main import main
from megatron_ext.projection import SparseProjection
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.training.arguments import config_flags
from megatron_ext.training.run_folder import check_run_folder, config_values, record_run
from tests.cli.run_files import refusal, start, write_config
from tests.training.tiny_run import student_run, write_corpus, write_rank_list

PREFIX = "megatron-ext: error: "
Values = dict[str, Any]


@pytest.fixture
def values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Values:
    """A right configuration, as a mapping to spoil; its teacher's checkpoint is only a folder."""
    # Nothing here may get as far as megatron-core, which changes torch for its whole process.
    monkeypatch.setitem(sys.modules, "megatron_ext.training.distill", None)
    write_corpus(tmp_path)
    write_rank_list(tmp_path)
    _checkpoint(tmp_path / "teacher" / "checkpoints")
    return copy.deepcopy(config_values(student_run(tmp_path, "run")))


@pytest.fixture
def refused(
    values: Values, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Start ``values`` with extra flags; the one line it is refused with."""

    def refused(*flags: str) -> str:
        before = _files(tmp_path)
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
        errors = refusal(capsys, "distill", "--config", file, *flags)
        assert _files(tmp_path) == before | {file}
        return one_line(errors)

    return refused


def _files(folder: Path) -> set[Path]:
    """All but the index of the texts, which any start may leave."""
    return {path for path in folder.rglob("*") if ".text_cache" not in path.parts}


def one_line(errors: str) -> str:
    assert errors.count("\n") == 1, errors
    assert errors.startswith(PREFIX)
    return errors.removeprefix(PREFIX).strip()


def test_a_right_configuration_gets_past_every_check(values: Values, tmp_path: Path) -> None:
    _gets_past_every_check(values, tmp_path)


def _gets_past_every_check(values: Values, folder: Path) -> None:
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ImportError, match=r"megatron_ext\.training\.distill"):
        main(["distill", "--config", str(folder / "run.yaml")])


@pytest.mark.parametrize("section", ["tokenizer", "teacher.tokenizer"])
def test_a_tokenizer_of_bytes_needs_no_file(values: Values, tmp_path: Path, section: str) -> None:
    _section(values, section).clear()
    _section(values, section)["library"] = "byte-level"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ImportError, match=r"megatron_ext\.training\.distill"):
        main(["distill", "--config", str(tmp_path / "run.yaml")])


@pytest.mark.parametrize("section", ["tokenizer", "teacher.tokenizer"])
def test_a_run_reads_no_numbers(values, refused, section) -> None:
    _section(values, section).clear()
    _section(values, section).update(library="null", vocab_size=300)
    assert refused().startswith(f"{section}: a run reads texts, of which a null tokenizer knows")


@pytest.mark.parametrize("section", ["tokenizer", "teacher.tokenizer"])
def test_a_missing_tokenizer_file_is_named(values, refused, section) -> None:
    _section(values, section)["model"] = "/nowhere/tokenizer.model"
    assert refused().startswith("/nowhere/tokenizer.model: the tokenizer does not exist")


@pytest.mark.parametrize("section", ["tokenizer", "teacher.tokenizer"])
def test_a_tokenizer_that_is_not_named_is_asked_for_by_key_and_flag(
    values, refused, section
) -> None:
    del _section(values, section)["model"]
    line = refused()
    assert line.startswith(f"{section}.model: no tokenizer is named")
    assert line.endswith(f"set it, or pass --{section.replace('.', '-')}-model")


@pytest.mark.parametrize("section", ["tokenizer", "teacher.tokenizer"])
def test_a_run_reads_no_images(values, refused, section) -> None:
    _section(values, section).update(mode="multimodal", prompt_format="mistral")
    assert refused().startswith(f"{section}: a run reads no images")


def test_conversations_need_a_prompt_format(values, refused) -> None:
    values["data"]["conversations"] = True
    line = refused()
    assert line.startswith("tokenizer: conversations need a prompt format; got a tokenizer without")
    assert "set tokenizer.prompt_format, or pass --tokenizer-prompt-format, see" in line


@pytest.mark.parametrize("side", ["student", "teacher", "one of several teachers"])
def test_a_chat_template_is_asked_for_by_its_switch(values, refused, side) -> None:
    values["data"]["conversations"] = True
    values["tokenizer"]["chat_template"] = "{{ messages[0].content }}"
    section, flag = "tokenizer", ", or pass --tokenizer-prompt-format auto"
    if side != "student":
        values["tokenizer"]["prompt_format"] = "auto"
        values["teacher"]["tokenizer"]["chat_template"] = "{{ messages[0].content }}"
        section, flag = "teacher.tokenizer", ", or pass --teacher-tokenizer-prompt-format auto"
    if side == "one of several teachers":
        values["teachers"] = {"big": values.pop("teacher")}
        section, flag = "teachers.big.tokenizer", ""
    assert refused() == (
        f"{section}: conversations need a prompt format; got a tokenizer without one, whose chat "
        f"template is not asked for; set {section}.prompt_format to auto{flag}"
    )


@pytest.mark.parametrize("asked", [{"prompt_format": "auto"}, {"mode": "sft"}], ids=str)
def test_a_run_reads_conversations_by_each_tokenizers_template(values, tmp_path, asked) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    for section in ("tokenizer", "teacher.tokenizer"):
        _section(values, section).update(asked, chat_template=template)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": turns}) + "\n")
    values["data"].update(train=[str(chats)], validation=[], conversations=True)
    _gets_past_every_check(values, tmp_path)
    (said,) = (flag.help for flag in config_flags() if flag.name == "--data-conversations")
    assert all(word in said for setting in asked.items() for word in setting)


def test_a_blend_needs_a_weight_before_every_path(values, refused) -> None:
    values["data"]["train"] = ["0.5", *values["data"]["train"], "b.jsonl"]
    assert refused().startswith("data.train: weights and paths do not alternate")


def test_the_wrong_library_is_told_the_right_one(values, refused) -> None:
    values["teacher"]["tokenizer"]["library"] = "huggingface"
    assert "got a sentencepiece file; use library 'sentencepiece'" in refused()


def test_a_truncated_sentencepiece_model_is_refused(values, refused, tmp_path) -> None:
    whole = Path(values["teacher"]["tokenizer"]["model"]).read_bytes()
    cut = tmp_path / "cut.model"
    cut.write_bytes(whole[: len(whole) // 2])
    values["teacher"]["tokenizer"]["model"] = str(cut)
    line = refused()
    assert line.startswith(f"{cut}: ")
    assert "truncated" in line


@pytest.mark.parametrize("part", ["train", "validation"])
@pytest.mark.parametrize(
    ("name", "contents", "place", "words"),
    [
        ("absent.txt", None, "", "no such file"),
        ("latin.txt", "café".encode("latin-1"), "", "not UTF-8"),
        ("empty.txt", b"", None, "holds no text"),
        ("blank.jsonl", b'\n{"text": ""}\n\n', None, "holds no text"),
        ("broken.jsonl", b'{"text": "a"}\n\n{"text": \n', ":3", "not JSON"),
        ("list.jsonl", b"[1, 2]\n", ":1", "no text under 'text'; got list"),
        ("other.jsonl", b'{"body": "a"}\n', ":1", "got keys ['body']; set data.text_key"),
        ("chat.jsonl", b'{"messages": []}\n', ":1", "; pass --data-conversations (data.conv"),
    ],
    ids=["absent", "latin-1", "empty", "blank", "broken-json", "list", "other-key", "chat"],
)
def test_text_that_cannot_be_used_is_refused_with_its_place(
    values, refused, tmp_path, part, name, contents, place, words
) -> None:
    file = tmp_path / name
    if contents is not None:
        file.write_bytes(contents)
    values["data"][part] = [str(file)]
    line = refused()
    assert words in line
    assert str(file) in line
    if place is not None:
        assert line.startswith(f"{file}{place}: ")


def test_text_that_no_window_holds_is_refused(values, refused, tmp_path) -> None:
    (tmp_path / "x.txt").write_text("a")
    values["data"]["train"] = [str(tmp_path / "x.txt")]
    values["student"]["seq_length"] = values["teacher"]["model"]["seq_length"] = 1
    assert "raise its length" in refused()


def test_an_unknown_key_is_refused_with_its_line_and_the_nearest_key(values, refused) -> None:
    values["optimizer"]["learning_rat"] = values["optimizer"].pop("lr")
    line = refused()
    assert "run.yaml:" in line
    assert "optimizer.learning_rat: unknown configuration key; expected one of lr, min_lr" in line


def test_a_value_of_the_wrong_type_is_refused_with_its_line(values, refused, tmp_path) -> None:
    values["training"]["train_iters"] = "many"
    line = refused()
    number = int(line.removeprefix(f"{tmp_path / 'run.yaml'}:").split(":")[0])
    assert "train_iters" in (tmp_path / "run.yaml").read_text().splitlines()[number - 1]
    assert "training.train_iters: a value has the wrong type; got 'many'; expected int" in line


def test_an_unknown_objective_lists_the_known_ones(values, refused) -> None:
    values["loss"]["objective"] = "projected_lk"
    line = refused()
    assert "got 'projected_lk'; expected one of" in line
    assert "did you mean 'projected_kl'?" in line


def test_an_unknown_objective_is_no_other_experiment(values, refused, tmp_path) -> None:
    record_run(student_run(tmp_path, "run"), {})
    _checkpoint(tmp_path / "run" / "checkpoints")
    assert "did you mean 'projected_kl'?" in refused("--loss-objective", "projectedkl")


def test_a_wrong_option_of_the_objective_names_the_nearest(values, refused) -> None:
    values["loss"]["options"] = {"vocab_topkk": 8}
    line = refused()
    assert line.startswith("loss.options.vocab_topkk: unknown configuration key; expected one of ")
    assert line.endswith("did you mean 'vocab_topk'?")


def test_options_on_the_command_line_take_the_place_of_those_in_the_file(values, refused) -> None:
    values["loss"]["options"] = {"vocab_topkk": 8}
    line = refused("--loss-options", '{"vocab_topk": "few"}')
    assert line.startswith("loss.options.vocab_topk: a value has the wrong type; got 'few'")


def test_vocab_kl_is_refused_for_a_teacher_with_another_tokenizer(values, refused) -> None:
    values["loss"]["objective"] = "vocab_kl"
    line = refused()
    assert line.startswith("teacher.tokenizer: the objective vocab_kl needs a teacher with the")


def test_a_projection_of_another_pair_is_refused(values, refused, tmp_path) -> None:
    other = TokenizerConfig(model=values["tokenizer"]["model"], vocab_size=1400)
    teacher = TokenizerConfig(model=values["teacher"]["tokenizer"]["model"])
    file = tmp_path / "other.safetensors"
    SparseProjection.from_tokenizers(build_tokenizer(other), build_tokenizer(teacher)).save(file)
    values["projection"] = str(file)
    line = refused()
    assert line.startswith(f"{file}: this projection was built for another student; got a vocab")
    assert "1400 ids" in line
    assert "8001 ids" in line


def test_a_missing_projection_is_refused(values, refused) -> None:
    values["projection"] = "/nowhere/projection.safetensors"
    assert refused().startswith("/nowhere/projection.safetensors: there is no projection file")


def test_processes_that_make_no_whole_replica_are_refused(values, refused, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    values["parallel"] |= {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    line = refused()
    assert "got 6 processes; expected a multiple of 4 (tensor_model_parallel_size 2" in line
    assert "--nproc-per-node" in line


def test_a_batch_that_does_not_divide_over_the_replicas_is_refused(
    values, refused, monkeypatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "got 4; expected a multiple of 6 (micro_batch_size 2 x 3" in refused()


def test_layers_that_do_not_divide_over_the_stages_are_refused(values, refused) -> None:
    values["student"]["num_layers"] = 3
    line = refused("--pipeline-model-parallel-size", "2")
    assert "the student's num_layers do not divide over pipeline_model_parallel_size" in line
    assert "got 3 over 2; expected a multiple of 2" in line


@pytest.mark.parametrize("exists", [False, True], ids=["absent", "empty"])
def test_a_missing_teacher_checkpoint_is_refused(values, refused, tmp_path, exists) -> None:
    if exists:
        (tmp_path / "none").mkdir()
    values["teacher"]["checkpoint"] = str(tmp_path / "none")
    line = refused()
    assert line.startswith("teacher.checkpoint: no checkpoint found; got")
    assert str(tmp_path / "none") in line


@pytest.mark.parametrize(
    ("section", "key", "place"),
    [
        ((), "initial_checkpoint", "initial_checkpoint"),
        (("student",), "hf", "student.hf"),
        (("teacher",), "checkpoint", "teacher.checkpoint"),
    ],
    ids=["student", "shape", "teacher"],
)
def test_a_model_that_is_not_there_is_the_reason_and_not_its_missing_shape(
    values, refused, section, key, place
) -> None:
    values["student"] = {"seq_length": 41}
    values["teacher"]["model"] = {"seq_length": 53}
    if section != ("teacher",):
        del values["teacher"]
    (_section(values, ".".join(section)) if section else values)[key] = "Qwen/Qwen3-4B"
    line = refused()
    assert f"run.yaml:{_line_of(values, key)}: {place}: no checkpoint found; got Qwen/Q" in line
    assert "which does not exist; expected a HuggingFace folder" in line
    assert line.endswith("hf download OWNER/NAME --local-dir Qwen/Qwen3-4B")


def _line_of(values: Values, key: str) -> int:
    lines = yaml.safe_dump(values, sort_keys=False).splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.strip() == f"{key}: Qwen/Qwen3-4B")
    return number


def test_a_missing_first_checkpoint_of_the_student_is_refused(values, refused) -> None:
    assert refused("--initial-checkpoint", "/nowhere").startswith("initial_checkpoint: no check")


def test_a_run_folder_of_another_configuration_is_refused(values, refused, tmp_path) -> None:
    config = student_run(tmp_path, "run")
    record_run(config, {})
    _checkpoint(tmp_path / "run" / "checkpoints")
    line = refused("--lr", "0.5")
    assert line.startswith(f"{tmp_path / 'run' / 'config.yaml'}: the run folder holds a run with")
    assert "another optimizer.lr; got 0.5; expected 0.001; use another run_dir" in line


def test_a_run_folder_that_is_a_file_is_refused(values, refused, tmp_path) -> None:
    (tmp_path / "file").touch()
    assert refused("--run-dir", str(tmp_path / "file" / "run")).startswith(
        "run_dir: the run folder cannot be written to"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the following arguments are required: VERB"),
        (["distil"], "invalid choice: 'distil'"),
        (["distil"], "; did you mean 'distill'?; see megatron-ext --help"),
        (["distill", "--dryrun"], "unrecognized arguments: --dryrun; did you mean '--dry-run'?"),
        (["distill", "--lr=1", "--train-iter=5"], "--train-iter=5; did you mean '--train-iters'?"),
        (["distill", "--learning-rate", "1"], "rate 1; did you mean '--lr'?; see megatron-ext dis"),
        (["distill", "--tp", "2"], "unrecognized arguments: --tp 2; see megatron-ext distill --h"),
        (["projection", "biuld"], "did you mean 'build'?"),
        (["projection", "inspect", "x", "--studnt", "y"], "did you mean '--student'?"),
        (["inspect", "hi"], "; set model, or pass --tokenizer-model"),
        (["distill", "--train-iters", "many"], "argument --train-iters: invalid int value: 'many'"),
        (["distill", "--precision", "fp8"], "argument --precision: invalid choice: 'fp8'"),
        (["distill", "--learning-rate", "1"], "unrecognized arguments: --learning-rate 1"),
        (["distill", "--train-it", "5"], "unrecognized arguments: --train-it 5"),
        (["distill"], "a required configuration key is missing; expected run_dir"),
        (["distill", "--config", "/nowhere.yaml"], "/nowhere.yaml: the configuration file cannot"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_command_line_is_refused(capsys, arguments, words) -> None:
    assert words in one_line(refusal(capsys, *arguments))


def test_a_run_that_needs_a_gpu_does_not_start_on_a_cpu(values, refused, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = refused("--require-gpu")
    assert line.startswith("training.require_gpu: a GPU is required and there is none; got ")


def test_other_ranks_say_which_they_are(capsys, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit):
        main(["distill", "--config", "/nowhere.yaml"])
    output = capsys.readouterr()
    assert output.err.startswith("megatron-ext: error (rank 3): /nowhere.yaml: ")
    assert output.out == ""


def test_a_start_that_fails_late_is_one_line_too_and_binds_no_folder(
    folder: Path, tmp_path: Path
) -> None:
    config = student_run(folder, "late")
    file = write_config(tmp_path, config)
    process = start("distill", "--config", str(file), "--teacher-hidden-size", "96")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "the checkpoint cannot be loaded into the model" in one_line(errors)
    assert not Path(config.run_dir).exists()
    check_run_folder(config)


def _checkpoint(folder: Path) -> None:
    """What tells a folder of checkpoints from others, without any weights."""
    (folder / "iter_0000001").mkdir(parents=True)
    torch.save({}, folder / "iter_0000001" / "common.pt")
    (folder / "latest").write_text("iter_0000001")


def _section(values: Values, keys: str) -> Values:
    for key in keys.split("."):
        values = values[key]
    return values

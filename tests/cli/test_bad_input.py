"""Whatever a user gets wrong is one line on standard error, a non-zero exit, and no output."""

import copy
import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_ext.cli.main import TerminalText, main
from megatron_ext.errors import CheckpointError
from megatron_ext.projection import SparseProjection
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.training.checkpoints.model_check import check_model
from megatron_ext.training.configuration.arguments import config_flags
from megatron_ext.training.run_folder import check_run_folder, config_values, record_run
from tests.cli.run_files import refusal, write_config
from tests.fork_server import run_forked
from tests.training.tiny_run import STUDENT_VOCAB_SIZE, student_run, write_corpus, write_rank_list

PREFIX = "megatron-ext: error: "
Values = dict[str, Any]


@pytest.fixture
def values(tmp_path, monkeypatch):
    """A right configuration, as a mapping to spoil; its teacher's checkpoint is only a folder."""
    # Nothing here may get as far as megatron-core, which changes torch for its whole process.
    monkeypatch.setitem(sys.modules, "megatron_ext.training.distill", None)
    write_corpus(tmp_path)
    write_rank_list(tmp_path)
    _checkpoint(tmp_path / "teacher" / "checkpoints")
    return copy.deepcopy(config_values(student_run(tmp_path, "run")))


@pytest.fixture
def refused(values, tmp_path, capsys):
    """Start ``values`` with extra flags; the one line it is refused with."""

    def refused(*flags):
        before = _files(tmp_path)
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
        errors = refusal(capsys, "distill", "--config", file, *flags)
        assert _files(tmp_path) == before | {file}
        return one_line(errors)

    return refused


def _files(folder):
    """All but the index of the texts, which any start may leave."""
    return {path for path in folder.rglob("*") if ".text_cache" not in path.parts}


def one_line(errors):
    assert errors.count("\n") == 1, errors
    assert errors.startswith(PREFIX)
    return errors.removeprefix(PREFIX).strip()


def test_a_right_configuration_gets_past_every_check(values, tmp_path):
    _gets_past_every_check(values, tmp_path)


def _gets_past_every_check(values, folder):
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ImportError, match=r"megatron_ext\.training\.distill"):
        main(["distill", "--config", str(folder / "run.yaml")])


@pytest.mark.parametrize("section", ["tokenizer", "teacher.tokenizer"])
def test_a_tokenizer_of_bytes_needs_no_file(values, tmp_path, section):
    _section(values, section).clear()
    _section(values, section)["library"] = "byte-level"
    _gets_past_every_check(values, tmp_path)


@pytest.mark.parametrize("section", ["tokenizer", "teacher.tokenizer"])
@pytest.mark.parametrize(
    ("changes", "start", "end"),
    [
        (
            {"model": None, "library": "null", "vocab_size": 300},
            "{}: a run reads texts, of which",
            "",
        ),
        ({"model": "/no/t.model"}, "/no/t.model: the tokenizer does not exist", ""),
        ({"model": None}, "{}.model: no tokenizer is named", "set it, or pass --{flag}-model"),
        ({"mode": "multimodal", "prompt_format": "mistral"}, "{}: a run reads no images", ""),
    ],
    ids=["null", "missing", "not named", "images"],
)
def test_a_tokenizer_that_a_run_cannot_use_is_refused(
    values, refused, section, changes, start, end
):
    settings = _section(values, section)
    if changes.get("library") == "null":
        settings.clear()
    settings.update(changes)
    if changes.get("model", "") is None:
        del settings["model"]
    line = refused()
    assert line.startswith(start.format(section))
    assert line.endswith(end.format(flag=section.replace(".", "-")))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("data.train=['0.5', a, b.jsonl]", "^data.train: weights and paths do not alternate"),
        ("teacher.tokenizer.library=huggingface", "got a sentencepiece file; use library 'sent"),
        ("optimizer.learning_rat=1", r"run.yaml:\d+: optimizer.learning_rat: unknown configurat"),
        ("optimizer.learning_rat=1", "configuration key; expected one of lr, min_lr"),
        ("loss.objective=projected_lk", "got 'projected_lk'; expected one of .*mean 'projected_kl"),
        ("loss.options={vocab_topkk: 8}", r"^loss.options.vocab_topkk: unknown configuration key"),
        ("loss.options={vocab_topkk: 8}", r"configuration key; did you mean 'vocab_topk'\?$"),
        (
            "loss.objective=vocab_kl",
            "^teacher.tokenizer: the objective vocab_kl needs a teacher with",
        ),
        (
            "projection=/nowhere/p.safetensors",
            "^/nowhere/p.safetensors: there is no projection file",
        ),
        ("initial_checkpoint=/nowhere", "^initial_checkpoint: no check"),
        ("run_dir=/dev/null/run", "^run_dir: the run folder cannot be written to"),
        (
            "data.conversations=true",
            "^tokenizer: conversations need a prompt format; got a tokenizer",
        ),
        (
            "data.conversations=true",
            "set tokenizer.prompt_format, or pass --tokenizer-prompt-format, ",
        ),
    ],
)
def test_a_setting_that_cannot_be_is_refused(values, refused, setting, words):
    keys, _, value = setting.partition("=")
    section, _, key = keys.rpartition(".")
    _section(values, section)[key] = yaml.safe_load(value)
    assert re.search(words, refused())


def test_options_on_the_command_line_take_the_place_of_those_in_the_file(values, refused):
    values["loss"]["options"] = {"vocab_topkk": 8}
    line = refused("--loss-options", '{"vocab_topk": "few"}')
    assert line.startswith("loss.options.vocab_topk: a value has the wrong type; got 'few'")


@pytest.mark.parametrize(
    ("processes", "layers", "parallel", "words"),
    [
        (
            6,
            4,
            2,
            r"got 6 processes; .* a multiple of 4 \(tensor_model_parallel_size 2.*--nproc-per-",
        ),
        (3, 4, 1, r"got 4; expected a multiple of 6 \(micro_batch_size 2 x 3"),
        (4, 3, 2, "layers do not divide over pipeline_model_parallel_size; got 3 over 2; .*of 2"),
    ],
)
def test_what_does_not_divide_over_processes_is_refused(
    values, refused, monkeypatch, processes, layers, parallel, words
):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    values["student"]["num_layers"] = layers
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    values["parallel"] |= dict.fromkeys(sizes, parallel)
    assert re.search(words, refused())


@pytest.mark.parametrize("side", ["student", "teacher", "one of several teachers"])
def test_a_chat_template_is_asked_for_by_its_switch(values, refused, side):
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
def test_a_run_reads_conversations_by_each_tokenizers_template(values, tmp_path, asked):
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


def test_a_truncated_sentencepiece_model_is_refused(values, refused, tmp_path):
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
):
    file = tmp_path / name
    if contents is not None:
        file.write_bytes(contents)
    values["data"][part] = [str(file)]
    line = refused()
    assert words in line
    assert str(file) in line
    if place is not None:
        assert line.startswith(f"{file}{place}: ")


def test_text_that_no_window_holds_is_refused(values, refused, tmp_path):
    (tmp_path / "x.txt").write_text("a")
    values["data"]["train"] = [str(tmp_path / "x.txt")]
    values["student"]["seq_length"] = values["teacher"]["model"]["seq_length"] = 1
    assert "raise its length" in refused()


def test_a_value_of_the_wrong_type_is_refused_with_its_line(values, refused, tmp_path):
    values["training"]["train_iters"] = "many"
    line = refused()
    number = int(line.removeprefix(f"{tmp_path / 'run.yaml'}:").split(":")[0])
    assert "train_iters" in (tmp_path / "run.yaml").read_text().splitlines()[number - 1]
    assert "training.train_iters: a value has the wrong type; got 'many'; expected int" in line


def test_an_unknown_objective_is_no_other_experiment(values, refused, tmp_path):
    record_run(student_run(tmp_path, "run"), {})
    _checkpoint(tmp_path / "run" / "checkpoints")
    assert "did you mean 'projected_kl'?" in refused("--loss-objective", "projectedkl")


def test_a_projection_of_another_pair_is_refused(values, refused, tmp_path):
    other = TokenizerConfig(model=values["tokenizer"]["model"], vocab_size=1400)
    teacher = TokenizerConfig(model=values["teacher"]["tokenizer"]["model"])
    file = tmp_path / "other.safetensors"
    SparseProjection.from_tokenizers(build_tokenizer(other), build_tokenizer(teacher)).save(file)
    values["projection"] = str(file)
    line = refused()
    assert line.startswith(f"{file}: this projection was built for another student; got a vocab")
    assert "1400 ids" in line
    assert f"{STUDENT_VOCAB_SIZE} ids" in line


@pytest.mark.parametrize("exists", [False, True], ids=["absent", "empty"])
def test_a_missing_teacher_checkpoint_is_refused(values, refused, tmp_path, exists):
    if exists:
        (tmp_path / "none").mkdir()
    values["teacher"]["checkpoint"] = str(tmp_path / "none")
    line = refused()
    assert line.startswith("teacher.checkpoint: no checkpoint found; got")
    assert str(tmp_path / "none") in line


def test_a_misspelled_path_is_told_the_file_beside_it(values, refused, tmp_path):
    (tmp_path / "teacher-model").mkdir()
    values["teacher"]["checkpoint"] = str(tmp_path / "teacher-modle")
    assert refused().endswith(f"; did you mean {str(tmp_path / 'teacher-model')!r}?")


def test_a_folder_of_models_is_no_owner_on_the_hub(values, refused):
    values["teacher"]["checkpoint"] = "models/Qwen3-4B"
    line = refused()
    assert "; got models/Qwen3-4B, which does not exist; expected" in line
    assert line.endswith("hf download OWNER/NAME --local-dir models/Qwen3-4B")


def test_the_folder_of_a_model_is_no_run_folder(values, refused, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    line = refused("--run-dir", str(folder))
    assert line.startswith(f"run_dir: the run folder is the folder of a model; got {folder}, which")
    assert [file.name for file in folder.iterdir()] == ["config.json"]


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
):
    values["student"] = {"seq_length": 41}
    values["teacher"]["model"] = {"seq_length": 53}
    if section != ("teacher",):
        del values["teacher"]
    _section(values, ".".join(section))[key] = "Qwen/Qwen3-4B"
    line = refused()
    assert f"run.yaml:{_line_of(values, key)}: {place}: no checkpoint found; got Qwen/Q" in line
    assert "which does not exist here; the hub: " in line
    assert "offline" in line
    assert line.endswith("hf download Qwen/Qwen3-4B")


def _line_of(values, key):
    lines = yaml.safe_dump(values, sort_keys=False).splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.strip() == f"{key}: Qwen/Qwen3-4B")
    return number


def test_a_run_folder_of_another_configuration_is_refused(values, refused, tmp_path):
    config = student_run(tmp_path, "run")
    record_run(config, {})
    _checkpoint(tmp_path / "run" / "checkpoints")
    line = refused("--lr", "0.5")
    assert line.startswith(f"{tmp_path / 'run' / 'config.yaml'}: the run folder holds a run with")
    assert "another optimizer.lr; got 0.5; expected 0.001; use another run_dir" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the following arguments are required: VERB"),
        (["distil"], "invalid choice: 'distil'"),
        (["distil"], "; did you mean 'distill'?; see megatron-ext --help"),
        (["chat"], "; did you mean 'generate'?; see megatron-ext --help"),
        (["distill", "--dryrun"], "unrecognized arguments: --dryrun; did you mean '--dry-run'?"),
        (["distill", "--lr=1", "--train-iter=5"], "--train-iter=5; did you mean '--train-iters'?"),
        (["distill", "--learning-rate", "1"], "rate 1; did you mean '--lr'?; see megatron-ext dis"),
        (["distill", "--optimizer-lrr", "1"], "lrr 1; did you mean '--lr'?; see megatron-ext dis"),
        (["distill", "--teacher-model-num-layers=1"], "; did you mean '--teacher-num-layers'?"),
        (["distill", "--max-steps", "2"], "--max-steps 2; did you mean '--train-iters'?; see meg"),
        (["distill", "--num-epochs", "2"], "--num-epochs 2; did you mean '--train-iters'?"),
        (["distill", "--tp", "2"], "did you mean '--tensor-model-parallel-size'?; see megatron-e"),
        (["distill", "--output_dir=x"], "did you mean '--run-dir'?; see megatron-ext distill --h"),
        (["distill", "++training.train_iters=5"], "iters=5; did you mean '--train-iters'?; see"),
        (["distill", "teacher.pretrained_model_name_or_path=m"], "mean '--teacher-checkpoint'?"),
        (["distill", "--zzz", "2"], "unrecognized arguments: --zzz 2; see megatron-ext distill -"),
        (["projection", "biuld"], "did you mean 'build'?"),
        (["hlep"], "; did you mean 'help'?; see megatron-ext --help"),
        (["evaluate", "--taks=mmlu"], "--task; unrecognized: --taks; did you mean '--task'?; see"),
        (
            ["generate", "--modell", "x"],
            "required; unrecognized: --modell; did you mean '--model'?",
        ),
        (
            ["evaluate", "--model", "m", "--task", "mmlu", "--samples", "/"],
            "--samples /: the file cannot be written; got a folder",
        ),
        (
            ["generate", "--model", "m", "--prompt", "x", "-o", "/dev/null/x"],
            "--output /dev/null/x: the file cannot be written; got /dev/null is a file",
        ),
        (["evaluate", "--task", "mmlu"], "are required: --model/--checkpoint; see megatron-ext e"),
        (["projection", "inspect", "x", "--studnt", "y"], "did you mean '--student'?"),
        (["inspect", "hi"], "; set model, or pass --tokenizer-model"),
        (["distill", "--train-iters", "many"], "argument --train-iters: invalid int value: 'many'"),
        (["distill", "--precision", "fp8"], "argument --precision: invalid choice: 'fp8'"),
        (["distill", "--learning-rate", "1"], "unrecognized arguments: --learning-rate 1"),
        (["distill", "--train-it", "5"], "unrecognized arguments: --train-it 5"),
        (["distill"], "; expected run_dir, initial_checkpoint (or tokenizer and student), data.t"),
        (["sft", "--run-dir", "r"], "or by --initial-checkpoint --data-train --train-iters"),
        (["distill", "--config", "/nowhere.yaml"], "/nowhere.yaml: the configuration file cannot"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_command_line_is_refused(capsys, arguments, words):
    assert words in one_line(refusal(capsys, *arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        ("align", "{other}", "--student", "a", "--teacher", "b", "--html", "{kept}"),
        ("align", "--student", "a", "--teacher", "b", "--json", "{kept}", "{other}"),
        ("inspect", "--conversation", "{kept}", "--tokenizer-model", "a", "--html", "{kept}"),
        ("report", "{run}", "--output", "{kept}"),
        ("evaluate", "--model", "m", "--task", "mmlu", "--output", "{kept}"),
    ],
    ids=lambda arguments: f"{arguments[0]} {arguments[-2]}",
)
def test_a_file_that_a_verb_has_not_written_is_not_written_over(capsys, tmp_path, arguments):
    places = {name: tmp_path / name for name in ("kept", "other", "run")}
    for name in ("kept", "other"):
        places[name].write_text('{"text": "a corpus"}\n')
    before = places["kept"].read_text()
    words = [word.format_map(places) for word in arguments]
    assert "the file holds something else, and is not written over" in refusal(capsys, *words)
    assert places["kept"].read_text() == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "--\x1b]0;x\x07"],
        ["\x9b2J"],
        ["distill", "--config", "\u202e\x1b[2J.yaml"],
        ["tokenize", "--input", os.fsdecode(b"\xff\r\x1b[2K"), "--output-prefix", "x"],
    ],
    ids=["flag", "verb", "file", "bytes"],
)
def test_no_argument_is_obeyed_by_a_terminal(arguments, tmp_path):
    code, _, errors = run_forked(tmp_path, _as_program, arguments)
    assert code == 2
    assert one_line(errors).isprintable()
    assert not list(tmp_path.iterdir())


def _as_program(arguments):
    """With the streams of a program, which a caller of ``main(arguments)`` keeps."""
    sys.argv = ["megatron-ext", *arguments]
    main()


def test_a_path_that_is_not_utf8_is_printed_as_it_is(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "loss": 1.0}\n')
    page = os.fsencode(tmp_path) + b"/\xff.html"
    command = [sys.executable, "-m", "megatron_ext", "report", str(tmp_path), "--output", page]
    ended = subprocess.run(command, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == page + b"\n"


def test_what_libraries_write_is_shown_but_for_colours_and_progress_bars():
    stream = io.StringIO()
    terminal = TerminalText(stream)
    terminal.writelines(["\x1b[1;31mred\x1b[0m\n", "\r 50%|##", "\n\n", "\x1b[A\x1b[A"])
    assert stream.getvalue() == "\x1b[1;31mred\x1b[0m\n\r 50%|##\n\n\x1b[A\x1b[A"
    terminal.write("of a file: \x1b[A\x1b[2K\x1b]52;c;cm0=\x07\x9b")
    assert stream.getvalue().endswith("of a file: \\x1b[A\\x1b[2K\\x1b]52;c;cm0=\\x07\\x9b")


def test_a_run_that_needs_a_gpu_does_not_start_on_a_cpu(refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = refused("--require-gpu")
    assert line.startswith("training.require_gpu: a GPU is required and there is none; got ")


def test_other_ranks_say_which_they_are(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit):
        main(["distill", "--config", "/nowhere.yaml"])
    output = capsys.readouterr()
    assert output.err.startswith("megatron-ext: error (rank 3): /nowhere.yaml: ")
    assert output.out == ""


def test_a_start_that_fails_late_is_one_line_too_and_binds_no_folder(folder, tmp_path):
    config = student_run(folder, "late")
    shutil.copytree(folder / "teacher" / "checkpoints", tmp_path / "damaged")
    for file in (tmp_path / "damaged").glob("*/*.distcp"):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    file = write_config(tmp_path, config)
    arguments = ["distill", "--config", str(file)]
    arguments += ["--teacher-checkpoint", str(tmp_path / "damaged")]
    code, _, errors = run_forked(tmp_path, _as_program, arguments)
    assert code == 2
    assert "copy the checkpoint again" in one_line(errors)
    assert not Path(config.run_dir).exists()
    check_run_folder(config)


@pytest.mark.parametrize(
    ("flag", "value", "expected"), [("hidden-size", "96", "48"), ("rotary-base", "500", "10000")]
)
def test_a_teacher_is_the_model_that_its_run_has_trained(
    folder, tmp_path, capsys, flag, value, expected
):
    file = write_config(tmp_path, student_run(folder, "late"))
    line = one_line(refusal(capsys, "distill", "--config", file, f"--teacher-{flag}", value))
    name = flag.replace("-", "_")
    assert line.partition(": the checkpoint")[2] == (
        f" is of a model with another {name}; got {value}; expected {expected}; give the model "
        "the keys that its run has in config.yaml under student"
    )


def test_first_weights_are_of_the_students_model(folder, tmp_path, capsys):
    file = write_config(tmp_path, student_run(folder, "late"))
    start = ("--initial-checkpoint", folder / "teacher" / "checkpoints", "--num-layers", 7)
    line = one_line(refusal(capsys, "distill", "--config", file, *start))
    assert "is of a model with another num_layers; got 7" in line


def test_a_student_may_rotate_positions_otherwise_than_the_checkpoint_it_starts_from(folder):
    checkpoint = folder / "teacher" / "checkpoints" / "iter_0000001"
    config = student_run(folder, "positions")
    model = config.teacher.model
    turned = replace(model, rotary_base=500, seq_length=2 * model.seq_length)
    assert check_model(checkpoint, turned, learns=True)
    with pytest.raises(CheckpointError, match="another rotary_base"):
        check_model(checkpoint, turned)
    with pytest.raises(CheckpointError, match="another layernorm_epsilon"):
        check_model(checkpoint, replace(model, layernorm_epsilon=1e-3), learns=True)


def _checkpoint(folder):
    """What tells a folder of checkpoints from others, without any weights."""
    (folder / "iter_0000001").mkdir(parents=True)
    torch.save({}, folder / "iter_0000001" / "common.pt")
    (folder / "latest").write_text("iter_0000001")


def _section(values, keys):
    for key in filter(None, keys.split(".")):
        values = values[key]
    return values

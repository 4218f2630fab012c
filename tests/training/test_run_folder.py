import multiprocessing
import os
import shutil
from dataclasses import replace
from pathlib import Path
from socket import gethostname

import pytest
import yaml

from megatron_ext.errors import CheckpointError, ConfigError, DataError
from megatron_ext.huggingface.checkpoint_files import GENERATION_FILE, SIDE_FOLDER
from megatron_ext.training.configuration.config import DistillConfig
from megatron_ext.training.configuration.model import OF_EXPERTS, OF_HYBRID
from megatron_ext.training.configuration.yaml_file import read_config_file
from megatron_ext.training.run_folder import (
    CONFIG_FILE,
    DATA_FILE,
    check_run_folder,
    check_same_text,
    check_still_there,
    disown_run_folder,
    forget_later_lines,
    own_run_folder,
    record_run,
)
from megatron_ext.training.run_sources import own_stops
from megatron_ext.typed_mapping import build_config
from tests.training.tiny_run import changed, student_run

TEXT = {"train": {"sha256": "aa"}, "validation": None}


def _own_and_wait(folder, connection):
    own_run_folder(folder)
    connection.send(os.getpid())
    connection.recv()


def test_a_folder_has_one_run_until_that_ends_however_it_ends(tmp_path):
    run, (here, there) = tmp_path / "run", multiprocessing.Pipe()
    other = multiprocessing.get_context("fork").Process(target=_own_and_wait, args=(run, there))
    other.start()
    pid = here.recv()
    with pytest.raises(ConfigError, match=rf"not ended; got process {pid} on {gethostname()};"):
        own_run_folder(run)
    other.kill()
    other.join()
    own_run_folder(run)
    own_run_folder(run)
    check_still_there(run)
    disown_run_folder(run)
    assert not run.exists()


def test_a_folder_that_is_removed_meanwhile_is_an_error(tmp_path):
    own_run_folder(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(ConfigError, match="removed while the run went on; got no folder"):
        check_still_there(tmp_path / "run")
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match="got another folder"):
        check_still_there(tmp_path / "run")
    disown_run_folder(tmp_path / "run")


@pytest.fixture
def config(tmp_path):
    """A run whose teacher has a checkpoint."""
    _add_checkpoint(tmp_path / "teacher" / "checkpoints", "iter_0000001")
    return student_run(tmp_path, "run")


def _add_checkpoint(folder, name):
    (folder / name).mkdir(parents=True)
    (folder / name / "metadata.json").write_text("{}")
    (folder / "latest").write_text(f"{name}\n")


@pytest.fixture
def started(config):
    """The folder of a run that has a checkpoint."""
    record_run(config, TEXT)
    folder = Path(config.run_dir)
    _add_checkpoint(folder / "checkpoints", "iter_0000002")
    return folder


def with_leaf(config, keys, value):
    """A copy with the leaf at ``keys``, as in ``optimizer.lr``, set."""
    name, _, inner = keys.partition(".")
    section = getattr(config, name)
    return changed(config, **{name: with_leaf(section, inner, value) if inner else value})


def test_a_new_run_passes_and_the_check_writes_nothing(config, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    check_run_folder(config)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_recorded_configuration_reads_back_as_the_same_run(config, started):
    recorded = build_config(DistillConfig, *read_config_file(started / CONFIG_FILE))
    teacher = str(Path(config.teacher.checkpoint) / "iter_0000001")
    assert recorded == changed(config, teacher={"checkpoint": teacher})
    assert (started / DATA_FILE).exists()


def test_a_teacher_may_move_but_not_be_trained_further(config, started, tmp_path):
    _add_checkpoint(tmp_path / "moved", "iter_0000001")
    check_run_folder(changed(config, teacher={"checkpoint": str(tmp_path / "moved")}))
    _add_checkpoint(tmp_path / "teacher" / "checkpoints", "iter_0000009")
    with pytest.raises(ConfigError, match=r"another teacher\.checkpoint; got 'iter_0000009'"):
        check_run_folder(config)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        ("training.train_iters", 50),
        ("training.save_interval", 7),
        ("training.micro_batch_size", 4),
        ("training.keep_checkpoints", 5),
        ("training.vocabulary_layout", "co_sharded"),
        ("parallel.tensor_model_parallel_size", 2),
        ("parallel.expert_tensor_parallel_size", 1),
        ("tokenizer.model", "elsewhere.json"),
        ("data.train", ("elsewhere.jsonl",)),
        ("initial_checkpoint", "elsewhere"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_makes_no_other_experiment_may_change(config, started, keys, value):
    check_run_folder(with_leaf(config, keys, value))


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        ("optimizer.lr", 0.5),
        ("training.seed", 1),
        ("training.global_batch_size", 16),
        ("student.num_layers", 4),
        ("teacher.model.seq_length", 99),
        ("loss.kd_weight", 0.0),
        ("data.append_eod", False),
        ("parallel.use_distributed_optimizer", True),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_makes_another_experiment_is_refused_by_name(config, started, keys, value):
    with pytest.raises(ConfigError) as caught:
        check_run_folder(with_leaf(config, keys, value))
    assert f"another {keys}; got {value!r}; expected " in str(caught.value)
    assert str(started / CONFIG_FILE) in str(caught.value)


def test_the_weights_of_a_blend_are_kept_where_its_paths_may_change(config):
    blend = with_leaf(config, "data.train", ("0.5", "a.jsonl", "0.5", "b.jsonl"))
    record_run(blend, TEXT)
    _add_checkpoint(Path(config.run_dir) / "checkpoints", "iter_0000002")
    check_run_folder(with_leaf(config, "data.train", ("0.5", "c.jsonl", "0.50", "d.jsonl")))
    words = r"another data\.train; got \[0\.9, 0\.1\]; expected \[0\.5, 0\.5\]"
    with pytest.raises(ConfigError, match=words):
        check_run_folder(with_leaf(config, "data.train", ("0.9", "a.jsonl", "0.1", "b.jsonl")))


def test_a_run_gets_and_loses_no_teacher(config, started):
    alone = replace(config, teacher=None, loss=replace(config.loss, objective="next_token"))
    with pytest.raises(ConfigError, match="began with; got no teacher; expected teacher; use"):
        check_run_folder(alone)
    record_run(alone, TEXT)
    with pytest.raises(ConfigError, match="began with; got teacher; expected no teacher; use"):
        check_run_folder(config)
    several = replace(config, teacher=None, teachers={"a": config.teacher, "b": config.teacher})
    record_run(config, TEXT)
    with pytest.raises(ConfigError, match=r"got teachers\.a, teachers\.b; expected teacher; use"):
        check_run_folder(several)


def test_a_resumed_run_stops_where_it_did_though_its_first_folder_is_gone(config, started):
    first = started.parent / "first"
    for folder in (first, started / SIDE_FOLDER):
        folder.mkdir()
        (folder / GENERATION_FILE).write_text('{"eos_token_id": [2, 7]}')
    config = replace(config, initial_checkpoint=str(first))
    assert own_stops(config) == {2, 7}
    shutil.rmtree(first)
    assert own_stops(config) == {2, 7}
    shutil.rmtree(started / "checkpoints")
    assert own_stops(config) == set()


def test_where_a_teacher_runs_may_change_and_what_it_sends_may_not(config, started):
    serving = {"ranks": 2, "tensor_model_parallel_size": 2, "prefetch": 3}
    elsewhere = changed(config, teacher={"placement": "own_ranks", "serving": serving})
    check_run_folder(elsewhere)
    with pytest.raises(ConfigError, match=r"another teacher\.serving\.targets"):
        check_run_folder(changed(elsewhere, teacher={"serving": {"targets": "topk"}}))
    # A run from before teachers could be elsewhere has no such keys.
    values = yaml.safe_load((started / CONFIG_FILE).read_text())
    del values["teacher"]["serving"]
    (started / CONFIG_FILE).write_text(yaml.safe_dump(values))
    check_run_folder(elsewhere)


def test_the_library_of_a_teacher_may_change_and_with_it_what_its_folder_says_of_the_model(
    config, started
):
    whole = changed(config, teacher={"library": "huggingface", "model": {"layernorm_epsilon": 0.1}})
    check_run_folder(whole)
    with pytest.raises(ConfigError, match=r"another teacher\.model\.seq_length"):
        check_run_folder(changed(whole, teacher={"model": {"seq_length": 7}}))
    with pytest.raises(ConfigError, match=r"another teacher\.model\.layernorm_epsilon"):
        check_run_folder(changed(whole, teacher={"library": "megatron"}))


@pytest.mark.parametrize(
    ("keys", "added"),
    [(OF_EXPERTS, ("num_experts", 4)), (OF_HYBRID, ("attention_output_gate", True))],
    ids=["experts", "linear attention"],
)
def test_a_run_from_before_a_part_of_models_goes_on_and_gets_none(config, started, keys, added):
    values = yaml.safe_load((started / CONFIG_FILE).read_text())
    for model in (values["student"], values["teacher"]["model"]):
        for name in keys:
            del model[name]
    (started / CONFIG_FILE).write_text(yaml.safe_dump(values))
    check_run_folder(config)
    name, value = added
    with pytest.raises(ConfigError, match=rf"another student\.{name}; got {value}"):
        check_run_folder(changed(config, student={name: value}))
    with pytest.raises(ConfigError, match=rf"another teacher\.model\.{name}; got {value}"):
        check_run_folder(changed(config, teacher={"model": {name: value}}))


def test_a_start_that_left_no_checkpoint_binds_nothing(config):
    record_run(config, TEXT)
    check_run_folder(changed(config, optimizer={"lr": 0.5}))
    check_same_text(Path(config.run_dir), {"train": {"sha256": "bb"}, "validation": None})


def test_a_run_that_goes_on_with_another_text_is_refused(config, started):
    check_same_text(Path(config.run_dir), TEXT)
    with pytest.raises(ConfigError, match=r"another text in data\.train; got sha256 bb; expect"):
        check_same_text(Path(config.run_dir), {**TEXT, "train": {"sha256": "bb"}})
    with pytest.raises(ConfigError, match=r"another text in data\.validation"):
        check_same_text(Path(config.run_dir), {**TEXT, "validation": {"sha256": "cc"}})


def test_a_recorded_configuration_that_was_spoilt_is_refused_with_its_line(config, started):
    (started / CONFIG_FILE).write_text("run_dir: [\n")
    with pytest.raises(ConfigError, match=r"config\.yaml:2: the configuration file is not valid"):
        check_run_folder(config)


def test_a_latest_checkpoint_that_is_gone_is_refused_before_anything_is_read(config, started):
    shutil.rmtree(started / "checkpoints" / "iter_0000002")
    with pytest.raises(CheckpointError, match="the latest checkpoint is missing"):
        check_run_folder(config)


@pytest.mark.parametrize("name", ["run", "run/deeper"], ids=["itself", "above"])
def test_a_file_in_the_way_is_refused(config, tmp_path, name):
    (tmp_path / "run").touch()
    with pytest.raises(ConfigError, match=r"run_dir: the run folder cannot be written.* is a file"):
        check_run_folder(changed(config, run_dir=str(tmp_path / name)))


def test_a_folder_without_permission_is_refused(config, tmp_path, monkeypatch):
    # What access() says is set here: the superuser may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(ConfigError, match=f"{tmp_path} is read-only; change run_dir"):
        check_run_folder(config)


def test_a_log_loses_lines_of_later_iterations_and_one_cut_short(tmp_path):
    log = tmp_path / "rollouts.jsonl"
    log.write_text('{"iteration": 1}\n{"iteration": 2}\n{"iter')
    forget_later_lines(log, last_iteration=1)
    assert log.read_text() == '{"iteration": 1}\n'


def test_a_line_of_a_log_without_an_iteration_is_refused_with_its_place(tmp_path):
    log = tmp_path / "rollouts.jsonl"
    log.write_text('{"iteration": 1}\n[]\n')
    with pytest.raises(DataError, match=r"rollouts\.jsonl:2: the line names no iteration"):
        forget_later_lines(log, last_iteration=1)

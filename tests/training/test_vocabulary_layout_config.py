"""Where a vocabulary layout can be asked for."""

import dataclasses
from pathlib import Path

import pytest
import torch

from megatron_ext.errors import ConfigError
from megatron_ext.training.inputs import read_inputs
from megatron_ext.training.run_folder import check_run_folder, record_run
from tests.training.tiny_run import student_run, write_corpus, write_rank_list


@pytest.fixture
def config(tmp_path):
    """A run with a layout, and a teacher that has a checkpoint."""
    write_corpus(tmp_path)
    write_rank_list(tmp_path)
    _add_checkpoint(tmp_path / "teacher" / "checkpoints")
    return changed(student_run(tmp_path, "run"), vocabulary_layout="co_sharded")


def _add_checkpoint(folder):
    (folder / "iter_0000001").mkdir(parents=True)
    (folder / "iter_0000001" / "metadata.json").write_text("{}")
    torch.save({}, folder / "iter_0000001" / "common.pt")
    (folder / "latest").write_text("iter_0000001\n")


def changed(config, **training):
    return dataclasses.replace(config, training=dataclasses.replace(config.training, **training))


def test_an_objective_with_a_projection_may_have_one(config):
    inputs = read_inputs(config, world_size=1)
    assert [teacher.projection for teacher in inputs.teachers.values()] == [None]


def test_a_teacher_may_be_named_by_its_run_and_the_checkpoint_is_told(config, tmp_path):
    assert config.teacher is not None
    teacher = dataclasses.replace(config.teacher, checkpoint=str(tmp_path / "teacher"))
    inputs = read_inputs(dataclasses.replace(config, teacher=teacher), world_size=1)
    taken = f"{tmp_path / 'teacher' / 'checkpoints' / 'iter_0000001'}: the latest checkpoint of"
    assert any(warning.startswith(taken) for warning in inputs.warnings)


def test_a_run_may_go_on_with_or_without_a_layout(config):
    record_run(config, {"train": None, "validation": None})
    _add_checkpoint(Path(config.run_dir) / "checkpoints")
    check_run_folder(changed(config, vocabulary_layout="original"))
    with pytest.raises(ConfigError, match=r"another training\.seed"):
        check_run_folder(changed(config, seed=7))

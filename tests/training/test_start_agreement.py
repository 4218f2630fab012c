"""What ranks compare before they start: what files hold, wherever they lie, read once."""

import dataclasses
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megatron_ext.projection import SparseProjection
from megatron_ext.tokenizers import build_tokenizer
from megatron_ext.tokenizers.identity import tokenizer_identity
from megatron_ext.training.inputs import Inputs, TeacherInputs, read_inputs
from megatron_ext.training.run_data import RunData
from megatron_ext.training.start_agreement import start_of
from tests.data.readers import student_tokenizer, teacher_tokenizer
from tests.training.tiny_run import changed, student_run, write_rank_list


def rank_list(path):
    return build_tokenizer(student_run(path.parent, "run").tokenizer)


@pytest.fixture(scope="module")
def started(folder):
    """A run whose teacher has the rank list, and a projection of one entry."""
    config = changed(student_run(folder, "run"), data={"validation": ()})
    data = RunData.read(config, student_tokenizer(), {"teacher": (teacher_tokenizer(), 53)})
    projection = SparseProjection.from_entries([0], [1], [1.0], (4, 4))
    teacher = TeacherInputs(tokenizer=rank_list(folder / "ranks.json"), projection=projection)
    inputs = Inputs(tokenizer=student_tokenizer(), teachers={"teacher": teacher}, data=data)
    return config, inputs


def differing(started, **teacher):
    """Keys in which a rank differs whose teacher is another in ``teacher``."""
    config, inputs = started
    its = dataclasses.replace(inputs.teachers["teacher"], **teacher)
    other = start_of(config, dataclasses.replace(inputs, teachers={"teacher": its}))
    own = start_of(config, inputs)
    return {key for key in {**own, **other} if own.get(key) != other.get(key)}


def test_the_same_is_the_same_in_another_object(started, folder):
    assert not differing(started, tokenizer=rank_list(folder / "ranks.json"))


def test_a_teacher_with_another_vocabulary_under_one_path_differs(started):
    assert differing(started, tokenizer=teacher_tokenizer()) == {
        "vocabulary of teacher.tokenizer",
        "content of teacher.tokenizer",
    }


def test_a_teacher_whose_file_differs_in_more_than_its_vocabulary_differs(started, tmp_path):
    path = write_rank_list(tmp_path)
    path.write_text(path.read_text() + "\n")
    assert differing(started, tokenizer=rank_list(path)) == {"content of teacher.tokenizer"}


def test_a_projection_with_other_shares_under_one_path_differs(started):
    other = SparseProjection.from_entries([0], [2], [1.0], (4, 4))
    assert differing(started, projection=other) == {"content of teacher.projection"}


def test_a_tokenizer_file_is_read_once_until_it_changes(tmp_path):
    path = write_rank_list(tmp_path)
    tokenizer = rank_list(path)
    with patch.object(Path, "read_bytes", autospec=True, side_effect=Path.read_bytes) as read:
        first = tokenizer_identity(tokenizer)
        assert tokenizer_identity(tokenizer) == first
        assert read.call_count == 1
        path.write_text(path.read_text() + "\n")
        assert tokenizer_identity(tokenizer)["file"] != first["file"]
        assert read.call_count == 2


def test_a_teacher_may_be_named_by_its_run_and_the_checkpoint_is_told(folder):
    checkpoint = folder / "teacher" / "checkpoints" / "iter_0000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "metadata.json").write_text("{}")
    torch.save({}, checkpoint / "common.pt")
    (checkpoint.parent / "latest").write_text("iter_0000001\n")
    config = changed(
        student_run(folder, "run"),
        teacher={"checkpoint": str(folder / "teacher")},
        training={"vocabulary_layout": "co_sharded"},
    )
    inputs = read_inputs(config, world_size=1)
    assert inputs.teachers["teacher"].projection is None
    taken = f"{checkpoint}: the latest checkpoint of"
    assert any(warning.startswith(taken) for warning in inputs.warnings)

import pytest

from megatron_ext.errors import CheckpointError
from megatron_ext.training.checkpoint_folder import (
    checkpoint_path,
    find_checkpoint,
    latest_checkpoint,
    set_latest_checkpoint,
)


def make(folder, *iterations):
    paths = [checkpoint_path(folder, iteration) for iteration in iterations]
    for path in paths:
        path.mkdir(parents=True)
        (path / "metadata.json").write_text("{}")
    return paths


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_latest_checkpoint_is_the_one_that_was_set(tmp_path):
    first, second = make(tmp_path, 20, 40)
    assert latest_checkpoint(tmp_path) is None
    set_latest_checkpoint(second, keep=2)
    assert latest_checkpoint(tmp_path) == second
    set_latest_checkpoint(first, keep=2)
    assert latest_checkpoint(tmp_path) == first


def test_only_the_newest_are_kept(tmp_path):
    paths = make(tmp_path, 20, 100, 40, 60)
    set_latest_checkpoint(paths[1], keep=2)
    assert names(tmp_path) == ["iter_0000060", "iter_0000100", "latest"]


def test_going_back_to_an_earlier_checkpoint_removes_neither_it_nor_later_ones(tmp_path):
    make(tmp_path, 40, 60)
    (again,) = make(tmp_path, 30)
    set_latest_checkpoint(again, keep=1)
    assert latest_checkpoint(tmp_path) == again
    assert names(tmp_path) == ["iter_0000030", "iter_0000040", "iter_0000060", "latest"]


def test_a_folder_that_is_not_there_has_no_latest(tmp_path):
    assert latest_checkpoint(tmp_path / "absent") is None


@pytest.mark.parametrize("name", ["iter_0000080", ""], ids=["gone", "empty"])
def test_a_pointer_to_nothing_lists_what_there_is(tmp_path, name):
    make(tmp_path, 20, 40)
    (tmp_path / "latest").write_text(name)
    with pytest.raises(CheckpointError) as caught:
        latest_checkpoint(tmp_path)
    assert f"got {name!r}; expected one of iter_0000020, iter_0000040; write" in str(caught.value)


@pytest.mark.parametrize("name", ["../other/iter_0000020", "/{}/iter_0000020", ".", "..", "tmp"])
def test_a_pointer_out_of_its_folder_is_refused(tmp_path, name):
    make(tmp_path / "run", 40)
    make(tmp_path / "other", 20)
    make(tmp_path / "run" / "tmp")
    (tmp_path / "run" / "latest").write_text(name.format(tmp_path / "other"))
    with pytest.raises(CheckpointError, match="expected one of iter_0000040"):
        latest_checkpoint(tmp_path / "run")


def test_a_pointer_that_is_no_text_is_refused_in_one_line(tmp_path):
    make(tmp_path, 20)
    for content in (b"\xff\xfeiter", b"iter_\x00", b"\x1b]0;x\x07", b"iter_" * 99_999):
        (tmp_path / "latest").write_bytes(content)
        with pytest.raises(CheckpointError, match="latest") as caught:
            latest_checkpoint(tmp_path)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 500 + len(str(tmp_path)) * 2


def test_a_checkpoint_is_found_by_its_own_folder_or_its_runs(tmp_path):
    first, second = make(tmp_path / "checkpoints", 20, 40)
    set_latest_checkpoint(second, keep=2)
    for folder in (tmp_path, tmp_path / "checkpoints", second):
        assert find_checkpoint(str(folder), where="x") == second
    assert find_checkpoint(str(first), where="x") == first


def test_an_unfinished_checkpoint_is_none(tmp_path):
    partial = tmp_path / ".iter_0000020.partial"
    partial.mkdir()
    for path in (tmp_path, partial):
        with pytest.raises(CheckpointError, match="no checkpoint found"):
            find_checkpoint(str(path), where="x")


def test_a_missing_checkpoint_is_refused_by_its_key_and_path(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(str(tmp_path / "absent"), where="teacher.checkpoint")
    absent = tmp_path / "absent"
    assert str(caught.value).startswith(
        f"teacher.checkpoint: no checkpoint found; got {absent}, which does not exist; "
    )

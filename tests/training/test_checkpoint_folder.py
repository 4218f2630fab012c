"""The latest checkpoint is found, and damage to any file of one, which is named."""

import io
import json
import types
import zlib

import pytest

from megatron_ext.errors import CheckpointError
from megatron_ext.training.checkpoints.folder import (
    checkpoint_path,
    find_checkpoint,
    latest_checkpoint,
    set_latest_checkpoint,
)
from megatron_ext.training.checkpoints.manifest import (
    MANIFEST_FILE,
    Manifest,
    summed_writes,
    write_manifest,
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
    set_latest_checkpoint(second, keep=2)
    assert latest_checkpoint(tmp_path) == second
    set_latest_checkpoint(first, keep=2)
    assert latest_checkpoint(tmp_path) == first


def test_the_latest_checkpoint_is_the_newest_whole_one_where_no_file_names_it(tmp_path):
    _, second = make(tmp_path, 20, 40)
    (tmp_path / "iter_0000060").mkdir()
    assert latest_checkpoint(tmp_path) == second


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


CONTENT = bytes(range(256)) * 40


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "__0_0.distcp").write_bytes(CONTENT)
    (tmp_path / "common.pt").write_bytes(CONTENT[:99])
    (tmp_path / "sub" / "file").write_bytes(b"x")
    (tmp_path / "empty").write_bytes(b"")
    write_manifest(tmp_path)
    return tmp_path


def test_a_whole_checkpoint_passes_in_any_number_of_parts(folder):
    manifest = Manifest.of(folder)
    for parts in (1, 2, 7):
        for part in range(parts):
            manifest.check(part=part, parts=parts)
    assert manifest.read("common.pt") == CONTENT[:99]


def test_each_file_is_in_one_part(folder):
    (folder / "common.pt").write_bytes(b"x")
    failed = 0
    for part in range(3):
        try:
            Manifest.of(folder).check(part=part, parts=3)
        except CheckpointError:
            failed += 1
    assert failed == 1


@pytest.mark.parametrize("name", ["__0_0.distcp", "common.pt", "sub/file"])
@pytest.mark.parametrize("damage", ["gone", "longer", "cut", "flip"])
def test_damage_is_refused_with_the_file(folder, name, damage):
    path = folder / name
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "longer":
        path.write_bytes(content + b"\0")
    elif damage == "cut":
        path.write_bytes(content[:-1])
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match="checkpoint is") as caught:
        Manifest.of(folder).check()
    assert str(caught.value).startswith(str(path))
    assert "write the name of an earlier one into the file latest" in str(caught.value)
    with pytest.raises(CheckpointError):
        Manifest.of(folder).read(name)
    Manifest.of(folder, verify=False).check()


def test_a_checkpoint_without_a_manifest_passes(folder):
    (folder / MANIFEST_FILE).unlink()
    Manifest.of(folder).check()
    assert Manifest.of(folder).read("common.pt") == CONTENT[:99]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"files": 3}',
        '{"files": {"a": 3}}',
        '{"files": {"../a": [0, 0]}, "checksum": "crc32"}',
        "[" * 100_000,
        "\udcff",
    ],
)
def test_a_manifest_that_is_none_is_refused(folder, text):
    (folder / MANIFEST_FILE).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match="list of files cannot be read"):
        Manifest.of(folder)


def test_no_bit_of_a_manifest_flips_unseen(folder):
    whole = (folder / MANIFEST_FILE).read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        (folder / MANIFEST_FILE).write_bytes(changed)
        with pytest.raises(CheckpointError):
            Manifest.of(folder).check()


def test_a_pipe_or_a_folder_in_place_of_a_file_is_refused_at_once(folder):
    (folder / "common.pt").unlink()
    (folder / "common.pt").mkdir()
    with pytest.raises(CheckpointError, match="missing"):
        Manifest.of(folder).read("common.pt")


def test_a_file_is_summed_as_it_is_written_and_not_read_again(tmp_path):
    writer = types.ModuleType("writer")
    path = tmp_path / "__0_0.distcp"
    with summed_writes(writer), writer.open(path, "wb") as file:
        assert file.tell() == 0
        file.write(CONTENT)
        file.write(io.BytesIO(CONTENT).getbuffer())
    assert not hasattr(writer, "open")
    # Other bytes of the same length: the sum is the writer's.
    path.write_bytes(bytes(2 * len(CONTENT)))
    write_manifest(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [path.name, MANIFEST_FILE]
    files = json.loads((tmp_path / MANIFEST_FILE).read_text())["files"]
    assert files == {path.name: [2 * len(CONTENT), zlib.crc32(CONTENT + CONTENT)]}
    with pytest.raises(CheckpointError, match="checksum"):
        Manifest.of(tmp_path).check()

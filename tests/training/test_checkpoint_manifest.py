"""What was saved is what is loaded: damage to any file of a checkpoint is found, and named."""

import io
import json
import types
import zlib

import pytest

from megatron_ext.errors import CheckpointError
from megatron_ext.training.checkpoint_folder import (
    MANIFEST_FILE,
    Manifest,
    summed_writes,
    write_manifest,
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

"""A projection on disk: whole, for its own pair, or not read."""

import os
from dataclasses import replace

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import megatron_ext
from megatron_ext.errors import ProjectionError
from megatron_ext.projection import SparseProjection
from tests.projection.greedy_tokenizer import GreedyTokenizer

STUDENT = GreedyTokenizer(["<s>", b"aa", b"ab", b"b", "<mine>"], bos="<s>")
TEACHER = GreedyTokenizer([b"a", b"b", "<bos>"], bos="<bos>")
ARRAYS = ("indptr", "indices", "values", "is_exact_row")


@pytest.fixture
def projection():
    return SparseProjection.from_tokenizers(STUDENT, TEACHER)


@pytest.fixture
def path(tmp_path, projection):
    path = tmp_path / "pair.safetensors"
    projection.save(path)
    return path


def assert_equal(first, second):
    for name in ARRAYS:
        left, right = getattr(first, name), getattr(second, name)
        assert left.dtype == right.dtype
        assert left.tobytes() == right.tobytes()
    assert first.shape == second.shape
    assert first.vocab_sizes == second.vocab_sizes
    assert first.metadata == second.metadata


def rewrite(path, metadata=(), without=()):
    """The same file with other metadata, or without some arrays."""
    with safe_open(path, framework="numpy") as file:
        entries = {**file.metadata(), **dict(metadata)}
    arrays = {n: a for n, a in load_file(path).items() if n not in without}
    save_file(arrays, path, metadata={n: v for n, v in entries.items() if v is not None})


def test_what_is_saved_is_loaded_bit_for_bit(path, projection):
    assert_equal(SparseProjection.load(path), projection)
    assert_equal(SparseProjection.load(str(path), STUDENT, TEACHER), projection)


def test_the_demo_pair_is_loaded_bit_for_bit(tmp_path, tekken, sentencepiece):
    projection = SparseProjection.from_tokenizers(sentencepiece, tekken)
    projection.save(tmp_path / "demo.safetensors")
    loaded = SparseProjection.load(tmp_path / "demo.safetensors", sentencepiece, tekken)
    assert_equal(loaded, projection)


@pytest.mark.parametrize(
    "rows", [pytest.param((1, 8), id="padded block"), pytest.param((0, 0), id="no row")]
)
def test_a_save_of_some_rows_replaces_the_file_that_was_there(path, projection, rows):
    block = projection.row_block(*rows)
    block.save(path)
    assert_equal(SparseProjection.load(path), block)


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_a_projection_for_another_pair_is_refused(path, role):
    other = GreedyTokenizer([b"a", b"b", "<pad>"])
    with pytest.raises(ProjectionError, match=f"built for another {role}.*got.*expected.*build it"):
        SparseProjection.load(path, **{role: other})


def test_a_missing_file_says_how_to_build_it(tmp_path):
    with pytest.raises(ProjectionError, match=r"there is no projection file.*from_tokenizers"):
        SparseProjection.load(tmp_path / "none.safetensors")


def test_a_padded_projection_is_loaded_with_the_sizes_of_its_vocabularies(tmp_path, projection):
    padded = projection.padded(8, 6)
    padded.save(tmp_path / "padded.safetensors")
    loaded = SparseProjection.load(tmp_path / "padded.safetensors", STUDENT, TEACHER)
    assert_equal(loaded, padded)
    assert loaded == padded != projection
    assert (loaded.shape, loaded.vocab_sizes) == ((8, 6), (5, 3))


def test_a_file_of_version_1_is_loaded(path, projection):
    rewrite(path, {"format_version": "1", **dict.fromkeys(("vocab_sizes", "sha256", "written_by"))})
    assert_equal(SparseProjection.load(path, STUDENT, TEACHER), projection)


def test_a_file_says_its_format_and_what_wrote_it(path):
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    assert metadata["format"] == "megatron-ext-projection"
    assert metadata["format_version"] == "2"
    assert metadata["written_by"] == f"megatron-ext {megatron_ext.__version__}"
    assert metadata["shape"] == metadata["vocab_sizes"] == "5x3"


def test_a_file_that_is_cut_anywhere_is_refused(path):
    content = path.read_bytes()
    for kept in range(len(content)):
        path.write_bytes(content[:kept])
        with pytest.raises(ProjectionError, match="not a complete safetensors file"):
            SparseProjection.load(path)


def test_a_file_whose_end_was_never_written_is_refused(path):
    content = path.read_bytes()
    header_stop = 8 + int.from_bytes(content[:8], "little")
    for kept in range(header_stop, len(content) - 1):
        if any(content[kept:]):
            path.write_bytes(content[:kept].ljust(len(content), b"\0"))
            with pytest.raises(ProjectionError, match="the projection is not as it was written"):
                SparseProjection.load(path)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"PK\x03\x04 a pickle" * 20, id="pickle"),
        pytest.param(b"\xff" * 64, id="noise"),
        pytest.param(b'{"indptr": [0]}', id="json"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path, content):
    path = tmp_path / "foreign.pt"
    path.write_bytes(content)
    with pytest.raises(ProjectionError, match=r"not a complete (safetensors|torch) file"):
        SparseProjection.load(path)


# A header of 640 bytes begins as a pickle does.
@pytest.mark.parametrize("width", range(600, 660))
def test_what_is_ours_is_told_from_a_pickle_by_its_header(tmp_path, projection, width):
    path = tmp_path / "pair.safetensors"
    replace(projection, metadata={**projection.metadata, "note": " " * width}).save(path)
    assert SparseProjection.load(path).metadata["note"] == " " * width


def test_a_directory_is_refused(tmp_path):
    with pytest.raises(ProjectionError, match="not a complete safetensors file"):
        SparseProjection.load(tmp_path)


@pytest.mark.parametrize(
    ("metadata", "without", "message"),
    [
        pytest.param({"format": None}, (), "without a format entry", id="model weights"),
        pytest.param({"format": "other"}, (), "got other version 2", id="other format"),
        pytest.param({"format_version": "3"}, (), "version 3; .* 1 or 2", id="newer version"),
        pytest.param({"shape": "many"}, (), "does not say its shape; got 'many'", id="no shape"),
        pytest.param({"vocab_sizes": None}, (), "does not say its vocab sizes", id="no sizes"),
        pytest.param({"vocab_sizes": "6x3"}, (), "got 5 ids for 6 tokens", id="more tokens"),
        pytest.param({"shape": "6x3"}, (), "indptr", id="other shape"),
        pytest.param({}, ("values",), "incomplete; got no values", id="no values"),
    ],
)
def test_a_file_that_is_no_projection_is_refused(path, metadata, without, message):
    rewrite(path, metadata, without)
    with pytest.raises(ProjectionError, match=message) as refusal:
        SparseProjection.load(path)
    assert str(path) in str(refusal.value)


def test_a_file_with_a_changed_share_is_refused(path):
    arrays = load_file(path)
    content = path.read_bytes()
    at = content.index(arrays["values"].tobytes())
    path.write_bytes(content[:at] + np.float32(0.5).tobytes() + content[at + 4 :])
    with pytest.raises(ProjectionError, match="the projection is not as it was written"):
        SparseProjection.load(path)
    rewrite(path, {"format_version": "1"})
    with pytest.raises(ProjectionError, match="row 0 of the projection does not sum to 1"):
        SparseProjection.load(path)


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(path, projection, fill_disk):
    before = path.read_bytes()
    fill_disk()
    with pytest.raises(ProjectionError, match="cannot be written; got No space left on device"):
        projection.row_block(0, 2).save(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_save_that_is_interrupted_leaves_no_part(tmp_path, projection, monkeypatch):
    def interrupt(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        projection.save(tmp_path / "pair.safetensors")
    assert os.listdir(tmp_path) == []


def test_a_missing_folder_says_so(tmp_path, projection):
    with pytest.raises(ProjectionError, match=r"cannot be written.*create the folder"):
        projection.save(tmp_path / "none" / "pair.safetensors")

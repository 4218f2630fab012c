"""Embeddings in memory and in files."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

from megatron_ext.errors import ProjectionError
from megatron_ext.projection import EmbeddingMatrix

ROWS = np.array([[1, -2, 0.5], [0, 3.5, -0.25]], np.float32)
IDS = np.array([1, 0, 1])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rows_of_arrays_and_files_are_float32(tmp_path, dtype):
    save_file({"embed": ROWS.astype(dtype)}, tmp_path / "a.safetensors")
    for source in (ROWS.astype(dtype), tmp_path / "a.safetensors", str(tmp_path / "a.safetensors")):
        matrix = EmbeddingMatrix(source)
        assert matrix.shape == (2, 3)
        assert matrix.take(IDS).dtype == np.float32
        assert np.array_equal(matrix.take(IDS), ROWS[IDS])


def test_bfloat16_is_read_without_torch(tmp_path):
    values = torch.randn(50, 7).bfloat16()
    save_torch_file({"norm": torch.zeros(3), "embed": values}, tmp_path / "a.safetensors")
    matrix = EmbeddingMatrix(tmp_path / "a.safetensors")
    assert np.array_equal(matrix.take(np.arange(50)), values.float().numpy())


def test_a_tensor_is_chosen_by_name(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"embed": ROWS, "head": ROWS + 1, "ids": np.zeros((2, 2), np.int64)}, path)
    assert np.array_equal(EmbeddingMatrix(path, "head").take(IDS), ROWS[IDS] + 1)
    for name in (None, "tail", "ids"):
        with pytest.raises(ProjectionError, match=r"got .*; expected one of embed, head; name the"):
            EmbeddingMatrix(path, name)


@pytest.mark.parametrize("kept", [0, 7, 20, -1])
def test_a_truncated_file_is_refused(tmp_path, kept):
    path = tmp_path / "a.safetensors"
    save_file({"embed": ROWS}, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ProjectionError, match=r"cannot be read|no whole safetensors file"):
        EmbeddingMatrix(path)


def test_a_header_that_lies_is_refused(tmp_path):
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 20]}
    header = json.dumps({"embed": entry}).encode()
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
    with pytest.raises(ProjectionError, match="no whole safetensors file"):
        EmbeddingMatrix(tmp_path / "a")


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 64, b"PK\x03\x04 a pickle" * 20, (2).to_bytes(8, "little") + b"[]"],
    ids=["empty", "noise", "pickle", "list"],
)
def test_a_foreign_file_is_refused(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ProjectionError, match=r"cannot be read|no whole safetensors file"):
        EmbeddingMatrix(tmp_path / "a")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ProjectionError, match=r"cannot be read; got .*No such file"):
        EmbeddingMatrix(tmp_path / "none")


@pytest.mark.parametrize("array", [np.zeros(3), np.zeros((2, 3), np.int32), [["a", "b"]]])
def test_what_is_no_matrix_of_numbers_is_refused(array):
    with pytest.raises(ProjectionError, match="not a matrix of floating-point numbers"):
        EmbeddingMatrix(array)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_named(bad):
    rows = ROWS.copy()
    rows[1, 2] = bad
    matrix = EmbeddingMatrix(rows)
    assert np.array_equal(matrix.take(np.array([0])), ROWS[:1])
    with pytest.raises(ProjectionError, match="embedding of id 1 is not finite"):
        matrix.take(np.array([0, 1]))

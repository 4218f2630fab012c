"""What is sent arrives bit for bit, and what is no frame is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pyarrow
import pytest
import torch

from megatron_ext.errors import DistributedError
from megatron_ext.teachers.flight import Frame, empty, from_bytes, receive, to_bytes, to_chunks

TENSORS = {
    "ids": torch.arange(12, dtype=torch.int32).view(3, 4),
    "turned": torch.randn(5, 7).t(),
    "half": torch.randn(3, 2).half(),
    "brain": torch.randn(9).bfloat16(),
    "none": torch.empty(0, 4),
    "one": torch.tensor(7),
    "flags": torch.tensor([True, False]),
    "large": torch.randint(256, ((9 << 20) + 3,), dtype=torch.uint8),
}
FRAME = Frame("answer", {"number": 3, "name": "größe", "list": [1, None]}, TENSORS)


def test_a_frame_comes_back_from_its_bytes() -> None:
    assert_same(from_bytes(to_bytes(FRAME)))


def test_a_frame_comes_back_from_its_chunks_and_their_bytes_are_told() -> None:
    stored = [
        SimpleNamespace(data=batch, app_metadata=pyarrow.py_buffer(metadata))
        for batch, metadata in to_chunks(FRAME)
    ]
    assert len(stored) > len(TENSORS)
    heard: list[int] = []
    reader = SimpleNamespace(read_chunk=iter(stored).__next__)
    assert_same(receive(reader, heard=heard.append, allocate=empty))
    content = sum(tensor.nbytes for tensor in TENSORS.values())
    assert content < sum(heard) < content + 1000


@pytest.mark.parametrize(
    "header",
    [
        b"GET / HTTP/1.1",
        b"[]",
        json.dumps({"kind": "x", "values": {}}).encode(),
        json.dumps({"kind": "x", "values": {}, "tensors": [["a", "object", [1]]]}).encode(),
        json.dumps({"kind": "x", "values": {}, "tensors": [["a", "uint8", [-1]]]}).encode(),
        json.dumps({"kind": "x", "values": 3, "tensors": []}).encode(),
    ],
    ids=["another protocol", "no object", "no tensors", "a dtype", "a shape", "values"],
)
def test_what_is_no_frame_is_refused(header: bytes) -> None:
    content = len(header).to_bytes(8, "little") + header
    with pytest.raises(DistributedError, match="is no frame"):
        from_bytes(content)


def test_a_tensor_that_ends_early_is_no_frame() -> None:
    with pytest.raises(DistributedError, match="is no frame"):
        from_bytes(to_bytes(FRAME)[:-1])


def assert_same(found: Frame) -> None:
    """As ``FRAME``."""
    assert (found.kind, found.values) == (FRAME.kind, FRAME.values)
    assert list(found.tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert found.tensors[name].shape == tensor.shape
        assert torch.equal(found.tensors[name], tensor)

"""What is sent arrives bit for bit, and what is no frame is refused."""

from __future__ import annotations

import json
import os
import threading
from multiprocessing import Pipe
from typing import Any

import pytest
import torch

from megatron_ext.errors import DistributedError
from megatron_ext.teachers.serving.frames import (
    Frame,
    from_bytes,
    receive_frame,
    send_frame,
    to_bytes,
)

TENSORS = {
    "ids": torch.arange(12, dtype=torch.int32).view(3, 4),
    "turned": torch.randn(5, 7).t(),
    "half": torch.randn(3, 2).half(),
    "brain": torch.randn(9).bfloat16(),
    "none": torch.empty(0, 4),
    "one": torch.tensor(7),
    "flags": torch.tensor([True, False]),
    "large": torch.randint(256, ((1 << 21) + 3,), dtype=torch.uint8),
}
FRAME = Frame("answer", {"number": 3, "name": "größe", "list": [1, None]}, TENSORS)


def test_a_frame_arrives_bit_for_bit_and_its_bytes_are_told() -> None:
    here, there = Pipe()
    sender = threading.Thread(target=send_frame, args=(here, FRAME))
    sender.start()
    heard: list[int] = []
    assert_same(receive_frame(there, heard=heard.append))
    sender.join()
    content = sum(tensor.nbytes for tensor in TENSORS.values())
    assert content < sum(heard) < content + 1000
    assert len(heard) > 3


def test_a_frame_comes_back_from_its_bytes() -> None:
    assert_same(from_bytes(to_bytes(FRAME)))


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
    here, there = Pipe()
    here.send_bytes(header)
    with pytest.raises(DistributedError, match="is no frame"):
        receive_frame(there)


def test_a_tensor_that_ends_early_is_the_end_of_the_connection() -> None:
    here, there = Pipe()
    values: dict[str, Any] = {"kind": "x", "values": {}, "tensors": [["a", "uint8", [8]]]}
    here.send_bytes(json.dumps(values).encode())
    os.write(here.fileno(), b"four")
    here.close()
    with pytest.raises(EOFError):
        receive_frame(there)


def assert_same(found: Frame) -> None:
    """As ``FRAME``."""
    assert (found.kind, found.values) == (FRAME.kind, FRAME.values)
    assert list(found.tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert found.tensors[name].shape == tensor.shape
        assert torch.equal(found.tensors[name], tensor)

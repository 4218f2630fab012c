"""What a computation allocates: every tensor, and how many bytes are alive at once.

    with AllocationRecord() as record:
        loss(...).backward()
    record.assert_no_wide_tensor(rows=T, columns=V)
    assert record.peak_bytes < ...

A mode of torch's dispatcher sees what operations return, on any device and in backward too, not
what a single kernel uses inside. Tensors that exist before are not counted.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WIDE = (torch.float32, torch.float64)


class Allocation(NamedTuple):
    """New memory, as the tensor that the operation returned."""

    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


class AllocationRecord(TorchDispatchMode):
    """Counts from ``with`` on; read it afterwards."""

    def __init__(self):
        super().__init__()
        self.allocations: list[Allocation] = []
        self.peak_bytes = 0
        """Most bytes that were alive at once, of those allocated here."""
        self._alive: dict[int, int] = {}
        self._alive_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {_key(tensor) for tensor in tree_leaves((args, kwargs)) if _has_memory(tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if _has_memory(tensor) and _key(tensor) not in self._alive.keys() | given:
                self._add(str(func), tensor)
        return out

    def wide_tensors(self, *, rows, columns):
        """Allocations in fp32 or wider with at least ``rows * columns`` elements."""
        limit = rows * columns
        return [
            found
            for found in self.allocations
            if found.dtype in WIDE and found.bytes >= limit * found.dtype.itemsize
        ]

    def assert_no_wide_tensor(self, *, rows, columns):
        """No fp32 tensor [rows, columns] or larger was made."""
        found = self.wide_tensors(rows=rows, columns=columns)
        assert not found, "\n".join(map(str, found))

    def _add(self, operation, tensor):
        storage = tensor.untyped_storage()
        size, key = storage.nbytes(), _key(tensor)
        self.allocations.append(Allocation(operation, tuple(tensor.shape), tensor.dtype, size))
        self._alive[key] = size
        self._alive_bytes += size
        # The object of a storage lives as long as its memory.
        weakref.finalize(storage, self._remove, key)
        self.peak_bytes = max(self.peak_bytes, self._alive_bytes)

    def _remove(self, key):
        self._alive_bytes -= self._alive.pop(key)


def _has_memory(value):
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _key(tensor):
    return int(tensor.untyped_storage()._cdata)

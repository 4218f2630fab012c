"""What torch operators read, write and keep, from the shapes of their tensors; nothing is timed."""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PICK: Final = {"gather", "index", "index_select", "embedding", "take_along_dim"}
"""Read as much of their source as they write."""

_PUT: Final = {"scatter_add_", "index_add_", "index_put_", "scatter_", "index_copy_", "put_"}
"""Read and write as much of their target as they are given."""

_FREE: Final = {
    "empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "lift_fresh",
    "_local_scalar_dense", "set_", "resize_", "_sparse_csr_tensor_unsafe",
    "_sparse_coo_tensor_with_dims_and_tensors", "crow_indices", "col_indices", "values",
    "ccol_indices", "row_indices", "_values", "_indices", "sym_size", "is_coalesced",
    "_coalesced_",
}  # fmt: skip


class Traffic(TorchDispatchMode):
    """While it is entered, each operator reads its tensors once and writes its results once.

    A view moves nothing, a tensor that is broadcast is read at its own size, and an operator that
    picks a few elements reads these. What an operator does inside (a sort's passes, a reduction's
    partial sums) is not seen, so the count is a lower one. ``peak`` is the most that new storages
    held at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read = self.written = self.held = self.peak = 0
        self.largest: dict[torch.dtype, int] = {}
        """Most elements of a new tensor by dtype."""
        self._storages: set[int] = set()

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        before = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        out = function(*args, **kwargs)
        name = function.overloadpacket.__name__
        results = _tensors(out)
        self._keep(results, before)
        if name in _FREE or function.is_view:
            return out
        given = _tensors((args, kwargs))
        if name in _PICK:
            self.read += sum(map(_size, results)) + sum(map(_size, given[1:]))
            self.written += sum(map(_size, results))
        elif name in _PUT:
            moved = sum(map(_size, given[1:]))
            self.read += 2 * moved
            self.written += moved
        elif name == "copy_":
            self.read += _size(given[-1])
            self.written += _size(given[0])
        elif name in ("zero_", "fill_"):
            self.written += _size(given[0])
        else:
            unique = {id(tensor): tensor for tensor in given}
            self.read += sum(map(_size, unique.values()))
            self.written += sum(map(_size, results))
        return out

    def _keep(self, results: list[torch.Tensor], before: set[int | None]) -> None:
        for tensor in results:
            storage = _storage(tensor)
            if storage is None or storage in before or storage in self._storages:
                continue
            size = tensor.untyped_storage().nbytes()
            self._storages.add(storage)
            self.held += size
            self.peak = max(self.peak, self.held)
            self.largest[tensor.dtype] = max(self.largest.get(tensor.dtype, 0), tensor.numel())
            weakref.finalize(tensor.untyped_storage(), self._drop, storage, size)

    def _drop(self, storage: int, size: int) -> None:
        self._storages.discard(storage)
        self.held -= size


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None


def _size(tensor: torch.Tensor) -> int:
    """Bytes of a tensor: of its entries and their indices where it is sparse."""
    if tensor.layout == torch.sparse_csr:
        parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
        return sum(part.numel() * part.element_size() for part in parts)
    if tensor.layout != torch.strided:
        entries = tensor._nnz()
        return entries * (tensor.element_size() + 8 * tensor.sparse_dim())
    if 0 in tensor.stride() or tensor.numel() == 0:
        elements = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            elements *= size if stride else min(size, 1)
        return elements * tensor.element_size()
    return tensor.numel() * tensor.element_size()

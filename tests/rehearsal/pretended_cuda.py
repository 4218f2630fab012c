"""Tensors that say they are on ``cuda:0`` and hold their numbers on the CPU.

A tensor that is made there, or moved there, is a ``Pretended``; torch's operations run on what it
holds, and one that meets tensors of both devices fails as it does on a GPU. What would make the
host wait, and what is copied, is recorded in ``EVENTS``.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.rehearsal.events import Events

DEVICE = torch.device("cuda", 0)
EVENTS = Events()

_WAITING = frozenset(
    ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal")
) | {"unique_consecutive", "is_nonzero", "bincount", "histc"}
_INDEXING = frozenset(("index", "index_put", "index_put_", "_index_put_impl_"))
_MAKING = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
_NCCL_TYPES = frozenset(
    getattr(torch, name)
    for name in ("bool", "int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32")
) | {torch.float64}
_pinned: list[torch.UntypedStorage] = []
"""Kept alive, so that no pageable tensor takes the address of one."""


class Pretended(torch.Tensor):
    """A tensor on the pretended device; ``held`` has its numbers."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "Pretended":
        assert type(held) is not cls
        places = {}
        if held.layout == torch.strided:
            places = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.dtype, device=DEVICE, **places
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self) -> str:
        return f"Pretended({self.held})"

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, other: "Pretended") -> None:
        torch.Tensor.data.__set__(self, other)
        self.held = other.held

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def record_stream(self, stream: Any) -> None:
        """Nothing: nothing waits to be done."""

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def storage(self) -> Any:
        return self.held.storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Pretending(TorchDispatchMode):
    """Also sees what begins with no tensor of the device: factories and uploads."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def held(value: Any) -> Any:
    """What a pretended tensor holds; anything else as it is."""
    return value.held if isinstance(value, Pretended) else value


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func.overloadpacket.__name__
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    theirs = [t for t in tensors if isinstance(t, Pretended)]
    ours = [t for t in tensors if not isinstance(t, Pretended)]
    device = kwargs.get("device")
    goes_to = None if device is None else torch.device(device).type
    if name in ("_pin_memory", "pin_memory"):
        return _pin(args[0].clone())
    if name == "is_pinned":
        return _is_pinned(args[0])
    if kwargs.get("pin_memory"):
        return _pin(func(*args, **{**kwargs, "pin_memory": False}))
    if func.namespace == "c10d" and name != "barrier":
        _refuse_to_send(name, ours, theirs)
    if not theirs and goes_to != "cuda":
        return func(*args, **kwargs)
    is_copy = name in ("copy_", "_to_copy")
    if is_copy:
        _record_copy(name, args, kwargs, goes_to)
    else:
        _refuse_host_tensors(func, name, args, theirs, ours)
        _record(func, name, args, kwargs, theirs)
    inner = dict(kwargs)
    if device is not None:
        inner["device"] = torch.device("cpu")
    wrappers = {id(t.held): t for t in theirs}
    if str(func) == "aten.addmm.dtype_out":
        # The CPU has no product into another dtype.
        out, matrix, other = args[0].held, args[1].held, args[2].held
        out.add_(matrix.to(out.dtype) @ other.to(out.dtype))
        return kwargs["out"]
    result = func(*tree_map(held, args), **tree_map(held, inner))
    if goes_to == "cpu" or (name == "copy_" and not isinstance(args[0], Pretended)):
        return result if goes_to == "cpu" else args[0]

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, Pretended):
            return value
        if any(value is t for t in ours):
            return value
        return wrappers[id(value)] if id(value) in wrappers else Pretended(value)

    return tree_map(wrapped, result)


def _record_copy(name: str, args: Any, kwargs: Any, goes_to: str | None) -> None:
    target, source = (args[0], args[1]) if name == "copy_" else (None, args[0])
    to_device = isinstance(target, Pretended) if name == "copy_" else goes_to != "cpu"
    what = f"{name} of {source.dtype} {tuple(source.shape)}"
    if to_device == isinstance(source, Pretended):
        if to_device:
            EVENTS.add("launch", name)
    elif not to_device:
        EVENTS.add("wait", what)
    else:
        EVENTS.add("pinned upload" if _is_pinned(source) else "upload", what)


def _refuse_to_send(name: str, ours: list[Any], theirs: list[Any]) -> None:
    """Refuse what NCCL does, and gloo does not."""
    if ours:
        shapes = [tuple(t.shape) for t in ours]
        EVENTS.add("mismatch", f"{name} of {shapes} of the host")
        raise RuntimeError("No backend type associated with device type cpu")
    if not all(t.is_contiguous() for t in theirs):
        raise ValueError(f"{name}: Tensors must be contiguous")
    if not {t.dtype for t in theirs} <= _NCCL_TYPES:
        raise ValueError(f"{name}: Unsupported data type for NCCL process group")
    if len({t.dtype for t in theirs}) > 1:
        raise ValueError(f"{name}: Tensors must have identical type")


def _refuse_host_tensors(
    func: Any, name: str, args: Any, theirs: list[Any], ours: list[Any]
) -> None:
    if not theirs or not any(t.dim() for t in ours):
        return
    if name in _INDEXING and isinstance(args[0], Pretended):
        EVENTS.add("upload", f"an index on the host in {name}")
        return
    shapes = [(type(t).__name__, tuple(t.shape)) for t in (*theirs, *ours)]
    EVENTS.add("mismatch", f"{name} of {shapes}")
    raise RuntimeError(f"Expected all tensors to be on the same device: {func} of {shapes}")


def _record(func: Any, name: str, args: Any, kwargs: Any, theirs: list[Any]) -> None:
    returns = func._schema.returns
    is_view = bool(returns) and any(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )
    if not is_view and name not in _MAKING and name not in ("detach", "lift_fresh", "alias"):
        EVENTS.add("launch", name)
    if not theirs:
        return
    waits = name in _WAITING
    if name in _INDEXING:
        indices = [i for i in args[1] if isinstance(i, torch.Tensor)]
        waits = any(i.dtype in (torch.bool, torch.uint8) for i in indices)
        # A number of the host is put where one mask says without the mask's places.
        is_fill = len(indices) == 1 and not any(args[3:4]) and _is_number(args[2:3])
        waits = waits and not is_fill
    if name == "repeat_interleave":
        waits = kwargs.get("output_size") is None
    if waits:
        EVENTS.add("wait", name)


def _is_number(values: tuple[Any, ...]) -> bool:
    return any(value.numel() == 1 and not isinstance(value, Pretended) for value in values)


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    _pinned.append(tensor.untyped_storage())
    return tensor


def _is_pinned(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, Pretended) or tensor.layout != torch.strided:
        return False
    address = tensor.untyped_storage().data_ptr()
    return any(storage.data_ptr() == address for storage in _pinned)

"""A process that believes in a GPU: ``pretend``, and what of torch, NCCL and Triton it replaces.

Such a process begins with ``LD_PRELOAD`` of the library that ``guard.py`` compiles: torch asks
for it while it is imported.
"""

import ctypes
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from tests.rehearsal.events import Events
from tests.rehearsal.pretended_cuda import EVENTS, Pretended, Pretending, held


def pretend() -> Events:
    """Make this process believe in one GPU, for good; returns the record of what it is asked."""
    assert not torch.version.cuda, "needs a build of torch without CUDA"
    ctypes.CDLL(None).pretend_device()
    torch._C._set_only_lift_cpu_tensors(True)
    torch.autograd.set_multithreading_enabled(False)
    _replace_cuda()
    _replace_nccl()
    _interpret_kernels()
    _convert_modules()
    _read_scalars()
    _pretend_in_threads()
    Pretending().__enter__()
    return EVENTS


class _Stream:
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self) -> None:
        EVENTS.add("wait", "stream")

    def record_event(self, event: Any = None) -> "_Event":
        return event or _Event()

    def wait_stream(self, _: Any) -> None:
        pass

    wait_event = wait_stream

    def query(self) -> bool:
        return True

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class _Event(_Stream):
    def record(self, *_: Any) -> None:
        pass

    wait = record

    def elapsed_time(self, _: Any) -> float:
        return 1.0


def _replace_cuda() -> None:
    cpu_generator = torch.default_generator
    properties = SimpleNamespace(
        major=9, minor=0, total_memory=80 << 30, multi_processor_count=132, L2_cache_size=50 << 20
    )
    stand_ins: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: "a pretended GPU",
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 0),
        "mem_get_info": lambda device=None: (70 << 30, 80 << 30),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: EVENTS.add("wait", "torch.cuda.synchronize"),
        "manual_seed": cpu_generator.manual_seed,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
        "default_generators": (cpu_generator,),
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda device=None: _Stream(),
        "default_stream": lambda device=None: _Stream(),
        "stream": lambda stream: nullcontext(),
        "device": lambda device: nullcontext(),
    }
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
    for name in ("get_rng_state", "set_rng_state", "current_device"):
        setattr(torch.cuda.random, name, stand_ins[name])
    for name in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, lambda *_: None)


def _replace_nccl() -> None:
    begin = dist.init_process_group

    def init_process_group(backend: str, *, device_id: Any = None, **options: Any) -> None:
        assert backend == "nccl"
        begin("gloo", **options)

    dist.init_process_group = init_process_group
    # NCCL sends objects as bytes on the device.
    distributed_c10d._get_object_coll_device = lambda group=None: "cuda"


def _pretend_in_threads() -> None:
    """Have threads believe, too; a mode is one thread's."""
    run = threading.Thread.run

    def believing(self: threading.Thread) -> None:
        with Pretending():
            run(self)

    threading.Thread.run = believing


def _read_scalars() -> None:
    """Have ``torch.tensor`` ask for the scalars in a list one by one, as it does on a GPU."""
    make = torch.tensor

    def tensor(data: Any, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made = make(
            tree_map(lambda x: x.item() if isinstance(x, Pretended) else x, data), **options
        )
        return made.pin_memory() if pin_memory else made

    torch.tensor = tensor


def _convert_modules() -> None:
    """Have modules that move take parameters of the other class, with the marks of the old ones."""
    torch.nn.Parameter.data = property(_data, _set_data)
    apply = torch.nn.Module._apply
    moved: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}

    def _apply(self: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:
        for name, parameter in self._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in moved:
                with torch.no_grad():
                    value = function(_data(parameter))
                if isinstance(value, Pretended) == isinstance(parameter, Pretended):
                    continue
                made = torch.nn.Parameter(value, parameter.requires_grad)
                made.__dict__.update(parameter.__dict__)
                moved[id(parameter)] = parameter, made
            self._parameters[name] = moved[id(parameter)][1]
        return apply(self, function, recurse)

    torch.nn.Module._apply = _apply


def _data(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.__dict__.get("_moved", torch.Tensor.data.__get__(parameter))


def _set_data(parameter: torch.Tensor, other: torch.Tensor) -> None:
    """As ``torch.Tensor.data``; a parameter of the host that gets data of the device keeps them."""
    if isinstance(other, Pretended):
        parameter.__dict__["_moved"] = other
    else:
        torch.Tensor.data.__set__(parameter, other)


def _interpret_kernels() -> None:
    from triton.runtime import interpreter

    call = interpreter.GridExecutor.__call__

    def on_held(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if any(isinstance(a, torch.Tensor) and not isinstance(a, Pretended) for a in given):
            EVENTS.add("mismatch", f"a tensor of the host in {self.fn.__name__}")
        EVENTS.add("kernel", self.fn.__name__)
        with _disable_current_modes():
            return call(self, *map(held, args), **{k: held(v) for k, v in kwargs.items()})

    interpreter.GridExecutor.__call__ = on_held

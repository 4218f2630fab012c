"""megatron-core on a CPU with gloo, as a supported mode, and the announcement of the device in use.

megatron-core asks for CUDA by name in its schedules, gradient buffers, optimizers and
checkpoints, but nothing it does there needs a GPU. ``install`` redirects those requests for this
process: torch's functions that make or move tensors take ``device="cuda"`` for the CPU, and the
``torch.cuda`` calls and random-state helpers that megatron-core makes get CPU stand-ins. Nothing
installed on disk changes. Schedules, layers, collectives and optimizers run as they are, so every
parallel layout can be tested on any machine.

Not available in this mode: CUDA graphs, stream overlap, Transformer Engine, fused kernels.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.jit._builtins import _find_builtin, _register_builtin
from torch.utils._device import _device_constructors

from megatron_ext.errors import ConfigError
from megatron_ext.training.megatron_models.megatron_parts import needed

if TYPE_CHECKING:
    from megatron_ext.training.configuration.loop import TrainingConfig

_is_installed = False


def install() -> None:
    """Redirect megatron-core's CUDA requests to the CPU for the life of this process; idempotent.

    Raises:
        RuntimeError: CUDA is in use already, so that tensors would silently move off the GPU.
    """
    global _is_installed
    if _is_installed:
        return
    if torch.cuda.is_initialized():
        raise RuntimeError("CUDA is initialised in this process, so it cannot run on the CPU")
    _replace_cuda_calls()
    _replace_random_state_helpers()
    _replace_dispatcher_copies()
    _replace_uneven_collectives()
    _keep_freed_memory()
    _redirect_tensors()
    _is_installed = True


def is_installed() -> bool:
    """Whether this process runs megatron-core on the CPU."""
    return _is_installed


def _redirect_tensors() -> None:
    """Have whatever makes or moves a tensor take a GPU that is asked for by name for the CPU.

    Function by function: a torch function mode, which sees to it in one place, comes between a step
    and each of its operations, and took a sixth of the time of a small model.
    """
    # What torch sends to a device in ``with torch.device(...)``; listed before it is replaced.
    makers = {id(function) for function in _device_constructors()}
    for module in (torch, torch.fft, torch.nested):
        for name, value in list(vars(module).items()):
            if id(value) in makers or name.endswith("_like") or name == "normal":
                setattr(module, name, _on_cpu(value))
    tensor = torch.Tensor
    for name in dir(tensor):
        if name.startswith("new_"):
            setattr(tensor, name, _on_cpu(getattr(tensor, name)))
    for name, redirected in (("to", _moved_to), ("type", _type_of), ("cuda", _unmoved)):
        before = getattr(tensor, name)
        setattr(tensor, name, wraps(before)(redirected(before)))


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """``make``, whose ``device`` is the CPU where a GPU is named."""

    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            # torch refuses to pin memory without a GPU.
            kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    operator = _find_builtin(make)
    if operator is not None:
        # Else what is compiled by TorchScript may not call it.
        _register_builtin(made, operator)
    return made


def _moved_to(to: Callable[..., Any]) -> Callable[..., Any]:
    on_cpu = _on_cpu(to)

    def moved(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and _is_cuda(args[0]):
            args = ("cpu", *args[1:])
        return on_cpu(self, *args, **kwargs)

    return moved


def _type_of(type_: Callable[..., Any]) -> Callable[..., Any]:
    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = type_(self, *args, **kwargs)
        # The optimizers sort parameters by this string, "torch.cuda.FloatTensor" and so on.
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    return named


def _unmoved(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *_, **__: self


def _is_cuda(device: object) -> bool:
    """Whether a ``device`` argument names a GPU; a bare integer does."""
    if isinstance(device, bool):
        return False
    if isinstance(device, int):
        return True
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


def _replace_cuda_calls() -> None:
    stand_ins: dict[str, Callable[..., Any]] = {
        "current_device": lambda: "cpu",
        # From 0.19 on gradients wait on it for CUDA graphs, of which there are none.
        "current_stream": lambda device=None: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda device="cpu": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cpu": torch.set_rng_state(state),
    }
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)


def _keep_freed_memory() -> None:
    """Have glibc reuse the pages of freed tensors instead of returning them to the kernel.

    A step allocates and frees buffers of the size of the logits; returning them and faulting them
    in again, zeroed, took a quarter of its time. Other C libraries are left as they are.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    m_trim_threshold, m_mmap_max, m_arena_max = -1, -4, -8
    libc = ctypes.CDLL(None)
    # With several arenas, threads of gloo and autograd accumulate freed pages: gigabytes in hours.
    libc.mallopt(m_arena_max, 1)
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_trim_threshold, -1)


def _replace_random_state_helpers() -> None:
    """Point the model-parallel random-number tracker at the CPU generator."""

    def get_state(*_: object, **__: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, *_: object, **__: object) -> None:
        torch.set_rng_state(new_state)

    for part, stand_in in (("get_rng_state", get_state), ("set_rng_state", set_state)):
        place = needed(part)
        place.put(wraps(place.value)(stand_in))


def _replace_dispatcher_copies() -> None:
    """Have the dispatcher of experts read the numbers that it sends without a stream of its own."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    def read(
        dispatcher: Any, point: str, tokens_per_expert: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        if point == dispatcher.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                splits = getattr(dispatcher, name)
                if isinstance(splits, torch.Tensor):
                    setattr(dispatcher, name, splits.numpy())
        return tokens_per_expert

    place = needed("read_splits")
    place.put(wraps(place.value)(read))
    # Any value keeps it from making a stream.
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none on a CPU"


def _replace_uneven_collectives() -> None:
    """Have ranks that share an expert exchange different numbers of tokens, which gloo's all-gather
    and reduce-scatter refuse: by an all-to-all, which it has."""
    from megatron.core.tensor_parallel import mappings

    gather_evenly = mappings._gather_along_first_dim
    scatter_evenly = mappings._reduce_scatter_along_first_dim

    def gather(
        part: torch.Tensor, group: dist.ProcessGroup, sizes: list[int] | None = None, *rest: Any
    ) -> Any:
        if sizes is None or group.size() == 1:
            return gather_evenly(part, group, sizes, *rest)
        sent = part.expand(group.size(), *part.shape).flatten(0, 1).contiguous()
        return _exchanged(sent, [len(part)] * group.size(), list(sizes), group)

    def scatter(
        whole: torch.Tensor, group: dist.ProcessGroup, sizes: list[int] | None = None, *rest: Any
    ) -> Any:
        if sizes is None or group.size() == 1:
            return scatter_evenly(whole, group, sizes, *rest)
        own = sizes[group.rank()]
        parts = _exchanged(whole.contiguous(), list(sizes), [own] * group.size(), group)
        return parts.view(group.size(), own, *whole.shape[1:]).sum(dim=0)

    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = scatter


def _exchanged(
    sent: torch.Tensor, to: list[int], of: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """What each rank has sent this one, of rows by rank. One all-to-all."""
    received = sent.new_empty(sum(of), *sent.shape[1:])
    dist.all_to_all_single(received, sent, of, to, group=group)
    return received


def on_this_device(training: TrainingConfig, *, has_precision: bool) -> TrainingConfig:
    """Announce the device, and give a run the precision of it.

    Args:
        has_precision: Whether its precision was given.

    Raises:
        ConfigError: As ``announce_device``.
    """
    announce_device(require_gpu=training.require_gpu)
    return in_precision_of_device(training, is_given=has_precision)


def announce_device(*, require_gpu: bool) -> None:
    """Print the device and the number of ranks of this launch, on rank 0.

    Raises:
        ConfigError: A GPU is required and there is none.
    """
    reason = why_no_gpu()
    if require_gpu and reason is not None:
        raise ConfigError(
            "a GPU is required and there is none",
            where="training.require_gpu",
            got=reason,
            fix="start where nvidia-smi lists one, or leave --require-gpu out to run on the CPU",
        )
    if os.environ.get("RANK", "0") != "0":
        return
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    name = f"cpu ({reason})"
    if reason is None:
        index = int(os.environ.get("LOCAL_RANK", "0"))
        name = f"cuda:{index} {torch.cuda.get_device_name(index)}"
    print(f"device: {name}, {ranks} rank{'s' if ranks > 1 else ''}", flush=True)


def in_precision_of_device(training: TrainingConfig, *, is_given: bool) -> TrainingConfig:
    """``training`` in bf16 on a GPU, unless its precision was given.

    Matrix products in fp32 take a GPU some ten times as long.
    """
    if is_given or not torch.cuda.is_available():
        return training
    return replace(training, precision="bf16")


def why_no_gpu() -> str | None:
    """The reason why a launch runs on the CPU; None where there is a GPU."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "no CUDA device is visible"

"""megatron-core on a CPU with gloo, as a supported mode, and the announcement of the device in use.

megatron-core asks for CUDA by name in its schedules, gradient buffers, optimizers and
checkpoints, but nothing it does there needs a GPU. ``install`` redirects those requests for this
process: a torch function mode turns ``device="cuda"`` into the CPU, and the ``torch.cuda`` calls
and random-state helpers that megatron-core makes get CPU stand-ins. Nothing installed on disk
changes. Schedules, layers, collectives and optimizers run as they are, so every parallel layout can
be tested on any machine.

Not available in this mode: CUDA graphs, stream overlap, Transformer Engine, fused kernels.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from megatron_ext.errors import ConfigError
from megatron_ext.training.megatron_models.megatron_parts import needed

if TYPE_CHECKING:
    from megatron_ext.training.configuration.loop import TrainingConfig

_installed: _CudaToCpu | None = None


def install() -> None:
    """Redirect megatron-core's CUDA requests to the CPU for the life of this process; idempotent.

    Raises:
        RuntimeError: CUDA is in use already, so that tensors would silently move off the GPU.
    """
    global _installed
    if _installed is not None:
        return
    if torch.cuda.is_initialized():
        raise RuntimeError("CUDA is initialised in this process, so it cannot run on the CPU")
    _replace_cuda_calls()
    _replace_random_state_helpers()
    _replace_dispatcher_copies()
    _replace_uneven_collectives()
    _keep_freed_memory()
    _installed = _CudaToCpu()
    _installed.__enter__()
    _redirect_in_backward(_installed)


def is_installed() -> bool:
    """Whether this process runs megatron-core on the CPU."""
    return _installed is not None


class _CudaToCpu(TorchFunctionMode):
    """Sends every tensor that asks for CUDA to the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not kwargs and func not in _DEVICE_BY_PLACE:
            # Most calls: every operation of a step comes through here.
            return func(*args)
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The optimizers sort parameters by this string, "torch.cuda.FloatTensor" and so on.
            return str(func(*args)).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        # torch refuses to pin memory without a GPU.
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


_DEVICE_BY_PLACE: Final = frozenset((torch.Tensor.cuda, torch.Tensor.type, torch.Tensor.to))
"""Functions that are of a device without being told so by name."""


def _is_cuda(device: object) -> bool:
    """Whether a ``device`` argument names a GPU; a bare integer does."""
    if isinstance(device, bool):
        return False
    if isinstance(device, int):
        return True
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


def _redirect_in_backward(mode: _CudaToCpu) -> None:
    """Apply the mode to the backward pass too, where recomputed layers ask for CUDA.

    ``torch.autograd.backward`` is a torch function itself, so it calls its engine without the mode.
    """
    run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_backward_in_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run_backward(*args, **kwargs)

    torch.autograd._engine_run_backward = run_backward_in_mode  # type: ignore[attr-defined]


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

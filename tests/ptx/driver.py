"""Driver of Triton for a GPU that is not there: kernels are compiled for it, and run on the CPU.

``MEGATRON_EXT_PTX=80``, 90 or 100 has the tests use it, for GPUs of that architecture; with
``MEGATRON_EXT_PTX_BACKWARDS=1`` the last program of a launch runs first.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

from tests.ptx.machine import Machine
from tests.ptx.memory import bytes_at
from tests.ptx.program import parsed

TARGET: Final = GPUTarget("cuda", int(os.environ.get("MEGATRON_EXT_PTX", "80")), 32)


@cache
def machine(path: str) -> Machine:
    """The machine of a file of PTX."""
    return Machine(parsed(Path(path).read_text()))


class Launcher:
    """Runs launches of one compiled kernel."""

    def __init__(self, source: Any, metadata: Any) -> None:
        assert not metadata.global_scratch_size, "the machine has no scratch memory"
        self._kinds = list(source.signature.values())
        self._shared = metadata.shared
        file = get_cache_manager(metadata.hash).get_file(f"{metadata.name[:150]}.ptx")
        assert file is not None
        self._machine = machine(file)

    def __call__(self, x: int, y: int, z: int, *given: Any) -> None:
        _, _, _, _, _, _, *arguments = given
        pairs = zip(self._kinds, arguments, strict=True)
        passed = [value for kind, value in pairs if kind != "constexpr"]
        tensors = [value for value in passed if isinstance(value, torch.Tensor)]
        # What follows are pointers to scratch memory and to a profile.
        numbers = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in passed] + [0, 0]
        self._machine.launch(
            (x, y, z),
            numbers,
            _storages(tensors),
            self._shared,
            backwards=bool(os.environ.get("MEGATRON_EXT_PTX_BACKWARDS")),
        )


def _storages(tensors: list[torch.Tensor]) -> list[tuple[int, np.ndarray, int]]:
    found: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            _, size = found.get(storage.data_ptr(), (0, 8))
            smaller = min(size, tensor.element_size())
            found[storage.data_ptr()] = storage.nbytes(), smaller
    return [(base, bytes_at(base, size), granule) for base, (size, granule) in found.items()]


class _Utilities:
    """What Triton asks of the driver's library."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": 166912 if TARGET.arch == 80 else 232448,
            "multiprocessor_count": 108,
            "warpSize": 32,
        }

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return None, None, 0, 0, 1024


class Driver(DriverBase):
    """The driver."""

    utils = _Utilities()
    launcher_cls = Launcher

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0


def run_compiled() -> None:
    """Have kernels of this process run on the machine, for good."""
    from megatron_ext.ops import launch, triton_math

    assert triton_math.UNPACKS.value, "kernels are interpreted"
    driver.set_active(Driver())
    # Logits on the CPU are refused, but of a process that interprets.
    launch.interpreted = lambda: True

"""``megatron-ext run`` for a script that asks for CUDA itself, on a CPU.

    python tests/training/cpu_script.py pretrain_gpt.py ...

Stand-ins for the calls of Megatron-LM's own ``training.py``; those of megatron-core are answered by
``megatron_ext.training.megatron_models.cpu_megatron``. Nothing is compiled, neither by nvcc nor by
torch.
"""

import contextlib
import os
import sys
import time
import types

import torch

from megatron_ext.cli.main import main
from megatron_ext.training.megatron_models import cpu_megatron


class Event:
    """A time on the host."""

    def __init__(self, *_, **__):
        self._at = 0.0

    def record(self, *_):
        self._at = time.time()

    def elapsed_time(self, other):
        return (other._at - self._at) * 1e3

    def synchronize(self):
        """Nothing to wait for."""

    def query(self):
        return True


class Stream(Event):
    """The order in which Python calls."""

    def wait_stream(self, *_):
        """Nothing to wait for."""

    wait_event = wait_stream


def install():
    """Answer as one GPU with no memory in use would."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    cpu_megatron.install()
    one = types.SimpleNamespace(
        name="cpu", major=8, minor=0, total_memory=1 << 33, multi_processor_count=1
    )
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "get_device_capability": lambda *_: (8, 0),
        "get_device_properties": lambda *_: one,
        "memory_stats": lambda *_: dict.fromkeys(_MEMORY, 0),
        "reset_peak_memory_stats": lambda *_: None,
        "current_stream": lambda *_: Stream(),
        "default_stream": lambda *_: Stream(),
        "stream": lambda *_: contextlib.nullcontext(),
        "Event": Event,
        "Stream": Stream,
    }
    sizes = ("allocated", "reserved")
    for name in (f"{most}memory_{size}" for most in ("", "max_") for size in sizes):
        answers[name] = lambda *_: 0
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    # The loaders of main pin what they read.
    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    # torch's optimizers ask it for a stream that captures a graph.
    torch.accelerator.is_available = lambda: False
    kernels = types.ModuleType("megatron.legacy.fused_kernels")
    kernels.load = lambda args: None
    sys.modules[kernels.__name__] = kernels


_MEMORY = (
    *("num_alloc_retries", "allocation.all.current", "allocated_bytes.all.current"),
    *("allocated_bytes.all.peak", "reserved_bytes.all.peak", "reserved_bytes.all.current"),
)

if __name__ == "__main__":
    install()
    main(["run", *sys.argv[1:]])

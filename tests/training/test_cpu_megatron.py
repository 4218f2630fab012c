"""megatron-core on a CPU: what asks for a GPU by name gets the CPU, and nothing else changes."""

import torch
from torch.utils.checkpoint import checkpoint

from megatron_ext.training.megatron_models import cpu_megatron
from tests.process_group import run_ranks


def made_on_a_gpu(rank):
    """Devices of tensors that a process with the CPU for a GPU makes and moves, and what it finds
    of those that ask for none."""
    cpu_megatron.install()
    cpu_megatron.install()
    value = torch.arange(4.0)
    named = torch.device("cuda", 0)
    made = {
        "empty": torch.empty(2, device="cuda"),
        "tensor": torch.tensor([1.0], device=named),
        "pinned": torch.zeros(2, device="cuda:0", pin_memory=True),
        "number": torch.ones(2, device=0),
        "window": torch.hann_window(3, device="cuda"),
        "drawn": torch.normal(0.0, 1.0, (2,), device="cuda"),
        "nested": torch.nested.nested_tensor([[1.0]], device="cuda"),
        "frequencies": torch.fft.fftfreq(4, device="cuda"),
        "like": torch.randn_like(value, device="cuda"),
        "new": value.new_full((2,), 3.0, device=named),
        "moved": value.to("cuda"),
        "moved by name": value.to(device=named, dtype=torch.float64),
        "moved by number": value.to(0),
        "cuda": value.cuda(non_blocking=True),
        "layer": torch.nn.Linear(2, 2, device="cuda").weight,
        "module": torch.nn.Linear(2, 2).to("cuda").cuda().weight,
    }

    def on_gpu(x):
        return x * torch.full_like(x, 2.0, device="cuda")

    weight = value.clone().requires_grad_()
    checkpoint(on_gpu, weight, use_reentrant=False).sum().backward()
    return {
        "devices": {name: str(x.device) for name, x in made.items()},
        "gradient": weight.grad.tolist(),
        "type": (value.type(), value.type(torch.float64).dtype, value.half().type()),
        "dtype": value.to(torch.int32).tolist(),
        "meta": torch.empty(2, device="meta").device.type,
        "in a context": _in_a_context(),
        "compiled": torch.jit.script(_zeros)(value).tolist(),
    }


def _in_a_context():
    with torch.device("meta"):
        return torch.ones(2).device.type, torch.nn.Linear(2, 2).weight.device.type


def _zeros(x: torch.Tensor):
    return torch.zeros(2, dtype=x.dtype)


def test_a_gpu_that_is_asked_for_by_name_is_the_cpu():
    (found,) = run_ranks(1, made_on_a_gpu)
    assert set(found["devices"].values()) == {"cpu"}, found["devices"]
    assert found["gradient"] == [2.0] * 4
    assert found["type"] == ("torch.cuda.FloatTensor", torch.float64, "torch.cuda.HalfTensor")
    assert found["dtype"] == [0, 1, 2, 3]
    assert found["meta"] == "meta"
    assert found["in a context"] == ("meta", "meta")
    assert found["compiled"] == [0.0, 0.0]

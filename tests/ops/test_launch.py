"""Which code runs, with which blocks a kernel is launched, and which logits it may not get."""

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.errors import LossError, MissingDependencyError
from megatron_ext.ops import launch
from megatron_ext.ops.launch import (
    COMPILED_WIDTH,
    ROW_CONFIGS,
    chosen_config,
    fitting_config,
    uses_compiled,
    uses_triton,
)
from tests.ops.kernel_case import DEVICE


@pytest.mark.parametrize("width", [1, 17, 255, 256, 300, 1000, 4097, 200_000])
@pytest.mark.parametrize("config", ROW_CONFIGS)
def test_no_two_warps_hold_one_element(config, width):
    fitting = fitting_config(config, width)
    assert fitting.block & (fitting.block - 1) == 0
    assert fitting.block >= min(width, config.block)
    assert fitting.num_warps in (1, 2, 4, 8, 16, 32)
    # 8 elements of 2 bytes a thread.
    assert fitting.num_warps == 1 or fitting.block >= fitting.num_warps * 32 * 8


def test_nothing_is_timed_where_torch_is_to_be_deterministic(monkeypatch):
    monkeypatch.delenv("MEGATRON_EXT_AUTOTUNE", raising=False)
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    monkeypatch.setattr(launch, "_CHOSEN", {"kernel": ROW_CONFIGS[3]})

    def run(config):
        raise AssertionError

    assert chosen_config("kernel", ROW_CONFIGS, run) == ROW_CONFIGS[3]
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen_config("kernel", ROW_CONFIGS, run) == ROW_CONFIGS[0]
        assert chosen_config("another", ROW_CONFIGS, run) == ROW_CONFIGS[0]
    finally:
        torch.use_deterministic_algorithms(False)


pytest.importorskip("triton")


def test_columns_that_are_apart_are_refused_by_kernels_alone():
    logits = torch.zeros(8, 6, device=DEVICE)
    turned = torch.zeros(6, 8, device=DEVICE).t()
    assert uses_triton("triton", logits)
    assert uses_triton("triton", logits[:, 1:4])
    assert uses_triton("triton", logits[::2])
    # A single column has no neighbours.
    assert uses_triton("triton", logits[:, 3:4])
    assert not uses_triton("torch", turned)
    with pytest.raises(LossError, match="next to one another"):
        uses_triton("triton", logits, turned)


def test_kernels_that_are_asked_for_name_the_extra_with_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not uses_triton("auto", torch.zeros(2, 4))
    with pytest.raises(MissingDependencyError, match=r"megatron-ext\[gpu\]"):
        uses_triton("triton", torch.zeros(2, 4))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_logits_of_another_device_than_the_current_are_refused():
    with pytest.raises(LossError, match="current device"):
        uses_triton("auto", torch.zeros(2, 4, device="cuda:1"))


def test_loops_of_a_cpu_are_for_wide_rows_where_numba_is(monkeypatch):
    pytest.importorskip("numba")
    wide, narrow = torch.zeros(1, COMPILED_WIDTH), torch.zeros(1, COMPILED_WIDTH - 1)
    assert uses_compiled("auto", wide, narrow)
    assert not uses_compiled("auto", narrow)
    assert uses_compiled("cpu", narrow)
    assert not uses_compiled("auto", wide.double())
    assert not uses_compiled("auto", wide.t())
    assert not uses_compiled("torch", wide)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not uses_compiled("auto", wide)
    with pytest.raises(MissingDependencyError, match=r"numba.*megatron-ext\[train\]"):
        uses_compiled("cpu", wide)


@pytest.fixture
def timed(monkeypatch):
    """Choices as on a GPU, whose clock is the block: the least is the fastest."""
    testing = pytest.importorskip("triton.testing")
    monkeypatch.delenv("MEGATRON_EXT_AUTOTUNE", raising=False)
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    monkeypatch.setattr(launch, "_CHOSEN", {})
    monkeypatch.setattr(testing, "do_bench", lambda run, **_: run())


def _with_memory_for(block):
    from triton.runtime.errors import OutOfResources

    def run(config):
        if config.block > block:
            raise OutOfResources(131072, 101376, "shared memory")
        return 1 / config.block

    return run


@pytest.mark.usefixtures("timed")
def test_a_candidate_that_a_gpu_has_no_memory_for_is_left_out():
    assert launch.chosen_config("roomy", ROW_CONFIGS, _with_memory_for(1 << 20)).block == 16384
    assert launch.chosen_config("small", ROW_CONFIGS, _with_memory_for(4096)).block == 4096
    with pytest.raises(LossError, match="no launch configuration"):
        launch.chosen_config("none", ROW_CONFIGS, _with_memory_for(0))


@pytest.mark.usefixtures("timed")
def test_nothing_is_timed_where_the_environment_says_so(monkeypatch):
    monkeypatch.setenv("MEGATRON_EXT_AUTOTUNE", "0")
    assert launch.chosen_config("any", ROW_CONFIGS, None) == ROW_CONFIGS[0]


def test_every_kernel_asks_for_products_and_sums_in_one_instruction():
    kernel = pytest.importorskip("megatron_ext.ops.kernel")
    from triton.runtime import JITFunction
    from triton.runtime.interpreter import InterpretedFunction

    ops = Path(kernel.__file__).parent
    modules = [
        import_module(".".join(("megatron_ext.ops", *path.relative_to(ops).with_suffix("").parts)))
        for path in ops.rglob("*.py")
        if "@triton.jit" in path.read_text() or "@kernel(" in path.read_text()
    ]
    launched = {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, (JITFunction, InterpretedFunction)) and name.endswith("_kernel")
    }
    assert len(launched) > 40
    for name, value in launched.items():
        assert getattr(value.run, "keywords", None) == kernel.KERNEL_OPTIONS, name


def test_a_triton_that_cannot_compile_them_is_named(monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", "3.3.1+git")
    launch._too_old_triton.cache_clear()
    named = r"triton 3\.3\.1\+git.*3\.4 or newer"
    with pytest.raises(LossError, match=named):
        uses_triton("triton", torch.zeros(1, 4))
    with pytest.warns(UserWarning, match=named):
        assert not uses_triton("auto", SimpleNamespace(dtype=torch.float32, is_cuda=True))
    launch._too_old_triton.cache_clear()

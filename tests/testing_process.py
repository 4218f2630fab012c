"""What holds in a process that runs tests; importing it makes it so."""

import os

import torch
from hypothesis import settings

from tests.absent_devices import seed_no_absent_device
from tests.unsynced_disk import do_not_wait_for_the_disk

# Compiled kernels on the CPU, by the machine of tests/ptx.
if os.environ.get("MEGATRON_EXT_PTX"):
    os.environ["TRITON_INTERPRET"] = "0"

# Triton decides as it is imported whether kernels are compiled for a GPU or run in Python.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # megatron-core decorates with torch.compile, which imports its compiler in every process.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.triton_interpreter import interpret_quickly

    interpret_quickly()
elif os.environ.get("MEGATRON_EXT_PTX"):
    from tests.ptx.driver import run_compiled

    run_compiled()

# Files side by side share the cores: threads of each that wait for its others only take time. What
# the tests start has it from the environment.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

do_not_wait_for_the_disk()
seed_no_absent_device()

# Enough for each run of the suite; all of them where everything is run.
settings.register_profile("suite", max_examples=15, deadline=None)
settings.register_profile("everything", max_examples=400, deadline=None)
settings.load_profile("everything" if os.environ.get("MEGATRON_EXT_ALL_TEXT") else "suite")

"""Verbs of the command line on processes as a launcher starts them, without importing anew."""

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from functools import cache
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch.distributed import TCPStore

from megatron_ext.tokenizers import build_tokenizer
from tests.fork_server import fork_server
from tests.unsynced_disk import do_not_wait_for_the_disk


class Ended(NamedTuple):
    """One process of a launch."""

    exit_code: int
    output: str


class Launch:
    """``megatron-ext VERB ...`` on some processes of this machine, as ``torchrun`` starts them.

    Args:
        argv: Of the verb.
        world_size: Processes; None for one without a launcher.
        folder: For what they print.
        name: Of the launch, in that folder.
    """

    def __init__(self, argv, *, world_size, folder, name):
        context = fork_server()
        environments = [{}]
        if world_size is not None:
            # The launcher's store outlives the ranks, who read there what others said of their end.
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            common = {
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            environments = [
                {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)
            ]
        self.outputs = [folder / f"{name}-{rank}.txt" for rank in range(len(environments))]
        self.processes = [
            context.Process(target=_main, args=(list(argv), environment, output))
            for environment, output in zip(environments, self.outputs, strict=True)
        ]
        for process in self.processes:
            process.start()

    def wait(self, timeout_s=120):
        """How each ended; none outlives the call."""
        deadline = time.monotonic() + timeout_s
        try:
            for process in self.processes:
                process.join(max(0.0, deadline - time.monotonic()))
                if process.exitcode is None:
                    raise AssertionError(f"not ended after {timeout_s} s:\n{self.said()}")
        finally:
            self.kill()
        outputs = [path.read_text() for path in self.outputs]
        return [
            Ended(int(process.exitcode), output)
            for process, output in zip(self.processes, outputs, strict=True)
        ]

    def said(self):
        return "\n".join(
            f"--- {path.name}\n{path.read_text()}" for path in self.outputs if path.exists()
        )

    def kill(self):
        for process in self.processes:
            process.kill()
            process.join()


def free_port():
    """One that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _main(argv, environment, output):
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(variable, None)
    os.environ |= environment
    do_not_wait_for_the_disk()
    torch.set_num_threads(1)
    code = 0
    with output.open("w", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        try:
            with _cheaply():
                from megatron_ext.cli.main import main

                main(argv)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
            code = 1
        file.flush()
        # Threads that a process leaves behind must not keep a launch from ending.
        if code or threading.active_count() > 1:
            os._exit(code)


def _cheaply():
    """Without what takes long and is tested elsewhere: pictures, checkpoints, and reading
    vocabularies twice."""
    stack = contextlib.ExitStack()
    build = cache(build_tokenizer)
    stack.enter_context(patch("megatron_ext.training.inputs.build_tokenizer", build))
    stack.enter_context(patch("megatron_ext.training.metrics.plot_loss_curve"))
    stack.enter_context(patch("megatron_ext.training.checkpoints.saved_run.SavedRun.save"))
    return stack

"""Run a test's function on several gloo ranks of this machine."""

import os
import pickle
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.fork_server import fork_server
from tests.unsynced_disk import do_not_wait_for_the_disk

_POLL_S = 0.05


class RankError(AssertionError):
    """A rank raised, died or did not finish; the text holds its traceback."""


def run_ranks(world_size, fn, *args, timeout_s=120):
    """``fn(rank, *args)`` on ``world_size`` processes of its own with a gloo default group.

    Args:
        fn: A function at the top level of an importable module; it and ``args`` are pickled.
        timeout_s: For all of it, importing torch included; collectives time out with it.

    Returns:
        What each rank returned, by rank; it must pickle (tensors on the CPU do).

    Raises:
        RankError: The traceback of the rank that failed first, or which ranks did not finish in
            time. No process outlives the call.
    """
    context = fork_server()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [
            context.Process(target=_rank_main, args=(rank, world_size, folder, timeout_s, fn, args))
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            _wait(processes, folder, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [
            pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(world_size)
        ]


def _wait(processes, folder, timeout_s):
    deadline = time.monotonic() + timeout_s
    while any(process.exitcode is None for process in processes):
        if any(process.exitcode for process in processes):
            break
        if time.monotonic() > deadline:
            late = [rank for rank, process in enumerate(processes) if process.exitcode is None]
            raise RankError(f"ranks {late} did not finish within {timeout_s} s")
        time.sleep(_POLL_S)
    failures = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    if failures:
        raise RankError(f"rank {failures[0].stem} failed:\n{failures[0].read_text()}")
    for rank, process in enumerate(processes):
        if process.exitcode:
            raise RankError(f"rank {rank} died with exit code {process.exitcode}")


def _rank_main(rank, world_size, folder, timeout_s, fn, args):
    try:
        do_not_wait_for_the_disk()
        # One thread a rank: the ranks share the machine's cores.
        torch.set_num_threads(1)
        if os.environ.get("MEGATRON_EXT_PTX"):
            from tests.ptx.driver import run_compiled

            run_compiled()
        # What megatron-core and tools like it read instead of asking torch.
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'store'}",
            rank=rank,
            world_size=world_size,
            # The parent is the first to find a rank late.
            timeout=timedelta(seconds=timeout_s + 30),
        )
        result = fn(rank, *args)
        _write(folder / f"{rank}.result", pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        _write(folder / f"{rank}.error", traceback.format_exc().encode())
        os._exit(1)


def _write(path, content):
    """Write at once: the parent must not read half a file."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    partial.rename(path)

"""Ranks of runs on the pretended device, each a process that has one to itself."""

import json
import multiprocessing
import os
import traceback
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from tests.rehearsal.rehearsed_runs import rehearse_runs


class Ranks(NamedTuple):
    """Processes that rehearse the same runs together."""

    folder: Path
    processes: list[BaseProcess]


def start_ranks(folder: Path, names: list[str], count: int) -> Ranks:
    """Fork this process, which pretends and has joined no group, once for each rank.

    Args:
        folder: Folder of the runs, with the corpus and the vocabularies.
    """
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_rank_main, args=(folder, names, rank, count))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    return Ranks(folder, list(processes))


def answers_of(ranks: Ranks) -> list[dict[str, Any]]:
    """What ``rehearse_runs`` found on each rank, once all have ended."""
    running = {process.sentinel: process for process in ranks.processes}
    while running:
        for sentinel in wait(list(running)):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                # The others would wait for it.
                for other in running.values():
                    other.kill()
                raise SystemExit(f"{process.name} failed")
    return [json.loads(_answer(ranks.folder, i).read_text()) for i in range(len(ranks.processes))]


def _rank_main(folder: Path, names: list[str], rank: int, count: int) -> None:
    try:
        if count > 1:
            # As if each were on a machine of its own.
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": "0"}
            dist.init_process_group(
                "nccl", init_method=f"file://{folder / 'store'}", rank=rank, world_size=count
            )
        _answer(folder, rank).write_text(json.dumps(rehearse_runs(folder, names, count)))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _answer(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"

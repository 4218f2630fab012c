"""What spawned ranks run in the tests of faults: PP2, a student alone, next-token training."""

import os
import signal
import time
from contextlib import nullcontext, redirect_stderr
from datetime import timedelta
from functools import partial
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megatron_ext.errors import DistributedError
from megatron_ext.training import watchdog
from megatron_ext.training.checkpoints import rank_writers
from megatron_ext.training.checkpoints import writer as checkpoint_writer
from megatron_ext.training.checkpoints.saved_run import SavedRun
from megatron_ext.training.configuration.config import LossConfig
from megatron_ext.training.inputs import read_inputs
from megatron_ext.training.metrics import read_metrics
from megatron_ext.training.start_agreement import check_same_start
from megatron_ext.training.watchdog import Watchdog
from tests.training.rank_functions import _trainer, error_of
from tests.training.tiny_run import changed, student_run


def config_of(folder, name, **training):
    """Four steps, a checkpoint after each; ``training`` changes that section."""
    return changed(
        student_run(folder, name, pipeline_model_parallel_size=2),
        teacher=None,
        data={"validation": ()},
        loss=LossConfig(objective="next_token"),
        training={"train_iters": 4, "keep_checkpoints": 2, **training},
    )


def survive_faults(rank, folder):
    """One fault after the other, on both ranks; what came of each on this one."""

    def run(name, spoil=None, **training):
        return _run(config_of(folder, name, **training), spoil)

    def spoil_gradient(at):
        return lambda trainer: _spoil_gradient(trainer, rank, at)

    def spoil_weight(*at):
        return lambda trainer: _spoil_weight(trainer, rank, set(at))

    skips = {"nan_policy": "skip", "save_interval": 4}
    few = {"nan_policy": "skip", "max_consecutive_skips": 1, "save_interval": 2}
    return {
        "agreement": _disagree(rank, folder),
        "whole": run("whole", save_interval=4),
        "gradient": run("gradient", spoil_gradient(2), **skips),
        "loss": run("loss", spoil_weight(2), **skips),
        "stop": run("stop", spoil_gradient(3), save_interval=2),
        "too-many": run("too-many", spoil_weight(2, 3), **few),
        "full-disk": _full_disk(rank, folder, is_async=False),
        "full-disk-async": _full_disk(rank, folder, is_async=True),
        "killed-writer": _killed_writer(rank, folder),
        "hung-writer": _hung_writer(rank, folder),
        "full-disk-common": _full_disk_for_common_state(rank, folder),
        "stuck": _stuck(rank),
    }


def _run(config, spoil=None):
    trainer = _trainer(config)
    if spoil:
        spoil(trainer)
    error = error_of(trainer.train)
    weights = [p.detach().clone() for p in trainer.student.chunks[0].parameters()]
    run = Path(config.run_dir)
    return {
        "error": error,
        "counts": trainer.counts.state_dict(),
        "metrics": read_metrics(run),
        "weights": weights,
        "latest": _latest(run),
        "hidden": _hidden(run),
    }


def _hidden(run):
    return [path.name for path in (run / "checkpoints").glob(".*")]


def _latest(run):
    path = run / "checkpoints" / "latest"
    return path.read_text() if path.exists() else None


def _spoil_gradient(trainer, rank, at):
    """Of the first stage alone, behind the reduction."""
    if rank:
        return
    first = next(iter(trainer.student.chunks[0].parameters()))
    _before_and_after(trainer, at={at}, after=lambda: first.main_grad[0].fill_(torch.nan))


def _spoil_weight(trainer, rank, at):
    """Of the last stage, for as long as it computes."""
    if rank == 0:
        return
    weight = trainer.student.chunks[-1].decoder.final_layernorm.weight
    kept = []

    def spoil():
        kept.append(weight.detach().clone())
        weight.data.fill_(torch.nan)

    _before_and_after(trainer, at=at, before=spoil, after=lambda: weight.data.copy_(kept.pop()))


def _before_and_after(trainer, *, at, before=lambda: None, after=lambda: None):
    """Do something around the schedule of some iterations."""
    student, calls = trainer.student, [0]
    real = student.forward_backward

    def forward_backward(*arguments, **named):
        calls[0] += 1
        if calls[0] not in at:
            return real(*arguments, **named)
        before()
        reports = real(*arguments, **named)
        after()
        return reports

    student.forward_backward = forward_backward


def _full_disk(rank, folder, *, is_async):
    """Rank 1's writers find the disk full at the second save, and at the last, the fourth."""
    name, seen, real = f"full-disk-{is_async}", [], SavedRun.save

    def save(saved, iteration, *, is_last):
        with _disk_full() if rank == 1 and iteration in (2, 4) else nullcontext():
            real(saved, iteration, is_last=is_last)
        seen.append((_latest(folder / name), _hidden(folder / name)))

    with patch.object(SavedRun, "save", save):
        return _run(config_of(folder, name, async_save=is_async)) | {"seen": seen}


def _killed_writer(rank, folder):
    """Rank 1's writer in the background is killed in the first of two saves, with both threads."""
    real, save = FileSystemWriterAsync.write_preloaded_data, SavedRun.save
    parent, iterations = os.getpid(), []

    def write(transforms, index, *arguments, **named):
        if iterations == [1] and rank == 1:
            if index == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        real(transforms, index, *arguments, **named)

    def noting(saved, iteration, *, is_last):
        iterations[:] = [iteration]
        save(saved, iteration, is_last=is_last)

    warnings = StringIO()
    with (
        patch.object(FileSystemWriterAsync, "write_preloaded_data", staticmethod(write)),
        patch.object(SavedRun, "save", noting),
        redirect_stderr(warnings),
    ):
        run = _run(config_of(folder, "killed", async_save=True, train_iters=2))
    assert not _children(parent)
    return run | {"warnings": warnings.getvalue()}


def _hung_writer(rank, folder):
    """Rank 1's first writer in the background hangs where it was forked."""
    real, hung = rank_writers._in_background, folder / "hung"

    def hang_once(function, begun, *arguments):
        if rank == 1 and not hung.exists():
            hung.touch()
            time.sleep(600)
        real(function, begun, *arguments)

    with (
        patch.object(rank_writers, "_in_background", hang_once),
        patch.object(rank_writers, "_START_S", 0.5),
    ):
        run = _run(config_of(folder, "hung-writer", async_save=True, train_iters=1))
    return run | {"hung": hung.exists()}


def _children(parent):
    """Forked writers of a process that are still there."""
    found = [child for child in psutil.Process(parent).children() if child.name() == "python"]
    return [child.name() for child in found if child.status() == psutil.STATUS_SLEEPING]


def _disk_full():
    """Writers write to a device that has no room."""

    def open_full(path, mode):
        return open("/dev/full", mode, buffering=0)

    return patch.object(filesystem_async, "open", open_full, create=True)


def _full_disk_for_common_state(rank, folder):
    """What rank 0 writes alone, at the last save."""
    is_full = patch.object(checkpoint_writer, "COMMON_FILE", "/dev/full")
    with is_full if rank == 0 else nullcontext():
        return _run(config_of(folder, "full-disk-common", train_iters=1))


def _disagree(rank, folder):
    """As started alike, and with another learning rate on rank 1."""
    config = config_of(folder, "agreement")
    inputs = read_inputs(config, world_size=2)
    other = changed(config, optimizer={"lr": 0.5 if rank else 1e-3})
    return [error_of(partial(check_same_start, started, inputs)) for started in (config, other)]


def _stuck(rank):
    """Rank 1 is late for a collective; what each rank's watchdog says, which ends neither here."""
    _quick_heartbeats()
    said = []
    with Watchdog(timedelta(seconds=2), end=said.append):
        # Slow, but moving: nothing to complain of.
        for _ in range(6):
            watchdog.tick()
            time.sleep(0.5)
        assert not said
        if rank == 1:
            watchdog.enter("reading data", iteration=7)
            _sleep_through()
        watchdog.enter("updating", iteration=7)
        dist.barrier()
    return [str(error) for error in said]


def _sleep_through():
    time.sleep(6)


def _quick_heartbeats():
    watchdog.HEARTBEAT_S, watchdog._POLL_S = 0.3, 0.1


def lose_peer(rank, folder):
    """Rank 1 dies in the middle of an iteration; rank 0 writes down what it is told."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    _quick_heartbeats()
    watchdog.enter("training", iteration=3)
    try:
        with Watchdog(timedelta(seconds=30)):
            dist.barrier()
            time.sleep(1)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
    except DistributedError as error:
        (folder / "error").write_text(str(error))

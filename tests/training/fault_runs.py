"""What spawned ranks run in the tests of faults: PP2, a student alone, next-token training."""

import dataclasses
import errno
import os
import signal
import time
from contextlib import contextmanager, redirect_stderr
from datetime import timedelta
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megatron_ext.errors import DistributedError, MegatronExtError
from megatron_ext.training import rank_phase, watchdog
from megatron_ext.training.config import DataConfig, LossConfig
from megatron_ext.training.inputs import read_inputs
from megatron_ext.training.metrics import read_metrics
from megatron_ext.training.saved_run import SavedRun
from megatron_ext.training.start_agreement import check_same_start
from megatron_ext.training.watchdog import Watchdog
from tests.training.rank_functions import _trainer
from tests.training.tiny_run import student_run


def config_of(folder, name, **training):
    """Four steps, a checkpoint after each; ``training`` changes that section."""
    config = student_run(folder, name, pipeline_model_parallel_size=2)
    settings = {
        "train_iters": 4,
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "save_interval": 1,
        "keep_checkpoints": 2,
    }
    return dataclasses.replace(
        config,
        teacher=None,
        data=DataConfig(train=config.data.train),
        loss=LossConfig(objective="next_token"),
        training=dataclasses.replace(config.training, **settings | training),
    )


def survive_faults(rank, folder):
    """One fault after the other, on both ranks; what came of each on this one."""
    return {
        "agreement": _disagree(rank, folder),
        "whole": _run(config_of(folder, "whole", save_interval=4)),
        "gradient": _run(
            config_of(folder, "gradient", nan_policy="skip", save_interval=4),
            lambda trainer: _spoil_gradient(trainer, rank, 2),
        ),
        "loss": _run(
            config_of(folder, "loss", nan_policy="skip", save_interval=4),
            lambda trainer: _spoil_weight(trainer, rank, {2}),
        ),
        "stop": _run(
            config_of(folder, "stop", save_interval=2),
            lambda trainer: _spoil_gradient(trainer, rank, 3),
        ),
        "too-many": _run(
            config_of(
                folder, "too-many", nan_policy="skip", max_consecutive_skips=1, save_interval=2
            ),
            lambda trainer: _spoil_weight(trainer, rank, {2, 3}),
        ),
        "full-disk": _full_disk(rank, folder, is_async=False),
        "full-disk-async": _full_disk(rank, folder, is_async=True),
        "killed-writer": _killed_writer(rank, folder, is_async=False),
        "killed-writer-async": _killed_writer(rank, folder, is_async=True),
        "full-disk-common": _full_disk_for_common_state(rank, folder),
        "stuck": _stuck(rank),
    }


def _run(config, spoil=None):
    trainer = _trainer(config)
    if spoil:
        spoil(trainer)
    error = None
    try:
        trainer.train()
    except MegatronExtError as raised:
        error = f"{type(raised).__name__}: {raised}"
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
    _before_and_after(
        trainer, at={at}, after=lambda: _fill_gradient(trainer) if rank == 0 else None
    )


def _fill_gradient(trainer):
    next(iter(trainer.student.chunks[0].parameters())).main_grad[0] = torch.nan


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
    seen = []
    real = SavedRun.save

    def save(saved, iteration, *, is_last):
        with _disk_full(rank == 1 and iteration in (2, 4)):
            real(saved, iteration, is_last=is_last)
        seen.append((_latest(folder / name), _hidden(folder / name)))

    name = f"full-disk-{is_async}"
    SavedRun.save = save
    try:
        return _run(config_of(folder, name, async_save=is_async)) | {"seen": seen}
    finally:
        SavedRun.save = real


def _killed_writer(rank, folder, *, is_async):
    """One of rank 1's writers is killed in the first of two saves; the other would write on."""
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

    name, warnings = f"killed-{is_async}", StringIO()
    with (
        patch.object(FileSystemWriterAsync, "write_preloaded_data", staticmethod(write)),
        patch.object(SavedRun, "save", noting),
        redirect_stderr(warnings),
    ):
        run = _run(config_of(folder, name, async_save=is_async, train_iters=2))
    assert not _children(parent)
    return run | {"warnings": warnings.getvalue()}


def _children(parent):
    """Forked writers of a process that are still there."""
    found = [child for child in psutil.Process(parent).children() if child.name() == "python"]
    return [child.name() for child in found if child.status() == psutil.STATUS_SLEEPING]


@contextmanager
def _disk_full(is_full):
    """Writers, which are forked from here, write to a device that has no room."""
    if not is_full:
        yield
        return

    def open_full(path, mode):
        return open("/dev/full", mode, buffering=0)

    filesystem_async.open = open_full
    try:
        yield
    finally:
        del filesystem_async.open


def _full_disk_for_common_state(rank, folder):
    """What rank 0 writes alone, at the last save."""
    config = config_of(folder, "full-disk-common", train_iters=1)
    real = TorchCommonSaveStrategy.save_common

    def save_common(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    if rank == 0:
        TorchCommonSaveStrategy.save_common = save_common
    try:
        return _run(config)
    finally:
        TorchCommonSaveStrategy.save_common = real


def _disagree(rank, folder):
    """As started alike, with another learning rate on rank 1, and with another installation."""
    config = config_of(folder, "agreement")
    inputs = read_inputs(config, world_size=2)
    found = []
    other = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, lr=0.5 if rank else 1e-3)
    )
    for started in (config, other):
        try:
            check_same_start(started, inputs)
            found.append(None)
        except MegatronExtError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def _stuck(rank):
    """Rank 1 is late for a collective; what each rank's watchdog says, which ends neither here."""
    _quick_heartbeats()
    said = []
    with Watchdog(timedelta(seconds=2), end=said.append):
        # Slow, but moving: nothing to complain of.
        for _ in range(6):
            rank_phase.tick()
            time.sleep(0.5)
        assert not said
        if rank == 1:
            rank_phase.enter("reading data", iteration=7)
            _sleep_through()
        rank_phase.enter("updating", iteration=7)
        dist.barrier()
    return [str(error) for error in said]


def _sleep_through():
    time.sleep(6)


def _quick_heartbeats():
    for module in (watchdog, watchdog):
        module.HEARTBEAT_S = 0.3
    watchdog._POLL_S = 0.1


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
    rank_phase.enter("training", iteration=3)
    try:
        with Watchdog(timedelta(seconds=30)):
            dist.barrier()
            time.sleep(1)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
    except DistributedError as error:
        (folder / "error").write_text(str(error))

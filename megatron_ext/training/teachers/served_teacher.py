"""A teacher built, loaded and served on each of its own ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.distributed import process_groups
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.teachers.formed_targets import whole_head
from megatron_ext.teachers.listener import TeacherListener
from megatron_ext.teachers.server import ReplicaRanks, TeacherServer
from megatron_ext.teachers.server_limits import ServerLimits
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training import rank_phase
from megatron_ext.training.run_plan import TeacherPlan
from megatron_ext.training.teachers.live_teacher import (
    LiveTeacher,
    check_gives_hidden,
    formed_targets,
    live_teacher,
)
from megatron_ext.training.teachers.target_checks import served_form


def serve_on_rank(
    teacher: TeacherPlan,
    tokenizer: MegatronTokenizerText,
    listen: Callable[[ReplicaRanks, int], TeacherListener],
    *,
    identity: Callable[[], Mapping[str, str | int]],
    until_client_leaves: bool,
    collective_timeout: timedelta,
) -> None:
    """Build a teacher and answer students; call it on every process of its world.

    Args:
        teacher: Its plan; the ranks are laid out as its section ``serving`` says.
        tokenizer: The teacher's.
        listen: Makes the listener on the main rank of a replica, given the replica's number.
        identity: Identity of the targets, which may take reading the weights; called on main ranks.
        collective_timeout: Longest wait in a collective.

    Collectives: those that build and load a model, and of ``TeacherServer.serve``.

    Raises:
        MegatronExtError: Anything a user can mend.
    """
    teacher = teacher.on_own_ranks
    groups = process_groups.initialize(teacher.parallel.layout, timeout=collective_timeout)
    rank_phase.enter(f"building the teacher {teacher.name}")
    form = served_form(teacher, tokenizer)
    model = live_teacher(teacher, tokenizer, groups)
    if form.kind == "hidden":
        where = f"{teacher.section}.serving.targets"
        check_gives_hidden(model, groups, where=where, why="hidden targets are")
    ranks = _replica_ranks(groups)
    tile_rows = teacher.loss.linear_tile_rows
    serving = f"serving the teacher {teacher.name}"
    server = TeacherServer(
        model.teacher,
        name=teacher.name,
        formed=formed_targets(form, tokenizer, model.shard, groups, tile_rows=tile_rows),
        head=partial(_head, model, ranks) if form.kind == "hidden" else None,
        identity=identity() if ranks.is_main else {},
        ranks=ranks,
        # Longest wait for a student to connect or to read an answer.
        timeout=timedelta(minutes=teacher.parallel.distributed_timeout_minutes),
        limits=ServerLimits(length=teacher.config.model.seq_length),
        on_idle=lambda: rank_phase.enter(serving),
    )
    rank_phase.enter(serving)
    listener = listen(ranks, groups.dp_rank) if ranks.is_main else None
    server.serve(listener, until_client_leaves=until_client_leaves)


def _head(model: LiveTeacher, ranks: ReplicaRanks) -> torch.Tensor | None:
    if model.head is None:
        return None
    return whole_head(model.head, model.shard, is_kept=ranks.is_main)


def _replica_ranks(groups: ProcessGroups) -> ReplicaRanks:
    """The ranks of this rank's replica; the main one is the first of the last stage."""
    if dist.get_world_size() == groups.dp_size:
        return ReplicaRanks(device=groups.device)
    group = parallel_state.get_model_parallel_group()
    last_stage = sorted(dist.get_process_group_ranks(group))[-dist.get_world_size(groups.tp) :]
    return ReplicaRanks(device=groups.device, group=group, main=last_stage[0])

"""A teacher built, loaded and served on each of its own ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.distributed import process_groups
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses import BoundaryColumns
from megatron_ext.teachers.formed_targets import FormedTargets, whole_head
from megatron_ext.teachers.listener import TeacherListener
from megatron_ext.teachers.server import ReplicaRanks, TeacherServer
from megatron_ext.teachers.server_limits import ServerLimits
from megatron_ext.teachers.target_form import TargetForm
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.token_bytes import TokenBytes
from megatron_ext.training import rank_phase
from megatron_ext.training.run_plan import TeacherPlan
from megatron_ext.training.teachers.live_teacher import (
    LiveTeacher,
    check_gives_hidden,
    live_teacher,
)
from megatron_ext.training.teachers.target_checks import served_form


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTeacher:
    """A teacher that one process serves."""

    teacher: TeacherPlan
    """Its plan, in the layout of the ranks that serve it."""

    tokenizer: MegatronTokenizerText
    """The teacher's."""

    identity: Callable[[], Mapping[str, str | int]]
    """Identity of the targets, which may take reading the weights; called on main ranks."""

    timeout: timedelta
    """Longest wait for a student to connect or to read an answer."""

    def serve(
        self,
        listen: Callable[[ReplicaRanks, int], TeacherListener],
        *,
        until_client_leaves: bool,
        collective_timeout: timedelta,
    ) -> None:
        """Build the teacher and answer students; call it on every process of its world.

        Args:
            listen: Makes the listener on the main rank of a replica, given the replica's number.
            collective_timeout: Longest wait in a collective.

        Collectives: those that build and load a model, and of ``TeacherServer.serve``.

        Raises:
            MegatronExtError: Anything a user can mend.
        """
        teacher, name = self.teacher, self.teacher.name
        groups = process_groups.initialize(teacher.parallel.layout, timeout=collective_timeout)
        rank_phase.enter(f"building the teacher {name}")
        form = served_form(teacher, self.tokenizer)
        model = live_teacher(teacher, self.tokenizer, groups)
        if form.kind == "hidden":
            where = f"{teacher.section}.serving.targets"
            check_gives_hidden(model, groups, where=where, why="hidden targets are")
        ranks = _replica_ranks(groups)
        server = TeacherServer(
            model.teacher,
            name=name,
            formed=self._formed(form, model.shard, groups.device),
            head=self._head(model, ranks) if form.kind == "hidden" else None,
            identity=self.identity() if ranks.is_main else {},
            ranks=ranks,
            timeout=self.timeout,
            limits=ServerLimits(length=self.teacher.config.model.seq_length),
            on_idle=lambda: rank_phase.enter(f"serving the teacher {name}"),
        )
        rank_phase.enter(f"serving the teacher {name}")
        listener = listen(ranks, groups.dp_rank) if ranks.is_main else None
        server.serve(listener, until_client_leaves=until_client_leaves)

    def _head(self, model: LiveTeacher, ranks: ReplicaRanks) -> Callable[[], torch.Tensor | None]:
        def gather() -> torch.Tensor | None:
            if model.head is None:
                return None
            return whole_head(model.head, model.shard, is_kept=ranks.is_main)

        return gather

    def _formed(self, form: TargetForm, shard: VocabShard, device: torch.device) -> FormedTargets:
        boundary = None
        if form.kind == "label":
            tokens = TokenBytes.of(self.tokenizer)
            boundary = BoundaryColumns.at_word_starts(
                tokens, tokens, student_shard=shard, teacher_shard=shard, device=device
            ).teacher
        tile_rows = self.teacher.loss.linear_tile_rows
        return FormedTargets(form=form, boundary=boundary, tile_rows=tile_rows)


def _replica_ranks(groups: ProcessGroups) -> ReplicaRanks:
    """The ranks of this rank's replica; the main one is the first of the last stage."""
    if dist.get_world_size() == groups.dp_size:
        return ReplicaRanks(device=groups.device)
    group = parallel_state.get_model_parallel_group()
    last_stage = sorted(dist.get_process_group_ranks(group))[-dist.get_world_size(groups.tp) :]
    return ReplicaRanks(device=groups.device, group=group, main=last_stage[0])

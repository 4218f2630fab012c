"""Construction of all teachers of a run on this rank, by their kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import torch.distributed as dist

from megatron_ext.distributed import process_groups
from megatron_ext.engines.engine import EngineConfig
from megatron_ext.errors import DistributedError, MegatronExtError
from megatron_ext.imports import needed_packages
from megatron_ext.teachers.connection import Connection, connect, own_addresses
from megatron_ext.teachers.remote_server import RemoteServer
from megatron_ext.teachers.remote_teacher import RemoteTeacher, Replica
from megatron_ext.teachers.target_form import TargetForm
from megatron_ext.training.learning_step import run_projection
from megatron_ext.training.megatron_models.first_weights import frozen_teacher, teacher_vocab_shard
from megatron_ext.training.megatron_models.models import DTYPES
from megatron_ext.training.objective import lower_layers, share_model, teacher_objective
from megatron_ext.training.run_plan import TeacherPlan
from megatron_ext.training.teachers.cached_teacher import open_cached_teacher
from megatron_ext.training.teachers.identity import (
    launch_identity,
    server_identity,
    weights_identity,
)
from megatron_ext.training.teachers.live_teacher import (
    LoadedTeacher,
    StudentParts,
    check_gives_hidden,
    live_megatron_teacher,
    live_teacher,
)
from megatron_ext.training.teachers.own_ranks import RoleStore
from megatron_ext.training.teachers.student_average import student_average
from megatron_ext.training.teachers.target_checks import described, served_form
from megatron_ext.training.teachers.teacher_process import TeacherProcess, server_token
from megatron_ext.training.vocabulary_layout import lay_out
from megatron_ext.training.watchdog import first_line

if TYPE_CHECKING:
    from megatron_ext.teachers.engine_connection import EngineConnection


def teacher_from_cache(teacher: TeacherPlan, run: StudentParts) -> LoadedTeacher:
    """Open the cache of a teacher.

    Collectives: those of ``teacher_vocab_shard``, ``open_cached_teacher`` and ``run_projection``.
    """
    shard = teacher_vocab_shard(teacher, run.tokenizer(teacher), run.groups)
    cached = open_cached_teacher(teacher, shard=shard, groups=run.groups)
    projection = run_projection(teacher, run)
    return LoadedTeacher(teacher, shard, projection, cached=cached)


def teacher_from_huggingface(teacher: TeacherPlan, run: StudentParts) -> LoadedTeacher:
    """Load a model that transformers runs.

    Collectives: those of ``live_teacher`` and ``run_projection``.

    Raises:
        ConfigError: The objective reads hidden states, and the model's logits are not their product
            with the head.
    """
    layers = _layers(teacher, run)
    live = live_teacher(teacher, run.tokenizer(teacher), run.groups, layers=layers)
    for its in _with_its_model(teacher, run):
        if teacher_objective(its).needs.hidden:
            where = f"{its.section}.checkpoint"
            why = f"the objective {its.loss.objective} reads"
            check_gives_hidden(live, run.groups, where=where, why=why)
    # After the model, which may fail to load: a built projection is the run's first file.
    projection = run_projection(teacher, run)
    return LoadedTeacher(teacher, live.shard, projection, live.head, live.teacher)


def teacher_on_student_ranks(teacher: TeacherPlan, run: StudentParts) -> LoadedTeacher:
    """Build and load a model of megatron-core; permute both heads where the run asks for that.

    Collectives: those that build and load a model, of ``run_projection`` and of ``lay_out``.
    """
    chunks, shard = frozen_teacher(teacher, run.tokenizer(teacher), run.groups)
    # After the model, which may fail to load: a built projection is the run's first file.
    projection = run_projection(teacher, run)
    laid_out = None
    if run.plan.training.vocabulary_layout == "co_sharded":
        assert projection is not None, "checked with the objective"
        laid_out = lay_out(run, projection, teacher.config.model, chunks, shard)
    live = live_megatron_teacher(
        chunks,
        shard,
        run.groups,
        offload=teacher.config.offload,
        layers=_layers(teacher, run),
    )
    return LoadedTeacher(teacher, shard, projection, live.head, live.teacher, laid_out=laid_out)


def teacher_from_student(teacher: TeacherPlan, run: StudentParts) -> LoadedTeacher:
    """Build the average of the student.

    Collectives: those that build a model, of ``teacher_vocab_shard`` and of ``run_projection``.
    """
    shard = teacher_vocab_shard(teacher, run.tokenizer(teacher), run.groups)
    average = student_average(
        teacher,
        run.plan,
        run.chunks,
        run.groups,
        padded_vocab_size=run.shard.width * run.plan.parallel.tensor_model_parallel_size,
    )
    projection = run_projection(teacher, run)
    live = live_megatron_teacher(
        average.chunks,
        shard,
        run.groups,
        offload=False,
        layers=_layers(teacher, run),
    )
    return LoadedTeacher(teacher, shard, projection, live.head, live.teacher, average=average)


class _Processes(NamedTuple):
    """Processes of a teacher, on a rank that connects to them."""

    addresses: Sequence[str]
    token: str
    root_certificate: Path | None = None
    why_gone: Callable[[], str | None] = lambda: None
    finish: Callable[[], None] = lambda: None
    end: Callable[[], None] = lambda: None


def teacher_from_remote(teacher: TeacherPlan, run: StudentParts) -> LoadedTeacher:
    """Connect to a teacher in other processes, from the main rank of each replica.

    Collectives: those of ``teacher_vocab_shard``, ``_identity``, ``RemoteTeacher`` and
    ``run_projection``, and one all-gather of objects.

    Raises:
        MegatronExtError: It cannot be reached, or is not the configured one; on every rank.
    """
    groups, tokenizer, placement = run.groups, run.tokenizer(teacher), teacher.config.placement
    engine = teacher.config.engine
    form = served_form(teacher, tokenizer)
    shard = teacher_vocab_shard(teacher, tokenizer, groups)
    identity = _identity(teacher, run)
    processes: _Processes | None = None
    replicas: Sequence[Replica] = ()
    error: Exception | None = None
    if groups.is_replica_main:
        try:
            if engine is not None:
                replicas = [_engine_connection(teacher, engine, form)]
            else:
                processes = _FINDERS[placement](teacher, run)
                replicas = _connect(processes, teacher.name, run, form, identity)
        except Exception as failure:
            if processes is not None:
                processes.end()
            error = failure
            if not isinstance(failure, MegatronExtError):
                # An error that can be sent to the other ranks.
                what = f"the teacher {teacher.name} cannot be reached"
                error = DistributedError(what, got=first_line(failure))
    process_groups.raise_on_all(error)
    processes = processes or _Processes((), "")
    remote = RemoteTeacher(
        replicas,
        form=form,
        shard=shard,
        groups=groups,
        dtype=DTYPES[teacher.training.precision],
        logit_cap=teacher.config.model.logit_cap,
        prefetch=teacher.config.serving.prefetch,
        finish=processes.finish,
        end=processes.end,
    )
    if groups.is_main:
        place = placement if engine is None else engine.kind
        print(described(teacher.name, place, form), flush=True)
    projection = run_projection(teacher, run)
    return LoadedTeacher(teacher, shard, projection, teacher=remote)


def _engine_connection(
    teacher: TeacherPlan, engine: EngineConfig, form: TargetForm
) -> EngineConnection:
    # Late: only runs with an engine need requests.
    with needed_packages(f"{teacher.section}.engine"):
        from megatron_ext.engines.server import InferenceServer
        from megatron_ext.teachers.engine_connection import EngineConnection

    server = InferenceServer(
        engine,
        where=f"{teacher.section}.engine",
        vocab_size=form.vocab_size,
        length=teacher.config.model.seq_length + 1,
    )
    return EngineConnection(server, form)


def _connect(
    processes: _Processes,
    name: str,
    run: StudentParts,
    form: TargetForm,
    identity: Mapping[str, str | int],
) -> list[Connection]:
    groups = run.groups
    servers = [
        RemoteServer(
            name=name,
            address=address,
            token=processes.token,
            root_certificate=processes.root_certificate,
            timeout_s=_timeout(run).total_seconds(),
            why_gone=processes.why_gone,
        )
        for address in own_addresses(
            processes.addresses, client=groups.dp_rank, clients=groups.dp_size
        )
    ]
    return connect(servers, form=form, identity=identity, device=groups.device)


def _on_own_ranks(teacher: TeacherPlan, run: StudentParts) -> _Processes:
    serving, store = teacher.config.serving, RoleStore(teacher.name)
    assert serving.ranks is not None, "checked with the configuration"
    replicas = serving.ranks // serving.replica_size
    addresses = store.addresses(replicas, timeout=_timeout(run))
    return _Processes(
        [replica.address for replica in addresses],
        addresses[0].token,
        why_gone=store.why_gone,
        finish=store.finish if run.groups.is_main else lambda: None,
    )


def _in_process(teacher: TeacherPlan, run: StudentParts) -> _Processes:
    process = TeacherProcess(
        teacher.name, run_dir=run.plan.run_dir, values=run.plan.values, rank=dist.get_rank()
    )
    try:
        address = process.address(_timeout(run).total_seconds())
    except BaseException:
        process.close()
        raise
    # Every replica has started one for itself.
    addresses = [address.address] * run.groups.dp_size
    return _Processes(addresses, address.token, why_gone=process.why_gone, end=process.close)


def _on_server(teacher: TeacherPlan, run: StudentParts) -> _Processes:
    serving = teacher.config.serving
    root = serving.root_certificate
    return _Processes(
        serving.address,
        server_token(serving, serving.address[0]),
        None if root is None else Path(root),
    )


_FINDERS: Final[Mapping[str, Callable[[TeacherPlan, StudentParts], _Processes]]] = {
    "own_ranks": _on_own_ranks,
    "process": _in_process,
    "server": _on_server,
}


def _timeout(run: StudentParts) -> timedelta:
    """Longest wait for an answer: shorter than the watchdog's, whose report says less about it."""
    return 0.9 * timedelta(minutes=run.plan.parallel.distributed_timeout_minutes)


def _identity(teacher: TeacherPlan, run: StudentParts) -> Mapping[str, str | int]:
    """The identity that a teacher must report; none for an engine, which has no word for it.

    Collectives: those of ``ProcessGroups.from_main`` for a server, whose weights one rank reads.
    """
    if teacher.config.engine is not None:
        return {}
    if teacher.config.placement != "server":
        return launch_identity(teacher, run.tokenizer(teacher))
    weights = run.groups.from_main(lambda: weights_identity(teacher.checkpoint))
    return server_identity(teacher, run.tokenizer(teacher), weights)


_MAKERS: Final[Mapping[str, Callable[[TeacherPlan, StudentParts], LoadedTeacher]]] = {
    "cache": teacher_from_cache,
    "remote": teacher_from_remote,
    "average": teacher_from_student,
    "huggingface": teacher_from_huggingface,
    "megatron": teacher_on_student_ranks,
}
"""By kind: ``cache`` where targets are read from files, ``remote`` where other processes send them,
``average`` for the student's average, otherwise the library that runs the model on the student's
ranks."""


def make_run_teachers(run: StudentParts) -> dict[str, LoadedTeacher]:
    """Make every teacher of a run, one after the other, in the order of the configuration.

    Teachers that ``share_model`` have one, which the first of them loads.

    Collectives: those of each kind.
    """
    made: dict[str, LoadedTeacher] = {}
    for name, teacher in run.plan.teachers.items():
        first = _with_its_model(teacher, run)[0].name
        if first in made:
            # The first one's average is updated for both.
            made[name] = made[first]._replace(
                plan=teacher, projection=run_projection(teacher, run), average=None
            )
        else:
            made[name] = _MAKERS[_kind(teacher)](teacher, run)
    return made


def _with_its_model(teacher: TeacherPlan, run: StudentParts) -> list[TeacherPlan]:
    """Teachers that share a teacher's model, itself included, in the order of the configuration."""
    return [
        other
        for other in run.plan.teachers.values()
        if other is teacher or share_model(other, teacher)
    ]


def _layers(teacher: TeacherPlan, run: StudentParts) -> tuple[int, ...]:
    """Layers below the last whose states are read of a teacher's model."""
    sharing = _with_its_model(teacher, run)
    return tuple(sorted({n for its in sharing for n in lower_layers(its, of_student=False)}))


def _kind(teacher: TeacherPlan) -> str:
    if teacher.config.cache is not None:
        return "cache"
    if teacher.config.ema_decay is not None:
        return "average"
    return "remote" if teacher.config.is_remote else teacher.config.library

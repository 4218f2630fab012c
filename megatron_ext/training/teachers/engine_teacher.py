"""A teacher that an inference engine runs, as a run makes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core import parallel_state

from megatron_ext.distributed import process_groups
from megatron_ext.engines.engine import EngineConfig
from megatron_ext.errors import MegatronExtError
from megatron_ext.imports import needed_packages
from megatron_ext.teachers.remote_teacher import RemoteTeacher
from megatron_ext.teachers.target_form import TargetForm
from megatron_ext.training.learning_step import run_projection
from megatron_ext.training.megatron_models.first_weights import teacher_vocab_shard
from megatron_ext.training.megatron_models.models import DTYPES
from megatron_ext.training.run_plan import TeacherPlan
from megatron_ext.training.teachers.live_teacher import LoadedTeacher, StudentParts
from megatron_ext.training.teachers.target_checks import described, served_form

if TYPE_CHECKING:
    from megatron_ext.teachers.engine_connection import EngineConnection


def teacher_from_engine(teacher: TeacherPlan, run: StudentParts) -> LoadedTeacher:
    """Connect to the inference engine of a teacher, from the main rank of each replica.

    Collectives: those of ``teacher_vocab_shard``, ``RemoteTeacher`` and ``run_projection``, and one
    all-gather of objects.

    Raises:
        MegatronExtError: It cannot be reached, or has not the model; on every rank.
    """
    groups, tokenizer = run.groups, run.tokenizer(teacher)
    form = served_form(teacher, tokenizer)
    shard = teacher_vocab_shard(teacher, tokenizer, groups)
    engine = teacher.config.engine
    assert engine is not None, "checked with the configuration"
    replicas: list[EngineConnection] = []
    error: MegatronExtError | None = None
    if groups.is_replica_main:
        try:
            replicas.append(_connected(teacher, engine, tokenizer.vocab_size, form))
        except MegatronExtError as failure:
            error = failure
    process_groups.raise_on_all(error)
    remote = RemoteTeacher(
        replicas,
        form=form,
        shard=shard,
        groups=groups,
        last_stage=parallel_state.get_tensor_and_context_parallel_group(),
        dtype=DTYPES[teacher.training.precision],
        prefetch=teacher.config.serving.prefetch,
    )
    if groups.is_main:
        print(described(teacher.name, engine.kind, form), flush=True)
    return LoadedTeacher(teacher, shard, run_projection(teacher, run), teacher=remote)


def _connected(
    teacher: TeacherPlan, engine: EngineConfig, vocab_size: int, form: TargetForm
) -> EngineConnection:
    # Late: only runs with an engine need requests.
    with needed_packages(f"{teacher.section}.engine"):
        from megatron_ext.engines.server import InferenceServer
        from megatron_ext.teachers.engine_connection import EngineConnection

    server = InferenceServer(
        engine,
        where=f"{teacher.section}.engine",
        vocab_size=vocab_size,
        length=teacher.config.model.seq_length + 1,
    )
    return EngineConnection(server, form)

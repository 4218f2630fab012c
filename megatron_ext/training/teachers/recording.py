"""``megatron-ext cache-teacher``: a teacher's targets for a run's texts, recorded into files.

Texts are recorded in blocks, one file each, on every rank. Existing files are not made again, so a
recording that was killed continues, over any number of ranks.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save

from megatron_ext.distributed import process_groups
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.files import write_bytes
from megatron_ext.teachers.formed_targets import whole_head
from megatron_ext.teachers.target_form import TargetForm
from megatron_ext.training import watchdog
from megatron_ext.training.configuration.config import DistillConfig, TeacherConfig
from megatron_ext.training.configuration.teachers import ServingConfig
from megatron_ext.training.inputs import Inputs
from megatron_ext.training.metrics import progress_bar
from megatron_ext.training.run_plan import TeacherPlan
from megatron_ext.training.start_agreement import check_same_start
from megatron_ext.training.teachers.block_recorder import (
    Block,
    BlockRecorder,
    block_bytes,
    blocks_of,
)
from megatron_ext.training.teachers.identity import WEIGHTS, cache_identity, weights_identity
from megatron_ext.training.teachers.live_teacher import (
    check_gives_hidden,
    formed_targets,
    live_teacher,
)
from megatron_ext.training.teachers.target_cache import HEAD_FILE, MANIFEST_FILE, Manifest
from megatron_ext.training.watchdog import watched_launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A cache to be recorded."""

    teacher: str
    """Name of the teacher."""

    form: TargetForm

    folder: Path

    file_bytes: int
    """Approximate size of a file."""


def record_teacher(config: DistillConfig, inputs: Inputs, recording: Recording) -> Manifest:
    """Make or finish a cache; call it on every rank, under torchrun or alone.

    Args:
        config: The result of ``recording_config``.
        inputs: The result of ``read_inputs`` for it.

    Raises:
        MegatronExtError: Anything a user can mend.
    """
    with watched_launch(config.parallel.distributed_timeout_minutes) as timeout:
        check_same_start(config, inputs)
        groups = process_groups.initialize(config.parallel.layout, timeout=timeout)
        return record(config, groups, inputs, recording)


def recording_config(config: DistillConfig, folder: Path, *, world_size: int) -> DistillConfig:
    """``config`` for recording: without caches, held-out text and the run's folder, and with one
    pass of the teacher's schedule over all replicas as the global batch."""
    parallel, training = config.parallel, config.training
    replicas = parallel.layout.replicas(world_size)
    _check_replicas(config)
    stages = parallel.pipeline_model_parallel_size
    rows = training.micro_batch_size * replicas * stages
    teacher = config.teacher and _live(config.teacher)
    teachers = {name: _live(section) for name, section in config.teachers.items()}
    return dataclasses.replace(
        config,
        run_dir=str(folder),
        initial_checkpoint=None,
        teacher=teacher,
        teachers=teachers,
        data=dataclasses.replace(config.data, validation=(), rollouts=None),
        training=dataclasses.replace(
            training,
            global_batch_size=rows,
            vocabulary_layout="original",
            tensorboard_dir=None,
            wandb_project=None,
        ),
    )


def _check_replicas(config: DistillConfig) -> None:
    """Refuse replicas that share experts, since each records blocks of its own."""
    layout = config.parallel.layout
    if layout.shares_experts_over_replicas:
        raise ConfigError(
            "replicas that share experts cannot record, each at its own pace",
            where="parallel",
            got=layout.shown_experts,
            expected="no more than tensor_model_parallel_size x context_parallel_size",
            fix="lower the sizes of experts, or raise tensor_model_parallel_size",
        )


def _live(teacher: TeacherConfig) -> TeacherConfig:
    """``teacher`` with its model on the ranks that record, wherever a run has it."""
    return dataclasses.replace(
        teacher, cache=None, placement="student_ranks", serving=ServingConfig(), engine=None
    )


def record(
    config: DistillConfig, groups: ProcessGroups, inputs: Inputs, recording: Recording
) -> Manifest:
    """``record_teacher`` in initialised process groups.

    Collectives: those of ``ProcessGroups.on_main`` three times, one all-gather of names, those that
    load the teacher, those of ``BlockRecorder.record`` for each block, and one barrier.
    """
    name, folder = recording.teacher, recording.folder
    plan = TeacherPlan.of(config, name)
    assert recording.form.vocab_size == inputs.teachers[name].tokenizer.vocab_size
    text_bytes = block_bytes(recording.form, recording.file_bytes)
    blocks = blocks_of(inputs.data, text_bytes)
    watchdog.enter("reading the teacher's checkpoint")
    manifest = Manifest(
        form=recording.form,
        identity={
            **cache_identity(config, inputs, name),
            WEIGHTS: groups.from_main(lambda: weights_identity(plan.checkpoint)),
        },
        shards=tuple(block.name for block in blocks),
        block_bytes=text_bytes,
    )
    groups.on_main(lambda: begin_cache(folder, manifest))
    missing = _missing(folder, manifest, blocks, groups)
    has_head = recording.form.kind != "hidden" or (folder / HEAD_FILE).exists()
    if missing or not has_head:
        tokenizer = inputs.teachers[name].tokenizer
        live = live_teacher(plan, tokenizer, groups)
        if recording.form.kind == "hidden":
            check_gives_hidden(live, groups, where="--targets", why="hidden targets are")
            if live.head is not None:
                # One all-gather over ``tp``.
                whole = whole_head(live.head, live.shard, is_kept=groups.is_main)
                if whole is not None:
                    write_bytes(folder / HEAD_FILE, save({"head": whole}))
        recorder = BlockRecorder(
            name=name,
            teacher=live.teacher,
            formed=formed_targets(
                recording.form,
                tokenizer,
                live.shard,
                groups,
                tile_rows=config.loss.linear_tile_rows,
            ),
            collator=inputs.data.collator,
            groups=groups,
            micro_batch_size=config.training.micro_batch_size,
            microbatch_count=config.parallel.pipeline_model_parallel_size,
            manifest=manifest,
            folder=folder,
        )
        _record_blocks(recorder, missing, done=len(blocks) - len(missing), groups=groups)
    dist.barrier()
    groups.on_main(lambda: finish_cache(folder, manifest))
    return Manifest.load(folder)


def _record_blocks(
    recorder: BlockRecorder, missing: list[Block], *, done: int, groups: ProcessGroups
) -> None:
    watchdog.enter("recording the teacher")
    bar = (
        progress_bar("cache", total=done + len(missing), done=done)
        if groups.is_main
        else nullcontext()
    )
    with bar as shown:
        for start in range(0, len(missing), groups.dp_size):
            blocks = missing[start : start + groups.dp_size]
            if groups.dp_rank < len(blocks):
                recorder.record(blocks[groups.dp_rank])
            if shown is not None:
                shown.update(len(blocks))


def begin_cache(folder: Path, manifest: Manifest) -> None:
    """Save the manifest, or check that it is that of the recording that was begun.

    An import that was not finished has nothing of its own: another one takes its place.

    Raises:
        ConfigError: The folder holds another cache.
    """
    for partial in folder.glob(".targets-*"):
        partial.unlink(missing_ok=True)
    if not (folder / MANIFEST_FILE).exists():
        manifest.save(folder)
        return
    before = Manifest.load(folder)
    is_import = before.imported is not None and manifest.imported is not None
    if is_import and not before.is_complete and before.digest != manifest.digest:
        for name in before.shards:
            (folder / name).unlink(missing_ok=True)
        manifest.save(folder)
        return
    before.check_same(manifest.identity, folder)
    if before.digest != manifest.digest:
        raise ConfigError(
            "the folder holds another cache of the teacher",
            where=folder,
            got=f"{manifest.form}, {len(manifest.shards)} files",
            expected=f"{before.form}, {len(before.shards)} files",
            fix="take another --output, or the options that the cache was begun with",
        )


def _missing(
    folder: Path, manifest: Manifest, blocks: list[Block], groups: ProcessGroups
) -> list[Block]:
    """Blocks without a whole file, as the main rank sees them. One all-gather of objects."""
    local = {block.name for block in blocks if not is_whole(folder, manifest, block.name)}
    of_ranks: list[set[str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, local if groups.is_main else None)
    (missing,) = (names for names in of_ranks if names is not None)
    return [block for block in blocks if block.name in missing]


def is_whole(folder: Path, manifest: Manifest, name: str) -> bool:
    """Whether a file of the cache is there, whole and of the cache."""
    try:
        manifest.head(folder, name)
    except CheckpointError:
        return False
    return True


def finish_cache(folder: Path, manifest: Manifest) -> None:
    """Save the manifest of the complete cache.

    Raises:
        CheckpointError: A file is missing or not whole.
    """
    heads = [manifest.head(folder, name) for name in manifest.shards]
    manifest.completed(
        windows=sum(len(head.windows) for head in heads),
        tokens=sum(head.tokens for head in heads),
    ).save(folder)

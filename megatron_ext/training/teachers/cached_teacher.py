"""A teacher whose targets are read from a cache. B rows, T positions, S those of this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_ext.data.aligner import PackedSample
from megatron_ext.data.collator import CrossTokenizerCollator
from megatron_ext.distributed.context_parallel import ContextRank
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses import TeacherTargets
from megatron_ext.teachers.formed_targets import as_targets, filler, from_records
from megatron_ext.training.megatron_models.models import DTYPES
from megatron_ext.training.run_plan import TeacherPlan
from megatron_ext.training.teachers.identity import WEIGHTS, weights_identity
from megatron_ext.training.teachers.shard_file import PlacedWindows
from megatron_ext.training.teachers.target_cache import TargetCache

Recorded = Mapping[str, torch.Tensor]
"""Targets of a microbatch by the field of ``TeacherTargets``, [B, S, ...] each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedTeacher:
    """Reader of a microbatch's targets, window by window, from a cache."""

    name: str

    cache: TargetCache

    shard: VocabShard
    """This rank's columns of the teacher's vocabulary."""

    head_weight: torch.Tensor | None = None
    """[Vp, D] on this rank's device, for targets that are hidden states."""

    logit_cap: float | None = None
    """Of the logits that the head makes of hidden states."""

    def recorded(
        self,
        samples: Sequence[PackedSample],
        collator: CrossTokenizerCollator,
        context: ContextRank | None = None,
    ) -> Recorded:
        """The cached targets of a microbatch; on the host.

        Args:
            samples: Rows of the microbatch.
            collator: The collator that makes it of them.
            context: The rank whose part of the rows is taken; None for whole rows.

        Raises:
            DataError: A window is not in the cache.
            CheckpointError: The cache is damaged.
        """
        placed = PlacedWindows.of(samples, collator, self.name)
        fields = filler(self.cache.form, placed.row_count * placed.row_length)
        if placed.windows:
            records = [self.cache.records(key, length) for key, _, length in placed.windows]
            places = np.concatenate(
                [np.arange(start, start + length) for _, start, length in placed.windows]
            )
            cached = from_records(np.concatenate(records), self.cache.form)
            for name, values in cached.items():
                fields[name][torch.from_numpy(places)] = values
        rows = {
            name: values.unflatten(0, (placed.row_count, placed.row_length))
            for name, values in fields.items()
        }
        if context is None:
            return rows
        return {name: context.cut(values) for name, values in rows.items()}

    def targets(self, recorded: Recorded) -> TeacherTargets:
        """``recorded``, already on this rank's device, as an objective reads it."""
        return as_targets(
            recorded,
            self.cache.form,
            self.shard,
            head_weight=self.head_weight,
            logit_cap=self.logit_cap,
        )


def open_cached_teacher(
    teacher: TeacherPlan, *, shard: VocabShard, groups: ProcessGroups
) -> CachedTeacher:
    """Open a teacher's cache on this rank, after a check that it is of the configured weights.

    Nothing says of which weights an imported cache is: that is said instead.

    Collectives: that of ``ProcessGroups.on_main``, in which the main rank reads the checkpoint.

    Raises:
        ConfigError: The cache was made with other weights; on every rank.
    """
    assert teacher.config.cache is not None
    cache = TargetCache(teacher.config.cache)

    def check_weights() -> None:
        imported = cache.manifest.imported
        if imported is not None:
            print(
                f"teacher {teacher.name} (cache): imported from recordings of "
                f"{imported['format']}, of which weights is not known",
                flush=True,
            )
            return
        identity = {**cache.manifest.identity, WEIGHTS: weights_identity(teacher.checkpoint)}
        cache.manifest.check_same(identity, cache.folder)

    groups.on_main(check_weights)
    head = None
    if cache.form.kind == "hidden" and groups.is_last_stage:
        dtype = DTYPES[teacher.training.precision]
        head = cache.head(shard).to(device=groups.device, dtype=dtype)
    cap = teacher.config.model.logit_cap
    return CachedTeacher(
        name=teacher.name, cache=cache, shard=shard, head_weight=head, logit_cap=cap
    )

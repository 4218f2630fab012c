"""The cache of a teacher, opened on a rank."""

from __future__ import annotations

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.training.config import DistillConfig
from megatron_ext.training.models import DTYPES
from megatron_ext.training.teacher_cache.cached_teacher import CachedTeacher
from megatron_ext.training.teacher_cache.files.target_cache import TargetCache
from megatron_ext.training.teacher_cache.identity import WEIGHTS, weights_of


def open_cached_teacher(
    config: DistillConfig, name: str, *, shard: VocabShard, groups: ProcessGroups
) -> CachedTeacher:
    """The cache of a teacher on this rank, once its weights are known to be the configured ones.

    Collectives: that of ``ProcessGroups.on_main``, behind which the checkpoint is read once.

    Raises:
        ConfigError: The cache was made with other weights; on every rank.
    """
    teacher = config.named_teachers[name]
    assert teacher.cache is not None
    cache = TargetCache(teacher.cache)

    def check_weights() -> None:
        identity = {**cache.manifest.identity, WEIGHTS: weights_of(config, name)}
        cache.manifest.check_same(identity, cache.folder)

    groups.on_main(check_weights)
    head = None
    if cache.form.kind == "hidden" and groups.is_last_stage:
        dtype = DTYPES[config.training.precision]
        head = cache.head(shard).to(device=groups.device, dtype=dtype)
    return CachedTeacher(name=name, cache=cache, shard=shard, head_weight=head)

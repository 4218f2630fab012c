"""Whether the caches that a run names are of this run; before any model is built."""

from __future__ import annotations

from megatron_ext.training.config import DistillConfig
from megatron_ext.training.inputs import Inputs
from megatron_ext.training.loss_check import teacher_objective
from megatron_ext.training.teacher_cache.accepted_forms import check_targets
from megatron_ext.training.teacher_cache.files.target_cache import TargetCache
from megatron_ext.training.teacher_cache.identity import WEIGHTS, cache_identity


def check_caches(config: DistillConfig, inputs: Inputs) -> None:
    """Check every cache that a run names but for the weights that it was made with.

    Raises:
        ConfigError: One is missing, of something else, or of a form that an objective cannot use.
        CheckpointError: One is unfinished, cut off or damaged.
    """
    for name, teacher in config.named_teachers.items():
        if teacher.cache is None:
            continue
        cache = TargetCache(teacher.cache)
        manifest = cache.manifest
        objective = teacher_objective(config, name)
        check_targets(config, name, objective, manifest.form, key="cache")
        weights = {WEIGHTS: manifest.identity[WEIGHTS]}
        manifest.check_same(cache_identity(config, inputs, name) | weights, cache.folder)

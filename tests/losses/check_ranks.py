"""What the ranks of ``test_checks.py`` run."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError
from megatron_ext.losses import LOSS_REGISTRY
from megatron_ext.losses.checks import check_shard, check_shards_agree
from megatron_ext.losses.diagnostics import check_finite
from tests.distributed.sharded_inputs import completed, prefixed
from tests.losses.microbatch import Microbatch


def all_checks(rank: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What each function below finds, from one start of the ranks."""
    return errors_of_poison(rank), flags_of_poison(rank), errors_of_shards(rank)


def errors_of_poison(rank: int) -> dict[str, str | None]:
    """The error of each poisoned side, NaN on rank 1 alone; None where there is none."""
    group = dist.group.WORLD
    found: dict[str, str | None] = {}
    for side in ("nothing", "student", "teacher", "both"):
        inputs = Microbatch.random().inputs(rank=rank, ranks=2, group=group, padding=(3, 1))
        if rank == 1:
            poison = inputs.student_logits.detach().clone()
            if side in ("student", "both"):
                poison[inputs.labels >= 0] = torch.nan
            inputs = replace(inputs, student_logits=poison)
            if side in ("teacher", "both"):
                inputs.teacher.logits[inputs.alignment.teacher_chunk_id >= 0] = torch.inf
        check = check_finite(inputs)
        try:
            check.raise_if_bad(where="iteration 7")
            found[side] = None
        except LossError as error:
            found[side] = str(error)
    return found


def flags_of_poison(rank: int) -> dict[str, dict[str, tuple[list[int], list[int]]]]:
    """What ``check_finite`` and each objective say of a number that rank 1 alone holds."""
    found: dict[str, dict[str, tuple[list[int], list[int]]]] = {}
    makers = {"partition_kl": completed, "byte_prefix": prefixed}
    for name in ("projected_kl", "gold", "uld", "strict_topk", "sampled_kl", *makers):
        batch = Microbatch.random()
        inputs = batch.inputs(rank=rank, ranks=2, group=dist.group.WORLD, padding=(3, 1))
        if name in makers:
            inputs = makers[name](batch, inputs)
        objective, found[name] = LOSS_REGISTRY[name](), {}
        assert objective.tells_bad(inputs)
        for place in ("nothing", "student", "teacher"):
            logits = [inputs.student_logits.detach().clone(), inputs.teacher.logits.clone()]
            if rank == 1 and place != "nothing":
                ids = inputs.alignment.student_chunk_id, inputs.alignment.teacher_chunk_id
                side = place == "teacher"
                row = (ids[side] == 0).nonzero()[0].tolist()
                logits[side][(*row, 2)] = torch.inf
            bad = replace(
                inputs,
                student_logits=logits[0],
                teacher=replace(inputs.teacher, logits=logits[1]),
            )
            read, told = check_finite(bad).bad[0], objective(bad).bad()
            found[name][place] = read.tolist(), told.tolist()
    return found


def errors_of_shards(rank: int) -> dict[str, str | None]:
    """The error of each way to cut 20 tokens over two ranks."""
    group: Any = dist.group.WORLD
    cuts = {
        "right": [(0, 10, 20), (10, 20, 20)],
        "padded": [(0, 12, 20), (12, 24, 20)],
        "gap": [(0, 9, 20), (9, 18, 20)],
        "other widths": [(0, 10, 20), (12, 24, 20)],
        "both the first": [(0, 10, 20), (0, 10, 20)],
        "other vocabularies": [(0, 10, 20), (10, 20, 19)],
    }
    found: dict[str, str | None] = {}
    for name, ranges in cuts.items():
        start, stop, size = ranges[rank]
        shard = VocabShard(start=start, stop=stop, vocab_size=size, group=group)
        found[name] = _error(partial(check_shards_agree, shard, side="student", device="cpu"))
        if name in ("gap", "right", "both the first"):
            found[f"{name}, host alone"] = _error(partial(check_shard, shard, side="student"))
    return found


def _error(check: Callable[[], None]) -> str | None:
    try:
        check()
    except LossError as error:
        return str(error)
    return None

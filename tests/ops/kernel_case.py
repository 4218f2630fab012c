"""How a kernel is compared: on a GPU or interpreted, over memory full of NaN, with a fair rule."""

import os
from dataclasses import fields
from itertools import product
from typing import get_args

import pytest
import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.divergence import Divergence, DivergenceOptions

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DIRECTIONS = get_args(Divergence)
BOTH = pytest.mark.parametrize("implementation", ["triton", "torch"])
ALL_THREE = pytest.mark.parametrize("implementation", ["triton", "cpu", "torch"])

EVERY_COMBINATION = DEVICE.type == "cuda" or bool(os.environ.get("MEGATRON_EXT_ALL_TEXT"))
"""Whether to run the whole product of ``combinations``: interpreted kernels are slow."""


def combinations(*axes):
    """Values to run a kernel with, one of each axis: a diagonal, or every combination.

    The diagonal has every value of every axis.
    """
    if EVERY_COMBINATION:
        return list(product(*axes))
    count = max(map(len, axes))
    return [tuple(axis[i % len(axis)] for axis in axes) for i in range(count)]


def sampled(values, count=1):
    """All values where every combination is run, else the first ``count``."""
    return values if EVERY_COMBINATION else values[:count]


def vocab_shard(vocab, padding, rank, ranks, group):
    """One rank's columns of a padded vocabulary."""
    width = -(-(vocab + padding) // ranks)
    return VocabShard(start=rank * width, stop=(rank + 1) * width, vocab_size=vocab, group=group)


def columns_of(full, shard, pad_value):
    """This shard's columns of unpadded ``full`` [..., V]; padded ones hold ``pad_value``."""
    missing = max(shard.stop - full.shape[-1], 0)
    padded = torch.nn.functional.pad(full, (0, missing), value=pad_value)
    return padded[..., shard.start : shard.stop].clone()


def packed(options, kind=DivergenceOptions):
    """The options of a divergence as one ``kind`` of them, by the name ``options``; and others."""
    names = {field.name for field in fields(kind)}
    own = {name: value for name, value in options.items() if name in names}
    others = {name: value for name, value in options.items() if name not in names}
    return {"options": kind(**own), **others}


def rounding(dtype):
    """Largest relative error of storing a value: half a unit in the last place.

    Interpreted kernels cut bf16 values off instead of rounding them, so there it is a whole one.
    """
    cut_off = dtype == torch.bfloat16 and INTERPRETED
    return torch.finfo(dtype).eps * (1.0 if cut_off else 0.5)


def kept_for_backward(run):
    """What autograd saves while ``run`` is called."""
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return kept


def assert_as_exact(got, same_dtype, truth, *, slack):
    """``got`` is no further from ``truth`` than torch in the same dtype is, plus a slack.

    Args:
        got: What the kernel made.
        same_dtype: What plain torch makes of the same inputs in their dtype.
        truth: The reference in fp64.
        slack: Share of the truth's largest entry.
    """
    assert got.shape == truth.shape
    assert got.isfinite().all() == truth.isfinite().all()
    error = _worst(got, truth)
    allowed = _worst(same_dtype, truth) + slack * float(truth.abs().max() if truth.numel() else 0)
    assert error <= allowed, f"{error:.3e} from the truth, {allowed:.3e} allowed"


def _worst(values, truth):
    return float((values.double() - truth.double()).abs().max()) if truth.numel() else 0.0

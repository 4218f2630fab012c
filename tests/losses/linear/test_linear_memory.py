"""What the linear form allocates: one tile of logits a model, and no wide tensor of them.

T rows, V columns, D hidden.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ext.distributed import vocab_parallel
from megatron_ext.losses import LOSS_REGISTRY, DistillationInputs
from megatron_ext.losses.linear import LinearDistillation, no_logits
from megatron_ext.losses.objective import Objective
from tests.losses.linear.linear_case import HIDDEN, leaves, ordered, with_hidden
from tests.losses.microbatch import Microbatch, known_ahead
from tests.losses.objective_cases import CASES, table_of
from tests.ops.allocation_record import AllocationRecord
from tests.ops.kernel_case import EVERY_COMBINATION

SLICE = 1 << 11
TILE = 96
VOCABS, LENGTHS, BATCH = (700, 600), (24, 20), 8


def _inputs(name: str) -> DistillationInputs:
    case = CASES[name]
    vocabs, lengths = (VOCABS, LENGTHS)
    if case.same_tokenizer:
        vocabs, lengths = (VOCABS[0],) * 2, (LENGTHS[0],) * 2
    batch = Microbatch.random(batch=BATCH, vocabs=vocabs, lengths=lengths, chunks=12)
    inputs = with_hidden(case.build(ordered(batch, 12), (4, 4)), dtype=torch.bfloat16)
    hidden, _ = leaves(inputs)
    if not case.kinds:
        inputs = replace(inputs, teacher=None)
    return replace(inputs, student_logits=no_logits(hidden, inputs.student_shard))


def _record(name: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> AllocationRecord:
    monkeypatch.setitem(vocab_parallel.SLICE_ELEMENTS, "cpu", SLICE)
    inputs = _inputs(name)
    objectives: dict[str, Objective] = {"ce": LOSS_REGISTRY["next_token"]()}
    if name != "next_token":
        objectives["kd"] = CASES[name].objective()
    form = LinearDistillation(objectives=objectives, **options)
    tiles = form.tiles(known_ahead(inputs), table_of(inputs))
    scales = dict.fromkeys(objectives, 0.5)
    with AllocationRecord() as record:
        form(inputs, tiles, scales).total.backward()
    return record


@pytest.mark.parametrize("name", ["next_token", "projected_kl", "partition_kl", "vocab_kl"])
def test_the_peak_is_two_tiles_and_what_is_linear_in_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = _record(name, monkeypatch, tile_rows=TILE)

    record.assert_no_wide_tensor(rows=TILE, columns=min(VOCABS))
    widest = VOCABS[0] + 4
    tiles = 2 * TILE * 2 * widest
    # fp32 and bf16 of the head's gradient, bf16 of the hidden states' twice.
    gradients = 6 * widest * HIDDEN + 4 * BATCH * LENGTHS[0] * HIDDEN
    # Slices of fp32 that one step of an operation holds at once, vectors of rows and of columns.
    slices = 12 * 4 * SLICE
    vectors = 8 * (32 * BATCH * LENGTHS[0] + 8 * widest)
    assert record.peak_bytes <= tiles + gradients + slices + vectors


@pytest.mark.parametrize("name", ["vocab_kl", "strict_topk"][: 1 + EVERY_COMBINATION])
def test_smaller_tiles_take_less(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _record(name, monkeypatch, tile_rows=1000).peak_bytes
    tiled = _record(name, monkeypatch, tile_rows=TILE).peak_bytes
    rows = BATCH * (LENGTHS[0] + LENGTHS[1])
    # Both models' logits in bf16 at least, but for the rows of two tiles.
    assert whole - tiled >= 2 * (rows - 2 * TILE) * min(VOCABS) * 0.9

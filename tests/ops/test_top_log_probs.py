"""The largest log-probabilities of rows, exact ids and exact tails."""

import math

import pytest
import torch

from megatron_ext.distributed import vocab_parallel
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError
from megatron_ext.losses.targets import topk_log_probs, topk_targets
from megatron_ext.ops.sort_keys import (
    key_columns,
    key_values,
    pack_pair,
    sort_keys,
    unpack_pair,
)
from megatron_ext.ops.top_columns import (
    _local_keys,
    _merged,
    top_columns,
    top_log_probs,
    top_log_probs_reference,
)
from tests.ops.kernel_case import BOTH, DEVICE, DTYPES, EVERY_COMBINATION

pytest.importorskip("triton")


def _padded(rows, vocab, dtype):
    torch.manual_seed(rows)
    logits = torch.full((rows, vocab + 5), 1e4, dtype=dtype, device=DEVICE)
    # Coarse values: most rows have equal logits at the edge of what is kept.
    logits[:, :vocab] = (16 * torch.randn(rows, vocab, device=DEVICE)).round() / 16
    return logits, VocabShard(start=0, stop=vocab + 5, vocab_size=vocab)


@pytest.mark.usefixtures("nan_filled")
@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "vocab", "k"), [(4, 4133, 1024), (3, 50, 50), (1, 7, 1), (0, 9, 2)]
)
def test_ids_are_the_references_and_log_probs_those_of_all_columns(
    implementation, dtype, rows, vocab, k
):
    logits, shard = _padded(rows, vocab, dtype)
    out = top_log_probs(logits, k, shard, implementation=implementation)
    columns, log_probs = top_log_probs_reference(logits[:, :vocab].double(), k)
    assert torch.equal(out.token_id, columns)
    assert torch.equal(out.logit, logits[:, :vocab].float().gather(-1, columns))
    torch.testing.assert_close(out.log_prob.double(), log_probs, rtol=1e-6, atol=1e-6)


@BOTH
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_targets_know_the_mass_of_the_tail(implementation, offset):
    logits, shard = _padded(6, 3000, torch.float32)
    logits += offset
    targets = topk_targets(logits.view(2, 3, -1), 64, shard, implementation=implementation)
    log_p = topk_log_probs(targets)
    assert targets.positions == (2, 3)
    probs = torch.softmax(logits[:, :3000].double(), dim=-1)
    kept = probs.gather(-1, targets.topk_ids.flatten(0, 1))
    torch.testing.assert_close(log_p[:, :-1].double(), kept.log(), rtol=1e-6, atol=1e-6)
    # What is left of 1 in fp32.
    tail = 1 - kept.sum(dim=-1)
    torch.testing.assert_close(log_p[:, -1].double().exp(), tail, rtol=0, atol=1e-6)


def test_with_the_whole_vocabulary_there_is_no_tail():
    logits, shard = _padded(3, 40, torch.bfloat16)
    targets = topk_targets(logits[None], 40, shard)
    assert (topk_log_probs(targets)[:, -1] == -torch.inf).all()


def test_masked_tokens_come_last_and_never_padding():
    logits, shard = _padded(2, 6, torch.float32)
    logits[0, :4] = -torch.inf
    logits[1, :6] = -torch.inf
    out = top_log_probs(logits, 6, shard)
    assert out.token_id[0, 2:].tolist() == [0, 1, 2, 3]
    assert (out.logit[0, 2:] == -torch.inf).all()
    assert out.token_id[1].tolist() == list(range(6))


def test_shards_keep_what_one_rank_does():
    """Three ranks in one process, the last of padding alone."""
    logits, _ = _padded(4, 40, torch.bfloat16)
    logits = torch.nn.functional.pad(logits, (0, 30), value=1e4)
    truth = top_log_probs(logits[:, :40], 9, VocabShard(start=0, stop=40, vocab_size=40))
    keys, pairs = [], []
    for start in (0, 25, 50):
        shard = VocabShard(start=start, stop=start + 25, vocab_size=40)
        local = logits[:, start : start + 25]
        keys.append(_local_keys(local, 9, shard, shard.excluded_columns(local.device)))
        inside = local[:, : shard.valid_width].float()
        peak = inside.amax(dim=-1) if shard.valid_width else torch.zeros(4, device=DEVICE)
        pairs.append(pack_pair(peak, torch.exp(inside - peak[:, None]).sum(dim=-1)))
    best = torch.cat(keys, dim=-1).topk(9, dim=-1).values
    assert torch.equal(key_columns(best), truth.token_id)
    assert torch.equal(key_values(best), truth.logit)
    merged = _merged(*unpack_pair(torch.stack(pairs, dim=-1)))
    assert torch.equal(merged.peak, truth.normaliser.peak)
    torch.testing.assert_close(merged.log_sum, truth.normaliser.log_sum)


def test_keys_order_as_the_numbers_do_and_come_back_bit_for_bit():
    values = torch.tensor([-math.inf, -3e38, -1.5, -1e-45, 0.0, 1e-45, 2.0, math.inf])
    columns = torch.tensor([0, 5, 2**31, 2**32 - 1, 7, 1, 3, 4])
    keys = sort_keys(values, columns)
    assert (keys.diff() > 0).all()
    equal = sort_keys(torch.tensor([-0.0, 0.0, 0.0]), torch.tensor([7, 5, 2**31]))
    assert equal.argsort().tolist() == [2, 0, 1]
    assert torch.equal(key_values(keys), values)
    assert torch.equal(key_columns(keys), columns)
    for first, second in ((values, values.flip(0)), (values, torch.full_like(values, torch.nan))):
        back = unpack_pair(pack_pair(first, second))
        assert torch.equal(back[0], first)
        torch.testing.assert_close(back[1], second, equal_nan=True, rtol=0, atol=0)


def test_slices_of_rows_change_nothing(monkeypatch):
    logits, shard = _padded(7, 50, torch.float32)
    whole = top_log_probs(logits, 6, shard)
    monkeypatch.setitem(vocab_parallel.SLICE_ELEMENTS, DEVICE.type, 110)
    sliced = top_log_probs(logits, 6, shard)
    assert torch.equal(whole.token_id, sliced.token_id)
    assert torch.equal(whole.log_prob, sliced.log_prob)


@pytest.mark.parametrize("k", [0, 41])
def test_a_number_that_the_vocabulary_lacks_is_refused(k):
    logits, shard = _padded(2, 40, torch.float32)
    with pytest.raises(LossError, match="number of most probable tokens"):
        top_log_probs(logits, k, shard)


WIDTHS = [("torch", 901), ("torch", 140_001), ("triton", 901)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("implementation", "width"),
    [*WIDTHS, ("triton", 140_001)] if EVERY_COMBINATION else WIDTHS,
)
@pytest.mark.parametrize("k", [1, 63, 300])
def test_of_equal_logits_the_first_that_are_allowed_are_taken(implementation, dtype, width, k):
    """Whole groups of equals, a part of which is kept, and signed zeros."""
    generator = torch.Generator().manual_seed(k)
    logits = torch.randint(-3, 4, (5, width), generator=generator).to(DEVICE, dtype)
    logits[0] = 0
    logits[0, ::2] = -0.0
    allowed = torch.rand(width, generator=generator) > 0.5
    shard = VocabShard(start=0, stop=width, vocab_size=width - 2)
    chosen = allowed & (torch.arange(width) < width - 2)
    truth = logits.float().masked_fill(~chosen.to(DEVICE), -torch.inf)
    columns = torch.argsort(truth, dim=-1, descending=True, stable=True)[:, :k]
    found = top_columns(
        logits,
        k,
        shard,
        shard.excluded_columns(logits.device, allowed.to(DEVICE)),
        implementation=implementation,
    )
    assert torch.equal(found, columns)

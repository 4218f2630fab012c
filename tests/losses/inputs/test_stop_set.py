"""A stop row has the mass of all of a teacher's stop tokens, whatever form its targets have."""

from pathlib import Path

import pytest
import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import CheckpointError
from megatron_ext.huggingface.checkpoint_files import generation_stops
from megatron_ext.losses import StopSet, TeacherTargets
from megatron_ext.losses.targets import topk_log_probs, topk_targets
from tests.process_group import run_ranks

VOCAB, STOPS = 11, (2, 7, 9)
LABELS = torch.tensor([[2, 4, 9, 7], [7, 2, 0, -100]])
ROWS = torch.tensor([[True, True, False, True], [True, False, True, True]])
SHARD = VocabShard(start=0, stop=VOCAB + 1, vocab_size=VOCAB)


def logits_of(dtype=torch.float64):
    return 3 * torch.randn(2, 4, VOCAB + 1, generator=torch.Generator().manual_seed(4)).to(dtype)


def expected(logits):
    """Probabilities by a loop over the rows."""
    whole = logits[..., :VOCAB].softmax(dim=-1)
    for row, column in ROWS.nonzero().tolist():
        label = int(LABELS[row, column])
        if label in STOPS:
            mass = sum(float(whole[row, column, stop]) for stop in STOPS)
            whole[row, column, list(STOPS)] = 0.0
            whole[row, column, label] = mass
    return whole


def test_logits_and_hidden_states_give_the_label_the_mass_of_the_set():
    logits = logits_of()
    truth = expected(logits)
    stops = StopSet.of(STOPS, SHARD)
    hidden = TeacherTargets(
        kind="hidden",
        shard=SHARD,
        hidden=logits.clone(),
        head_weight=torch.eye(VOCAB + 1, dtype=logits.dtype),
    )
    given = TeacherTargets(kind="logits", shard=SHARD, logits=logits.clone())
    for targets in (given, hidden):
        merged = targets.merging(stops, LABELS, ROWS).to_logits()
        torch.testing.assert_close(merged[..., :VOCAB].softmax(dim=-1), truth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_logits_of_hidden_states_have_the_dtype_of_the_head(dtype):
    hidden, head = torch.randn(1, 2, 4), torch.randn(VOCAB + 1, 4, dtype=dtype)
    targets = TeacherTargets(kind="hidden", shard=SHARD, hidden=hidden, head_weight=head)
    assert torch.equal(targets.to_logits(), hidden.to(dtype) @ head.T)


def test_the_top_tokens_merge_what_is_among_them_and_the_labels_own_probability():
    logits = logits_of(torch.float32)
    top = topk_targets(logits, 6, SHARD)
    log_probs = logits[..., :VOCAB].log_softmax(dim=-1)
    label = log_probs.gather(-1, LABELS.clamp(min=0)[..., None])[..., 0]
    top = TeacherTargets(
        kind="topk",
        shard=SHARD,
        topk_ids=top.topk_ids,
        topk_logits=top.topk_logits,
        log_normaliser=top.log_normaliser,
        label_log_probs=label.clone(),
    )
    merged = top.merging(StopSet.of(STOPS, SHARD), LABELS, ROWS)
    before = topk_log_probs(top).exp().unflatten(0, (2, 4))
    for row, column in ROWS.nonzero().tolist():
        own, ids = int(LABELS[row, column]), top.topk_ids[row, column].tolist()
        if own not in STOPS:
            continue
        known = {int(stop) for stop in STOPS if stop in ids} | {own}
        mass = sum(float(log_probs[row, column, stop].exp()) for stop in known)
        assert float(merged.label_log_probs[row, column].exp()) == pytest.approx(mass, rel=1e-5)
    after = topk_log_probs(merged).exp().unflatten(0, (2, 4))
    untouched = ~(ROWS & torch.isin(LABELS, torch.tensor(STOPS)))
    torch.testing.assert_close(after[untouched], before[untouched])


def test_labels_alone_say_nothing_of_the_others():
    label = TeacherTargets(kind="label", shard=SHARD, label_log_probs=torch.zeros(2, 4))
    assert label.merging(StopSet.of(STOPS, SHARD), LABELS, ROWS) is label


def _on_rank(rank: int) -> torch.Tensor:
    import torch.distributed as dist

    shard = VocabShard(start=rank * 6, stop=rank * 6 + 6, vocab_size=VOCAB, group=dist.group.WORLD)
    logits = logits_of()[..., shard.start : shard.stop].clone()
    targets = TeacherTargets(kind="logits", shard=shard, logits=logits)
    return targets.merging(StopSet.of(STOPS, shard), LABELS, ROWS).to_logits()


def test_shards_give_what_one_rank_does():
    whole = TeacherTargets(kind="logits", shard=SHARD, logits=logits_of())
    truth = whole.merging(StopSet.of(STOPS, SHARD), LABELS, ROWS).to_logits()
    torch.testing.assert_close(torch.cat(run_ranks(2, _on_rank), dim=-1), truth)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ('{"eos_token_id": [3, 5]}', {3, 5}),
        ('{"eos_token_id": 4}', {4}),
        ('{"eos_token_id": null}', set()),
        ("{}", set()),
    ],
)
def test_stops_are_those_of_the_generation_configuration(tmp_path: Path, text: str, ids: set[int]):
    assert generation_stops(tmp_path) == frozenset()
    folder = tmp_path / "huggingface"
    folder.mkdir()
    (folder / "generation_config.json").write_text(text)
    assert generation_stops(tmp_path) == ids
    assert generation_stops(folder) == ids


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"eos_token_id": "</s>"}', "does not name its stop tokens"),
        ('{"eos_token_id": [true]}', "does not name its stop tokens"),
        ("[1]", "holds no JSON object"),
        ('{"eos_token_id": [3, 5', "is not JSON"),
    ],
    ids=["name", "truth", "list", "cut"],
)
def test_a_generation_configuration_without_ids_is_refused(tmp_path: Path, text: str, problem: str):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=problem):
        generation_stops(tmp_path)

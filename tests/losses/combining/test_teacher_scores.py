import math

import pytest
import torch

from megatron_ext.distributed import vocab_parallel
from megatron_ext.errors import LossError
from megatron_ext.losses import TeacherTargets
from megatron_ext.losses.teacher_scores import (
    TeacherMeasure,
    TeacherText,
    dynamic_weights,
    sample_scores,
    score,
)
from tests.losses.microbatch import columns
from tests.ops.kernel_case import vocab_shard

LOGITS = 3 * torch.randn(2, 6, 23, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([[-100, 3, 5, 22, 0, 1], [4, 4, -100, -100, 9, 8]])
MEASURES: tuple[TeacherMeasure, ...] = ("bits_per_byte", "entropy", "max_prob")


def targets(padding: int = 4) -> TeacherTargets:
    shard = vocab_shard(23, padding, 0, 1, None)
    return TeacherTargets(kind="logits", shard=shard, logits=columns(LOGITS, shard))


def true_nats(measure: str) -> torch.Tensor:
    """[2, 6] fp64, 0 where there is no label."""
    log_p = LOGITS.double().log_softmax(dim=-1)
    nats = {
        "bits_per_byte": -log_p.gather(-1, LABELS.clamp(min=0)[..., None])[..., 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "max_prob": -log_p.amax(-1),
    }[measure]
    return torch.where(LABELS >= 0, nats, 0.0)


@pytest.mark.parametrize("measure", MEASURES)
def test_nats_are_summed_over_the_labels_of_each_sample(
    measure: TeacherMeasure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vocab_parallel.SLICE_ELEMENTS, "cpu", 60)
    text = TeacherText(targets=targets(), labels=LABELS, byte_counts=torch.tensor([17, 5]))
    sums = sample_scores(text, measure)
    torch.testing.assert_close(sums[:, 0], true_nats(measure).sum(-1), rtol=1e-6, atol=0)
    assert sums[:, 1].tolist() == [17, 5]


@pytest.mark.parametrize("measure", MEASURES)
def test_packed_samples_end_at_their_bounds(measure: TeacherMeasure) -> None:
    shard = vocab_shard(23, 0, 0, 1, None)
    text = TeacherText(
        targets=TeacherTargets(kind="logits", shard=shard, logits=LOGITS.view(1, 12, 23)),
        labels=LABELS.view(1, 12),
        byte_counts=torch.tensor([1, 0, 1]),
        cu_seqlens=torch.tensor([0, 4, 4, 12], dtype=torch.int32),
    )
    nats = true_nats(measure).flatten()
    expected = [nats[:4].sum().item(), 0.0, nats[4:].sum().item()]
    assert sample_scores(text, measure)[:, 0].tolist() == pytest.approx(expected, rel=1e-6)


def test_a_certain_token_cut_in_two_changes_no_score() -> None:
    """One teacher is sure of a token; another is sure of both of its halves."""
    logits = torch.zeros(1, 3, 4)
    logits[0, 1:, 2] = 1e4
    shard = vocab_shard(4, 0, 0, 1, None)
    for measure in MEASURES:
        sums = [
            sample_scores(
                TeacherText(
                    targets=TeacherTargets(kind="logits", shard=shard, logits=logits[:, :count]),
                    labels=torch.full((1, count), 2),
                    byte_counts=torch.tensor([6]),
                ),
                measure,
            )
            for count in (2, 3)
        ]
        assert torch.equal(sums[0], sums[1])


def test_scores_are_per_byte() -> None:
    totals = torch.tensor([[6.0, 3.0], [1.0, 0.0]], dtype=torch.float64)
    assert score(totals, "bits_per_byte").tolist() == [-2 / math.log(2), -math.inf]
    assert score(totals, "max_prob").tolist() == [pytest.approx(math.exp(-2)), -math.inf]


def test_a_teacher_without_text_has_no_weight_and_none_with_text_is_equal_weights() -> None:
    totals = torch.tensor([[6.0, 3.0], [0.0, 0.0], [6.0, 3.0]], dtype=torch.float64)
    assert dynamic_weights(totals, "entropy", alpha=2.0).tolist() == [0.5, 0.0, 0.5]
    assert dynamic_weights(totals, "entropy", alpha=0.0).tolist() == [0.5, 0.0, 0.5]
    nothing = torch.zeros(4, 2, dtype=torch.float64)
    assert dynamic_weights(nothing, "max_prob", alpha=2.0).tolist() == [0.25] * 4


def test_label_and_top_k_targets_know_their_measures_and_no_others() -> None:
    full = targets(padding=0)
    top = full.logits.topk(3)
    labels = torch.where(LABELS >= 0, -true_nats("bits_per_byte"), 0.0).float()
    bytes_of = torch.tensor([3, 3])
    label = TeacherText(
        targets=TeacherTargets(kind="label", shard=full.shard, label_log_probs=labels),
        labels=LABELS,
        byte_counts=bytes_of,
    )
    topk = TeacherText(
        targets=TeacherTargets(
            kind="topk",
            shard=full.shard,
            topk_ids=top.indices,
            topk_logits=top.values,
            log_normaliser=full.logits.logsumexp(-1),
        ),
        labels=LABELS,
        byte_counts=bytes_of,
    )
    for text, measure in ((label, "bits_per_byte"), (topk, "max_prob")):
        torch.testing.assert_close(
            sample_scores(text, measure)[:, 0], true_nats(measure).sum(-1), rtol=1e-5, atol=0
        )
    with pytest.raises(LossError, match=r"by entropy from these targets; got kind 'label'"):
        sample_scores(label, "entropy")
    with pytest.raises(LossError, match=r"bits_per_byte .* got kind 'topk'; .* label_log_probs"):
        sample_scores(topk, "bits_per_byte")
    with pytest.raises(LossError, match=r"got \(2, 5\); expected \(2, 6\)"):
        sample_scores(
            TeacherText(targets=full, labels=LABELS[:, :5], byte_counts=bytes_of), "entropy"
        )


@pytest.mark.parametrize("measure", MEASURES)
def test_extreme_and_masked_logits_have_finite_scores(measure: TeacherMeasure) -> None:
    logits = torch.tensor([[[1e4, 1e4, -1e4, -torch.inf], [3.0, -torch.inf, -torch.inf, 3.0]]])
    shard = vocab_shard(4, 0, 0, 1, None)
    nats = [
        sample_scores(
            TeacherText(
                targets=TeacherTargets(kind="logits", shard=shard, logits=logits.to(dtype)),
                labels=torch.zeros(1, 2, dtype=torch.int64),
                byte_counts=torch.tensor([2]),
            ),
            measure,
        )[0, 0].item()
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    ]
    # Two equal choices at each position, in every measure and, rounded alike, in every dtype.
    assert nats == pytest.approx([2 * math.log(2)] * 3, rel=1e-6)

"""The loss in a loop of one's own is the loss of a run."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

from megatron_ext import CrossTokenizerLoss, SparseProjection
from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.data.batch import CrossTokenizerBatch
from megatron_ext.errors import (
    ConfigError,
    DataError,
    LossError,
    ProjectionError,
    TokenizerError,
    UnknownNameError,
)
from megatron_ext.losses import LOSS_REGISTRY
from tests.training.small_models import TEXTS, pair

OF_STATES = {"dskd", "hidden_mse", "hidden_cosine"}
OF_LOGITS = sorted(LOSS_REGISTRY.keys() - OF_STATES - {"next_token", "vocab_kl"})


def loss_of(objective, **options):
    return CrossTokenizerLoss(*pair(), objective, max_length=96, **options)


def logits(batch, *, extra=(5, 0), seed=1):
    """Random logits of both models, in fp64, with padded columns."""
    generator = torch.Generator().manual_seed(seed)
    sides = (batch.student, batch.teachers["teacher"])
    return [
        torch.randn(
            *side.input_ids.shape,
            tokenizer.vocab_size + more,
            generator=generator,
            dtype=torch.float64,
        ).requires_grad_()
        for side, tokenizer, more in zip(sides, pair(), extra, strict=True)
    ]


def gradient(loss, student):
    return torch.autograd.grad(loss, student)[0]


@pytest.mark.parametrize("objective", OF_LOGITS)
def test_sums_of_microbatches_make_the_loss_of_the_whole(objective):
    loss = loss_of(objective, ce_weight=0.5)
    batch = loss.collator(TEXTS)
    student, teacher = logits(batch)
    whole = loss.measured(student, teacher, batch)
    tensors, counts = batch.tensors(), loss.counts(batch)
    assert counts == {name: whole.metrics[name][1] for name in ("kd", "ce")}
    parts = sum(
        loss(
            student[rows],
            teacher[rows],
            {name: value[rows] for name, value in tensors.items()},
            counts=counts,
        )
        for rows in (slice(0, 2), slice(2, 3), slice(3, None))
    )
    torch.testing.assert_close(parts, whole.loss, rtol=1e-6, atol=0)
    ours, expected = gradient(parts, student), gradient(whole.loss, student)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-8)
    assert (expected[..., pair()[0].vocab_size :] == 0).all()
    assert expected.abs().sum() > 0


def test_a_teacher_of_the_same_tokenizer_is_compared_as_torch_would():
    student_tokenizer, _ = pair()
    options = {"temperature": 2.0, "kd_weight": 0.7, "ce_weight": 0.3, "max_length": 96}
    loss = CrossTokenizerLoss(student_tokenizer, None, "vocab_kl", **options)
    batch = loss.collator(TEXTS)
    shape = (*batch.student.input_ids.shape, student_tokenizer.vocab_size)
    student, teacher = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in "12")
    rows = batch.student.labels != IGNORE_INDEX
    kd = F.kl_div(
        F.log_softmax(student[rows] / 2, -1),
        F.log_softmax(teacher[rows] / 2, -1).detach(),
        log_target=True,
        reduction="batchmean",
    )
    ce = F.cross_entropy(student[rows], batch.student.labels[rows])
    expected = 0.7 * 4 * kd + 0.3 * ce
    ours = loss(student, teacher, batch)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        gradient(ours, student), gradient(expected, student), rtol=1e-6, atol=1e-12
    )
    assert teacher.grad is None


def test_a_loss_that_has_evaluated_in_inference_mode_trains():
    loss = loss_of("gold", numerics="nemo")
    batch = loss.collator(TEXTS)
    student, teacher = logits(batch)
    with torch.inference_mode():
        evaluated = loss(student, teacher, batch)
    trained = loss(student, teacher, batch)
    assert torch.equal(trained, evaluated)
    assert gradient(trained, student).any()


@pytest.mark.parametrize(
    ("objective", "options"),
    [("byte_prefix", {}), ("projected_kl", {"repeat_weight": 1.0}), ("mined", {})],
)
def test_another_default_device_holds_nothing_of_a_batch_or_a_loss(objective, options):
    with torch.device("meta"):
        loss = loss_of(objective, **options)
        batch = CrossTokenizerBatch.of_tensors(loss.collator.tensors(TEXTS))
    student, teacher = logits(batch)
    with torch.device("meta"):
        on_host = loss(student, teacher, batch)
    assert gradient(on_host, student).any()


@pytest.mark.parametrize("objective", ["byte_prefix", "projected_kl"])
def test_copies_and_pickles_of_a_used_loss_are_the_same_loss(objective):
    loss = loss_of(objective)
    batch = loss.collator(TEXTS)
    student, teacher = logits(batch)
    value = loss(student, teacher, batch)
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert torch.equal(other(student, teacher, batch), value)


def test_texts_stand_for_the_batch_that_the_collator_makes_of_them():
    loss = loss_of("alm")
    batch = loss.collator(TEXTS)
    student, teacher = logits(batch)
    expected = loss(student, teacher, batch)
    assert loss(student, teacher, TEXTS) == expected
    assert loss(student, teacher, [{"text": text} for text in TEXTS]) == expected
    assert loss(student, teacher, batch.tensors()) == expected
    with torch.no_grad():
        assert loss(student, teacher, batch) == expected


def test_a_projection_of_the_pair_is_taken_as_a_file_or_as_it_is(tmp_path):
    projection = SparseProjection.from_tokenizers(*pair(), "retokenized")
    projection.save(tmp_path / "projection.safetensors")
    batch = loss_of("alm").collator(TEXTS)
    student, teacher = logits(batch)
    values = {
        float(loss_of("projected_kl", projection=given)(student, teacher, batch).detach())
        for given in (None, projection, tmp_path / "projection.safetensors")
    }
    assert len(values) == 1
    mirrored = SparseProjection.from_tokenizers(*reversed(pair()), "retokenized")
    with pytest.raises(ProjectionError, match="built for another student"):
        loss_of("projected_kl", projection=mirrored)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: loss_of("almm"), UnknownNameError, "did you mean 'alm'"),
        (lambda: loss_of("alm", temprature=2.0), ConfigError, "temprature"),
        (lambda: loss_of("alm", ce_weight=-1.0), ConfigError, "ce_weight"),
        (lambda: loss_of("alm", projection="x.safetensors"), LossError, "reads no projection"),
        (lambda: loss_of("dskd"), LossError, "hidden states"),
        (lambda: loss_of("vocab_kl"), LossError, "student's tokenizer"),
        (lambda: loss_of("next_token"), LossError, "ce_weight"),
        (lambda: CrossTokenizerLoss(pair()[0], "teacher"), TokenizerError, "not a tokenizer of"),
    ],
)
def test_a_loss_that_cannot_be_is_refused_when_it_is_made(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_logits_that_do_not_fit_are_refused():
    loss = loss_of("alm")
    batch = loss.collator(TEXTS)
    student, teacher = (each.detach() for each in logits(batch))
    with pytest.raises(LossError, match=r"pass its logits whole"):
        loss(student[:, :-1], teacher, batch)
    with pytest.raises(LossError, match=r"the teacher's head has fewer columns"):
        loss(student, teacher[..., :-1], batch)
    foreign = {**batch.tensors(), "shift_labels": batch.student.labels + 10**6}
    with pytest.raises(LossError, match="the student's ids are not those of its tokenizer"):
        loss(student, teacher, foreign)
    broken = student.clone()
    broken[0, 0, 0] = torch.nan
    with pytest.raises(LossError, match="NaN"):
        loss(broken, teacher, batch)
    with pytest.raises(LossError, match="lacks the teacher"):
        loss(student, teacher, batch, teacher="large")
    with pytest.raises(LossError, match="denominator"):
        loss(student, teacher, batch, counts={"kd": 3})
    with pytest.raises(LossError, match="denominator; got int"):
        loss(student, teacher, batch, counts=8)
    for other in (None, student.numpy(), student.long(), {"logits": student}):
        with pytest.raises(LossError, match=r"model\(input_ids\)\.logits"):
            loss(other, teacher, batch)
    with pytest.raises(DataError, match="remove_unused_columns"):
        loss(student, teacher, {"input_ids": batch.student.input_ids})

"""The sampled reverse KL against its definition, and its expectation against the divergence."""

import pytest
import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError
from megatron_ext.losses import DistillationInputs, SampledKLLoss, TeacherTargets

STUDENT = [[0, 1, 1, 2, -1]]
TEACHER = [[0, 0, 1, 2]]


def inputs_of(student, teacher, labels, teacher_labels, ids=(STUDENT, TEACHER), **more):
    shards = [
        VocabShard(start=0, stop=x.shape[-1], vocab_size=x.shape[-1]) for x in (student, teacher)
    ]
    return DistillationInputs(
        student_logits=student,
        student_shard=shards[0],
        labels=labels,
        teacher=TeacherTargets(kind="logits", shard=shards[1], logits=teacher),
        teacher_labels=teacher_labels,
        alignment=AlignmentBatch.from_chunk_ids(torch.tensor(ids[0]), torch.tensor(ids[1])),
        **more,
    )


def random_inputs(**more):
    draw = torch.Generator().manual_seed(2)
    student = torch.randn(1, 5, 7, generator=draw, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(1, 4, 6, generator=draw, dtype=torch.float64)
    labels = torch.tensor([[3, 1, 4, 1, 5]])
    return inputs_of(student, teacher, labels, torch.tensor([[2, 5, 0, 1]]), **more)


def definition(inputs, most_ratio, most_signal):
    """Chunk by chunk, by autograd, with constants held."""
    own = inputs.student_logits.log_softmax(-1)[0].gather(1, inputs.labels.T)[:, 0]
    its = inputs.teacher.logits.log_softmax(-1)[0].gather(1, inputs.teacher_labels.T)[:, 0]
    total = torch.zeros((), dtype=torch.float64)
    for chunk in range(3):
        mine = torch.tensor(STUDENT[0]) == chunk
        log_q, log_p = own[mine].sum(), its[torch.tensor(TEACHER[0]) == chunk].sum()
        signal = float((log_p - log_q).clamp(-most_signal, most_signal))
        ratio = 1.0
        if inputs.sampled_log_probs is not None:
            sampled = inputs.sampled_log_probs[0][mine].sum()
            if not sampled.isnan():
                ratio = min(float((log_q - sampled).exp()), most_ratio)
        value = torch.tensor(min(signal, 5.0))
        total = total + value.exp() - value - 1 - ratio * signal * (log_q - float(log_q))
    return total


@pytest.mark.parametrize("most_signal", [0.5, 10.0])
@pytest.mark.parametrize("most_ratio", [1.1, 5.0])
@pytest.mark.parametrize("sampled", [None, (-2.0, -1.0, -3.5, torch.nan, torch.nan)])
def test_value_and_gradient_are_those_of_the_definition(sampled, most_ratio, most_signal):
    more = {} if sampled is None else {"sampled_log_probs": torch.tensor([sampled])}
    inputs = random_inputs(**more)
    output = SampledKLLoss(most_ratio=most_ratio, most_signal=most_signal)(inputs)
    expected = definition(inputs, most_ratio, most_signal)
    assert output.count == 3
    assert float(output.loss_sum) == pytest.approx(float(expected), rel=1e-5)
    (grad,) = torch.autograd.grad(output.loss_sum, inputs.student_logits)
    (truth,) = torch.autograd.grad(expected, inputs.student_logits)
    torch.testing.assert_close(grad, truth, rtol=1e-5, atol=1e-7)


def test_the_mean_gradient_over_all_samples_is_that_of_the_divergence():
    """One chunk of two tokens in both models, whose vocabularies are two bits: all its texts."""
    draw = torch.Generator().manual_seed(4)
    first, second = torch.randn(2, 1, 2, generator=draw, dtype=torch.float64)
    first.requires_grad_()
    # The second token of either model depends on the first.
    after = torch.randn(2, 2, generator=draw, dtype=torch.float64).requires_grad_()
    its_after = torch.randn(2, 2, generator=draw, dtype=torch.float64)
    gradient = torch.zeros(1, 2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    divergence = torch.zeros((), dtype=torch.float64)
    for a in range(2):
        for b in range(2):
            student = torch.cat([first, after[a : a + 1]])[None]
            teacher = torch.cat([second, its_after[a : a + 1]])[None]
            labels = torch.tensor([[a, b]])
            inputs = inputs_of(student, teacher, labels, labels, ([[0, 0]], [[0, 0]]))
            loss = SampledKLLoss()(inputs).loss_sum
            log_q = first.log_softmax(-1)[0, a] + after[a].log_softmax(-1)[b]
            log_p = second.log_softmax(-1)[0, a] + its_after[a].log_softmax(-1)[b]
            parts = torch.autograd.grad(loss, (first, after), retain_graph=True)
            for total, part in zip(gradient, parts, strict=True):
                total += log_q.detach().exp() * part
            divergence = divergence + log_q.exp() * (log_q - log_p)
    truth = torch.autograd.grad(divergence, (first, after))
    for found, expected in zip(gradient, truth, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [{"most_ratio": 0.0}, {"most_signal": -1.0}])
def test_options_that_cannot_be_used_are_refused(options):
    with pytest.raises(LossError, match=next(iter(options))):
        SampledKLLoss(**options)

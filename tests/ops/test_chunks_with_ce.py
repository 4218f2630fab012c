"""Cross-entropy evaluated with an operation over chunks: its values, and one gradient of both."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron_ext.ops.labels import RowLabels
from megatron_ext.ops.matched_divergence import MatchedOptions, evaluate_matched_divergence
from megatron_ext.ops.sorted_l1 import evaluate_sorted_l1, sorted_l1_reference
from tests.ops.kernel_case import (
    ALL_THREE,
    DEVICE,
    DTYPES,
    assert_as_exact,
    combinations,
    rounding,
)
from tests.ops.test_matched_divergence import Case

pytest.importorskip("triton")

SIZES = ((1, 1), (3, 2), (1, 1), (1, 1), (2, 1))
TEMPERATURES = (1.0, 1.3)
UNCOMMON = 0.7


def case_of(dtype):
    """A case whose first row of no chunk is finite, and the labels of its rows.

    Of the rows with numbers one has no label, and one a label of weight 0; the row of NaN has none.
    """
    case = Case.random(2311, 1207, 800, sizes=SIZES, dtype=dtype)
    pair, generator = case.pair, torch.Generator().manual_seed(7)
    outside = (pair.chunk_ids[0] < 0).nonzero()[:, 0]
    vocab, count = pair.vocabs[0], len(pair.chunk_ids[0])
    row = 3.0 * torch.randn(vocab, generator=generator)
    pair.logits[0][outside[0], :vocab] = row.to(DEVICE, dtype)
    labels = torch.randint(0, vocab, (count,), generator=generator).to(DEVICE)
    labels[outside[1]] = -1
    inside = (pair.chunk_ids[0] >= 0).nonzero()[:, 0]
    labels[inside[0]] = -1
    # The likeliest token is among those that are sorted, a common one among those that are not.
    labels[inside[1]] = pair.logits[0][inside[1], :vocab].argmax()
    labels[inside[2]] = case.common_student[0]
    weights = torch.linspace(0.3, 1.5, count, device=DEVICE)
    weights[inside[3]] = 0.0
    return case, RowLabels(labels, weights)


def truth_of(case, operation, labels, temperature, dtype):
    """Values and gradient of the chunks' weighted sum and the labels', by autograd."""
    if operation == "sorted_l1":
        loss = partial(sorted_l1_reference, largest=64)
    else:
        options = options_of(temperature)
        loss = partial(case.loss, options=options)
    value, grad = case.pair.truth(loss, temperature=temperature, dtype=dtype)
    used = labels.labels >= 0
    rows = case.pair.logits[0][used, : case.pair.vocabs[0]].to(dtype, copy=True).requires_grad_()
    tokens = torch.nn.functional.cross_entropy(rows, labels.labels[used], reduction="none")
    (on_rows,) = torch.autograd.grad((tokens * labels.grad_scale[used].to(dtype)).sum(), rows)
    grad[used, : case.pair.vocabs[0]] += on_rows
    losses = torch.zeros(len(used), dtype=dtype, device=DEVICE)
    losses[used] = tokens.detach()
    return value, losses.masked_fill(labels.grad_scale == 0, 0.0), grad


def options_of(temperature):
    return MatchedOptions(
        temperature=temperature, direction="reverse", uncommon_weight=UNCOMMON, top_u=64
    )


def evaluate(case, operation, labels, temperature, *, in_place=False, **more):
    """The operation's values, and its gradient of the case's weighted sum."""
    base = case.pair.logits[0]
    student = torch.cat([base, base[:, :3]], dim=1)[:, : base.shape[1]]
    gradient = student if in_place else torch.full_like(student, torch.nan)
    operands = case.pair.sides(student)
    more |= {"labels": labels, "grad_scale": case.pair.weights.clone(), "gradient": gradient}
    if operation == "sorted_l1":
        values = evaluate_sorted_l1(*operands, temperature=temperature, top_u=64, **more)
    else:
        options = options_of(temperature)
        values = evaluate_matched_divergence(*operands, case.matching(), options, **more)
    return values, gradient


@pytest.mark.usefixtures("nan_filled", "in_any_order")
@ALL_THREE
@pytest.mark.parametrize(
    ("dtype", "temperature", "in_place"), combinations(DTYPES, TEMPERATURES, (True, False))
)
@pytest.mark.parametrize("operation", ["sorted_l1", "matched"])
def test_values_and_gradient_are_those_of_both(
    operation, dtype, temperature, in_place, implementation
):
    case, labels = case_of(dtype)
    truth = truth_of(case, operation, labels, temperature, torch.float64)
    same = truth_of(case, operation, labels, temperature, torch.float32)
    values, gradient = evaluate(
        case, operation, labels, temperature, in_place=in_place, implementation=implementation
    )
    assert_as_exact(values.chunk_loss, same[0], truth[0], slack=2e-6)
    assert_as_exact(values.cross_entropy, same[1], truth[1], slack=1e-6)
    # Rounded once, the label's column too.
    assert_as_exact(gradient, same[2], truth[2], slack=2e-6 + rounding(dtype))
    vocab = case.pair.vocabs[0]
    finite = case.pair.logits[0].isfinite().all(dim=-1)
    top = case.pair.logits[0][:, :vocab].argmax(dim=-1)
    assert torch.equal(values.top_column[finite], top[finite])
    assert (gradient[:, vocab:] == 0).all()
    idle = (labels.labels < 0) | (labels.grad_scale == 0)
    chunks = case.pair.chunk_ids[0]
    assert (gradient[idle & ((chunks < 0) | (chunks == len(SIZES) - 1))] == 0).all()


@ALL_THREE
@pytest.mark.parametrize("operation", ["sorted_l1", "matched"])
def test_a_row_of_nan_reaches_its_label_alone(operation, implementation):
    case, labels = case_of(torch.float32)
    (_, row) = (case.pair.chunk_ids[0] == len(SIZES) - 1).nonzero()[:, 0].tolist()
    case.pair.logits[0][row, 5] = torch.nan
    expected, wanted = evaluate(case, operation, None, 1.0, implementation=implementation)
    assert expected.cross_entropy is expected.top_column is None
    assert (wanted[row] == 0).all(), "a chunk that gets nothing"
    values, gradient = evaluate(case, operation, labels, 1.0, implementation=implementation)
    torch.testing.assert_close(values.chunk_loss, expected.chunk_loss, equal_nan=True)
    assert values.cross_entropy[row].isnan()
    assert gradient[row, : case.pair.vocabs[0]].isnan().any()
    others = torch.arange(len(gradient), device=DEVICE) != row
    assert gradient[others].isfinite().all()

"""Distances of hidden states against their definition, pair by pair and chunk by chunk."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError
from megatron_ext.losses import (
    LOSS_REGISTRY,
    DistillationInputs,
    HiddenCosineLoss,
    HiddenMseLoss,
    StateProjectors,
    TeacherTargets,
)
from megatron_ext.losses.objective import LAST_LAYER, ModelPair, layer_number
from tests.losses.microbatch import known_ahead

WIDTHS = 3, 4
LAYERS = ((-1, -1), (2, 3), (1, 3))
STUDENT_CHUNKS = [[0, 0, 1, 2, 3], [4, 5, 5, -1, -1]]
TEACHER_CHUNKS = [[0, 1, 1, 2, 3, 3], [4, 4, 4, 5, -1, -1]]
LABELS = [[7, 8, 9, IGNORE_INDEX, 1], [2, 3, 4, 5, IGNORE_INDEX]]
ENDS = [((0, 2), (0, 1)), ((1, 1), (1, 3)), ((1, 3), (1, 4))]
"""Row and position of both models after each chunk that counts: behind the second chunk the student
has no label, behind the third the teacher has none, and behind the fourth the row ends."""


def random_inputs(seed: int = 0, dtype: torch.dtype = torch.float64) -> DistillationInputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    teacher_labels = torch.zeros(2, 6, dtype=torch.int64)
    teacher_labels[0, 4] = teacher_labels[1, 5] = IGNORE_INDEX
    shards = [VocabShard(start=0, stop=size, vocab_size=size, group=None) for size in (11, 13)]
    return DistillationInputs(
        student_logits=normal(2, 5, 11).requires_grad_(),
        student_shard=shards[0],
        labels=torch.tensor(LABELS),
        teacher_labels=teacher_labels,
        student_hidden=normal(2, 5, WIDTHS[0]).requires_grad_(),
        student_states={n: normal(2, 5, WIDTHS[0]).requires_grad_() for n in (1, 2)},
        teacher=TeacherTargets(
            kind="hidden",
            shard=shards[1],
            hidden=normal(2, 6, WIDTHS[1]),
            head_weight=normal(13, WIDTHS[1]),
            states={3: normal(2, 6, WIDTHS[1])},
        ),
        alignment=AlignmentBatch.from_chunk_ids(
            torch.tensor(STUDENT_CHUNKS), torch.tensor(TEACHER_CHUNKS)
        ),
    )


def projectors_of(**options: Any) -> StateProjectors:
    widths = {"student_hidden": WIDTHS[0], "teacher_hidden": WIDTHS[1]}
    return StateProjectors(**widths | {"layers": LAYERS, "seed": 5} | options).double()


def definition(
    name: str, inputs: DistillationInputs, projectors: StateProjectors, *, relative: bool
) -> torch.Tensor:
    """Pair by pair and chunk by chunk, in plain torch."""
    own = {**inputs.student_states, LAST_LAYER: inputs.student_hidden}
    its = {**inputs.teacher.states, LAST_LAYER: inputs.teacher.hidden}
    total = torch.zeros((), dtype=torch.float64)
    for weight, (first, second) in zip(projectors.weights, LAYERS, strict=True):
        for place, other in ENDS:
            projected, hidden = weight @ own[first][place], its[second][other]
            if name == "hidden_cosine":
                lengths = (projected @ projected).sqrt() * (hidden @ hidden).sqrt()
                distance = 1 - projected @ hidden / lengths
            else:
                distance = ((projected - hidden) ** 2).sum() / len(hidden)
                if relative:
                    distance = distance / ((hidden**2).sum() / len(hidden))
            total = total + distance / len(LAYERS)
    return total


CASES = [("hidden_mse", {}), ("hidden_mse", {"relative": True}), ("hidden_cosine", {})]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "options"), CASES, ids=["mse", "relative", "cosine"])
def test_value_and_every_gradient_are_those_of_the_definition(
    name: str, options: dict[str, bool], seed: int
) -> None:
    inputs, projectors = random_inputs(seed), projectors_of()
    output = LOSS_REGISTRY[name](projectors=projectors, layers=LAYERS, **options)(inputs)
    truth = definition(name, inputs, projectors, relative=bool(options))
    assert int(output.count) == len(ENDS)
    torch.testing.assert_close(output.loss_sum, truth, rtol=1e-12, atol=0)
    trained = [inputs.student_hidden, *inputs.student_states.values(), *projectors.parameters()]
    assert len(trained) == 6
    grads, true_grads = (torch.autograd.grad(value, trained) for value in (output.loss_sum, truth))
    for grad, true_grad in zip(grads, true_grads, strict=True):
        assert true_grad.any()
        torch.testing.assert_close(grad, true_grad, rtol=1e-10, atol=1e-14)


def test_metrics_are_the_distances_of_each_pair() -> None:
    inputs, projectors = random_inputs(), projectors_of()
    output = HiddenMseLoss(projectors=projectors, layers=LAYERS)(inputs)
    of_pairs = [output.metrics[f"layers/{own}:{its}"] for own, its in LAYERS]
    assert all(int(count) == len(ENDS) for _, count in of_pairs)
    mean = sum(total.double() for total, _ in of_pairs) / len(LAYERS)
    torch.testing.assert_close(mean, output.loss_sum.detach(), rtol=1e-6, atol=0)


def test_the_count_ahead_is_that_of_the_loss() -> None:
    inputs = random_inputs()
    known = known_ahead(inputs)
    loss = HiddenMseLoss(projectors=projectors_of(), layers=LAYERS)
    assert int(loss.count_ahead(known)) == len(ENDS)
    mask = torch.tensor([True, True, True, True, False, True])
    assert int(loss.count_ahead(replace(known, chunk_mask=mask))) == len(ENDS) - 1
    assert int(loss(replace(inputs, chunk_mask=mask)).count) == len(ENDS) - 1


@pytest.mark.parametrize("kind", [HiddenMseLoss, HiddenCosineLoss])
def test_states_that_are_the_teacher_s_have_neither_loss_nor_gradient(kind: Any) -> None:
    inputs = random_inputs()
    same = torch.tensor(STUDENT_CHUNKS)
    hidden = torch.randn(2, 5, 4, dtype=torch.float64)
    teacher = replace(inputs.teacher, hidden=hidden, states={})
    inputs = replace(
        inputs,
        student_hidden=hidden.clone().requires_grad_(),
        teacher=teacher,
        teacher_labels=inputs.labels,
        alignment=AlignmentBatch.from_chunk_ids(same, same),
    )
    projectors = StateProjectors(student_hidden=4, teacher_hidden=4, start="none")
    assert not list(projectors.parameters())
    output = kind(projectors=projectors)(inputs)
    (grad,) = torch.autograd.grad(output.loss_sum, inputs.student_hidden)
    assert int(output.count) > 0
    assert abs(output.loss_sum.item()) < 1e-14
    assert grad.abs().max().item() < 1e-14


def test_states_of_other_rows_reach_nothing() -> None:
    inputs, projectors = random_inputs(), projectors_of()
    loss = HiddenMseLoss(projectors=projectors, layers=LAYERS)
    truth = loss(inputs)
    used = torch.zeros(2, 5, dtype=torch.bool)
    for place, _ in ENDS:
        used[place] = True
    others = {
        n: state.detach().masked_fill(~used[..., None], torch.nan).requires_grad_()
        for n, state in {**inputs.student_states, LAST_LAYER: inputs.student_hidden}.items()
    }
    output = loss(replace(inputs, student_hidden=others.pop(LAST_LAYER), student_states=others))
    assert torch.equal(output.loss_sum, truth.loss_sum)
    grads = torch.autograd.grad(output.loss_sum, list(projectors.parameters()))
    assert all(grad.isfinite().all() for grad in grads)


def test_bf16_states_are_compared_in_fp32() -> None:
    inputs = random_inputs(dtype=torch.bfloat16)
    projectors = projectors_of().bfloat16()
    output = HiddenMseLoss(projectors=projectors, layers=LAYERS)(inputs)
    assert output.loss_sum.dtype == torch.float32
    double = random_inputs()
    states = {n: state.detach().double() for n, state in inputs.student_states.items()}
    teacher = replace(
        double.teacher,
        hidden=inputs.teacher.hidden.double(),
        states={n: state.double() for n, state in inputs.teacher.states.items()},
    )
    double = replace(
        double,
        student_hidden=inputs.student_hidden.detach().double(),
        student_states=states,
        teacher=teacher,
    )
    truth = definition("hidden_mse", double, projectors.double(), relative=False)
    torch.testing.assert_close(output.loss_sum.double(), truth, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("layer", "number"), [(1, 1), (3, 3), (4, LAST_LAYER), (-1, LAST_LAYER), (-2, 3), (-4, 1)]
)
def test_layers_are_counted_from_either_end(layer: int, number: int) -> None:
    assert layer_number(layer, 4) == number


@pytest.mark.parametrize("layer", [5, -5, 0])
def test_a_layer_that_the_model_lacks_is_refused(layer: int) -> None:
    with pytest.raises(LossError, match=rf"no such layer; got {layer}; expected 1 to 4, or -1"):
        layer_number(layer, 4)


def test_projections_are_drawn_from_the_seed_for_the_resolved_layers() -> None:
    shard = VocabShard(start=0, stop=11, vocab_size=11, group=None)
    pair = ModelPair(
        student_hidden=3,
        teacher_hidden=4,
        student_layers=3,
        teacher_layers=4,
        seed=5,
        student_shard=shard,
        teacher_shard=shard,
        student_head=torch.zeros(11, 3),
    )
    stand_in = StateProjectors(student_hidden=1, teacher_hidden=1)
    loss = HiddenMseLoss(projectors=stand_in, layers=((3, -1), (-2, 3), (1, -2)))
    made = loss.make_projectors("random", pair)
    assert made.layers == LAYERS
    for weight, expected in zip(made.weights, projectors_of().float().weights, strict=True):
        torch.testing.assert_close(weight, expected)
    with pytest.raises(LossError, match="states of other widths are compared by a projection"):
        loss.make_projectors("none", pair)


@pytest.mark.parametrize(
    ("layers", "error"),
    [
        (((0, -1),), r"pairs of numbers from 1 or -1 on; got \[0, -1\]"),
        (((1, 2, 3),), r"got \[1, 2, 3\]"),
        ((), "each once"),
        (((1, 2), (1, 2)), "each once"),
    ],
    ids=["zero", "three", "none", "twice"],
)
def test_pairs_that_are_none_are_refused(layers: Any, error: str) -> None:
    with pytest.raises(LossError, match=error):
        HiddenMseLoss(projectors=projectors_of(), layers=layers)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"student_states": {}}, "the student's states of its layer 2; got none"),
        ({"student_hidden": None}, "the student's states of its last layer; got none"),
        ({"student_hidden": torch.zeros(2, 4, 3)}, r"got \(2, 4, 3\); expected \(2, 5\)"),
        ({"teacher_labels": None}, "needs the labels of the teacher's positions; got none"),
    ],
    ids=["layer", "last", "shape", "labels"],
)
def test_states_that_are_not_there_are_named(change: dict[str, Any], error: str) -> None:
    loss = HiddenMseLoss(projectors=projectors_of(), layers=LAYERS)
    with pytest.raises(LossError, match=error):
        loss(replace(random_inputs(), **change))


def test_states_below_the_last_are_neither_cached_nor_sent() -> None:
    projectors = projectors_of()
    assert HiddenMseLoss(projectors=projectors, layers=((2, -1),)).target_forms == ("hidden",)
    assert HiddenMseLoss(projectors=projectors, layers=((-1, 3),)).target_forms == ()

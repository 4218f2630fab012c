"""DSKD against its definition; the rules of all objectives are tested elsewhere."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.distributed import vocab_parallel
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError
from megatron_ext.losses import (
    DistillationInputs,
    DskdLoss,
    DskdProjectors,
    KnownAhead,
    TeacherTargets,
    VocabularyMatch,
)

VOCABS, WIDTHS = (7, 6), (3, 4)
STUDENT = [[0, 1, 1, 2, 3]]
TEACHER = [[0, 1, 2, 2, 3]]
ONE_TO_ONE, STARTS = [(0, 0), (4, 4)], [(0, 0), (1, 1), (3, 2), (4, 4)]
COMMON = VocabularyMatch(
    common_student=torch.tensor([0, 2, 3, 5, 6]), common_teacher=torch.tensor([1, 0, 2, 3, 5])
)
TAU = 1.6


def random_inputs(seed: int = 0) -> DistillationInputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shards = [VocabShard(start=0, stop=size, vocab_size=size) for size in VOCABS]
    return DistillationInputs(
        student_logits=normal(1, 5, 7).requires_grad_(),
        student_shard=shards[0],
        labels=torch.randint(0, 7, (1, 5), generator=generator),
        student_hidden=normal(1, 5, 3).requires_grad_(),
        student_head_weight=normal(7, 3).requires_grad_(),
        teacher=TeacherTargets(
            kind="hidden", shard=shards[1], hidden=normal(1, 5, 4), head_weight=normal(6, 4)
        ),
        alignment=AlignmentBatch.from_chunk_ids(torch.tensor(STUDENT), torch.tensor(TEACHER)),
        match=COMMON,
    )


def random_projectors() -> DskdProjectors:
    return DskdProjectors(student_hidden=3, teacher_hidden=4, seed=5).double()


def definition(
    inputs: DistillationInputs,
    projectors: DskdProjectors,
    rows: list[tuple[int, int]],
    *,
    target: str,
    gate: str,
    weights: tuple[float, float, float],
    distance: str = "none",
    hidden_weight: float = 0.0,
) -> torch.Tensor:
    """Position by position, in fp64 by autograd."""
    teacher, head = inputs.teacher, inputs.student_head_weight
    table = dict(zip(COMMON.common_teacher.tolist(), COMMON.common_student.tolist(), strict=True))
    total = torch.zeros((), dtype=torch.float64)
    for own, other in rows:
        hidden = teacher.hidden[0, other]
        teacher_logits = teacher.head_weight @ hidden
        projected = head.detach() @ projectors.teacher_to_student @ hidden
        onto_teacher = projectors.student_to_teacher @ inputs.student_hidden[0, own]
        wanted = int(inputs.labels[0, own])
        if target == "teacher":
            wanted = table.get(int(teacher_logits.argmax()), -1)
        if wanted >= 0:
            total = total - weights[0] * torch.log_softmax(projected, dim=-1)[wanted]
        log_s = torch.log_softmax(projected.detach() / TAU, dim=-1)
        log_q = torch.log_softmax(inputs.student_logits[0, own] / TAU, dim=-1)
        if gate == "none" or int(projected.argmax()) == wanted:
            total = total + weights[2] * TAU**2 * (log_s.exp() * (log_s - log_q)).sum()
        log_p = torch.log_softmax(teacher_logits / TAU, dim=-1)
        log_t = torch.log_softmax(teacher.head_weight @ onto_teacher / TAU, dim=-1)
        total = total + weights[1] * TAU**2 * (log_p.exp() * (log_p - log_t)).sum()
        if distance == "mse":
            total = total + hidden_weight * sum((onto_teacher - hidden) ** 2) / len(hidden)
        if distance == "cosine":
            lengths = (onto_teacher @ onto_teacher).sqrt() * (hidden @ hidden).sqrt()
            total = total + hidden_weight * (1 - onto_teacher @ hidden / lengths)
    return total


def assert_same_gradients(
    value: torch.Tensor,
    truth: torch.Tensor,
    inputs: DistillationInputs,
    projectors: DskdProjectors,
) -> tuple[torch.Tensor, ...]:
    """Compare a loss and its gradients with the definition's; return the gradients."""
    torch.testing.assert_close(value, truth, rtol=1e-10, atol=0)
    trained = [inputs.student_logits, inputs.student_hidden, *projectors.parameters()]
    grads, true_grads = (
        torch.autograd.grad(loss, trained, materialize_grads=True) for loss in (value, truth)
    )
    for grad, true_grad in zip(grads, true_grads, strict=True):
        torch.testing.assert_close(grad, true_grad, rtol=1e-9, atol=1e-13)
    return grads


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gate", ["target", "none"])
@pytest.mark.parametrize("target", ["label", "teacher"])
@pytest.mark.parametrize("positions", ["one_to_one", "chunk_starts"])
def test_value_and_every_gradient_are_those_of_the_definition(
    positions: Any, target: Any, gate: Any, seed: int
) -> None:
    inputs, projectors = random_inputs(seed), random_projectors()
    rows = ONE_TO_ONE if positions == "one_to_one" else STARTS
    weights = (0.7, 1.3, 1.0)
    loss = DskdLoss(
        projectors=projectors,
        temperature=TAU,
        positions=positions,
        target=target,
        gate=gate,
        label_weight=weights[0],
        teacher_space_weight=weights[1],
    )
    output = loss(inputs)
    truth = definition(inputs, projectors, rows, target=target, gate=gate, weights=weights)
    assert int(output.count) == len(rows)
    assert_same_gradients(output.loss_sum, truth, inputs, projectors)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("distance", ["mse", "cosine"])
def test_a_distance_of_hidden_states_is_added_with_every_gradient(
    distance: Any, alone: bool
) -> None:
    inputs, projectors = random_inputs(), random_projectors()
    weights = (0.0, 0.0, 0.0) if alone else (0.7, 1.3, 0.4)
    loss = DskdLoss(
        projectors=projectors,
        temperature=TAU,
        positions="chunk_starts",
        gate="none",
        label_weight=weights[0],
        teacher_space_weight=weights[1],
        student_space_weight=weights[2],
        hidden_distance=distance,
        hidden_weight=0.6,
    )
    output = loss(inputs)
    truth = definition(
        inputs,
        projectors,
        STARTS,
        target="label",
        gate="none",
        weights=weights,
        distance=distance,
        hidden_weight=0.6,
    )
    total, count = output.metrics["hidden_distance"]
    assert int(count) == len(STARTS)
    if alone:
        torch.testing.assert_close(0.6 * total, truth.detach(), rtol=1e-10, atol=0)
    grads = assert_same_gradients(output.loss_sum, truth, inputs, projectors)
    assert grads[1].any()
    assert grads[3].any()


@pytest.mark.parametrize("distance", ["mse", "cosine"])
def test_states_that_carry_over_are_at_no_distance(distance: Any) -> None:
    inputs = random_inputs()
    projectors = random_projectors()
    shared = AlignmentBatch.from_chunk_ids(torch.tensor(STUDENT), torch.tensor(STUDENT))
    states = inputs.student_hidden.detach() @ projectors.student_to_teacher.detach().t()
    if distance == "cosine":
        states = 3 * states
    teacher = replace(inputs.teacher, hidden=states)
    loss = DskdLoss(projectors=projectors, hidden_distance=distance, positions="chunk_starts")
    total, count = loss(replace(inputs, teacher=teacher, alignment=shared)).metrics[
        "hidden_distance"
    ]
    assert int(count) == 4
    assert total.abs() < 1e-12


def test_the_gates_of_these_cases_are_open_and_shut() -> None:
    """So that the test above sees both."""
    loss = DskdLoss(projectors=random_projectors(), positions="chunk_starts")
    gated = [int(loss(random_inputs(seed)).metrics["gated"][0]) for seed in range(3)]
    assert 0 < sum(gated) < 12


@pytest.mark.parametrize(("positions", "count"), [("one_to_one", 1), ("chunk_starts", 3)])
def test_the_count_is_known_ahead(positions: Any, count: int) -> None:
    inputs = random_inputs()
    labels = inputs.labels.clone()
    labels[0, 0] = IGNORE_INDEX
    inputs = replace(inputs, labels=labels)
    loss = DskdLoss(projectors=random_projectors(), positions=positions)
    known = KnownAhead(labels=labels, alignment=inputs.alignment)
    assert int(loss.count_ahead(known)) == int(loss(inputs).count) == count


def test_the_students_head_gets_no_gradient() -> None:
    inputs = random_inputs()
    output = DskdLoss(projectors=random_projectors(), gate="none")(inputs)
    (grad,) = torch.autograd.grad(
        output.loss_sum, inputs.student_head_weight, materialize_grads=True
    )
    assert not grad.any()


def test_models_that_agree_under_projectors_that_carry_over_have_no_divergence() -> None:
    inputs = random_inputs()
    teacher = inputs.teacher
    hidden, head = teacher.hidden, teacher.head_weight
    shard = teacher.shard
    everything = torch.arange(6)
    projectors = DskdProjectors.from_heads(
        head,
        head,
        VocabularyMatch(common_student=everything, common_teacher=everything),
        student_shard=shard,
        teacher_shard=shard,
    ).double()
    same = replace(
        inputs,
        student_logits=(hidden @ head.t()).requires_grad_(),
        student_shard=shard,
        labels=inputs.labels.clamp(max=5),
        student_hidden=hidden.clone().requires_grad_(),
        student_head_weight=head,
        alignment=AlignmentBatch.from_chunk_ids(torch.tensor(STUDENT), torch.tensor(STUDENT)),
    )
    loss = DskdLoss(projectors=projectors, gate="none", label_weight=0.0, positions="chunk_starts")
    output = loss(same)
    grads = torch.autograd.grad(output.loss_sum, [same.student_logits, same.student_hidden])
    assert int(output.count) == 4
    # The maps are kept in fp32.
    assert abs(output.loss_sum.item()) < 1e-10
    assert all(grad.abs().max().item() < 1e-5 for grad in grads)


def test_projectors_from_heads_are_the_pseudo_inverses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vocab_parallel.SLICE_ELEMENTS, "cpu", 9)
    inputs = random_inputs()
    teacher = inputs.teacher
    head = inputs.student_head_weight.detach()
    made = DskdProjectors.from_heads(
        head,
        teacher.head_weight,
        COMMON,
        student_shard=inputs.student_shard,
        teacher_shard=teacher.shard,
    )
    own, other = head[COMMON.common_student], teacher.head_weight[COMMON.common_teacher]
    # Both map row vectors h in the other's space: h_t (pinv(E_s) E_t)^T.
    expected = torch.linalg.pinv(own) @ other
    torch.testing.assert_close(made.teacher_to_student.double(), expected, rtol=1e-5, atol=1e-6)
    assert list(made.state_dict()) == ["teacher_to_student"]
    assert [name for name, _ in made.named_buffers()] == ["matched_rows", "inverse_gram"]
    moved = head + 0.1
    weight = made.to_teacher_weight(moved, inputs.student_shard)
    expected = torch.linalg.pinv(other) @ moved[COMMON.common_student]
    torch.testing.assert_close(weight.double(), expected, rtol=1e-4, atol=1e-5)
    assert not weight.requires_grad


def test_what_a_masked_position_holds_reaches_no_projector() -> None:
    inputs, projectors = random_inputs(), random_projectors()
    teacher = inputs.teacher
    hidden, own = teacher.hidden.clone(), inputs.student_hidden.detach().clone()
    hidden[0, 4], own[0, 4] = torch.nan, torch.nan
    logits = inputs.student_logits.detach().clone()
    logits[0, 4] = torch.nan
    labels = inputs.labels.clone()
    labels[0, 4] = IGNORE_INDEX
    inputs = replace(
        inputs,
        labels=labels,
        student_logits=logits.requires_grad_(),
        student_hidden=own.requires_grad_(),
        teacher=replace(teacher, hidden=hidden),
    )
    output = DskdLoss(projectors=projectors, gate="none")(inputs)
    trained = [inputs.student_logits, own, *projectors.parameters()]
    grads = torch.autograd.grad(output.loss_sum, trained)
    assert int(output.count) == 1
    assert output.loss_sum.isfinite()
    assert all(grad.isfinite().all() for grad in grads)
    assert grads[2].any()


def test_every_seed_gives_every_rank_its_projectors() -> None:
    first, again = (DskdProjectors(student_hidden=3, teacher_hidden=4) for _ in range(2))
    other = DskdProjectors(student_hidden=3, teacher_hidden=4, seed=1)
    assert torch.equal(first.teacher_to_student, again.teacher_to_student)
    assert not torch.equal(first.teacher_to_student, other.teacher_to_student)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"student_hidden": None}, "needs the student's hidden states and head; got no student_h"),
        ({"student_head_weight": None}, "got no student_head_weight"),
        ({"student_hidden": torch.zeros(1, 5, 9)}, r"student_hidden .*got \(1, 5, 9\); expected"),
        ({"match": None}, "which tokens both vocabularies have; got no match"),
    ],
    ids=["no states", "no head", "other width", "no match"],
)
def test_inputs_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    loss = DskdLoss(projectors=random_projectors(), target="teacher")
    with pytest.raises(LossError, match=message):
        loss(replace(random_inputs(), **change))


def test_options_and_projectors_that_mean_nothing_are_refused() -> None:
    with pytest.raises(LossError, match="unknown gate of the objective dskd; got 'label'"):
        DskdLoss(projectors=random_projectors(), gate="label")
    with pytest.raises(LossError, match="label_weight of the objective dskd must not be negative"):
        DskdLoss(projectors=random_projectors(), label_weight=-1.0)
    nothing = torch.zeros(0, dtype=torch.int64)
    shard = VocabShard(start=0, stop=2, vocab_size=2)
    with pytest.raises(LossError, match="tokens that both vocabularies have; got no token"):
        DskdProjectors.from_heads(
            torch.eye(2),
            torch.eye(2),
            VocabularyMatch(common_student=nothing, common_teacher=nothing),
            student_shard=shard,
            teacher_shard=shard,
        )

"""Partition KL over texts tokenized two ways, against enumeration of every text."""

from dataclasses import replace
from itertools import product
from math import log
from sys import float_info
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.errors import LossError
from megatron_ext.losses import (
    ChunkCompletions,
    CompletionTable,
    DistillationInputs,
    LossOutput,
    PartitionKLLoss,
    TeacherTargets,
    VocabularyMatch,
)
from tests.losses.microbatch import known_ahead
from tests.losses.objective_cases import CASES
from tests.losses.toy_language import TEXTS, Tokens, TwoReadings, read_in_turn

PREFIX_FREE = {
    "two codes": ((b"aa", b"ab", b"ac", b"b", b"c"), (b"a", b"ba", b"bb", b"bc", b"c")),
    "pairs of bytes": ((b"aa", b"ab", b"ac", b"b", b"c"), (b"a", b"b", b"c")),
    "bytes of pairs": ((b"a", b"b", b"c"), (b"a", b"ba", b"bb", b"bc", b"c")),
}
"""No token begins another: a token is said exactly where the text goes on with its bytes."""

VOCABULARIES = PREFIX_FREE | {
    "overlapping": ((b"a", b"b", b"c", b"ab", b"bab"), (b"a", b"b", b"c", b"aba", b"ba"))
}


class Pair(TwoReadings):
    """The objective's inputs for a text, and the events of its chunks."""

    def chunks(self) -> list[tuple[tuple[Tokens, Tokens], tuple[Tokens, Tokens]]]:
        """Context and tokens of every chunk, student and teacher."""
        count = int(self.chunk_ids[0].max()) + 1
        found = []
        for chunk in range(count):
            sides = []
            for stream, ids in zip(self.streams, self.chunk_ids, strict=True):
                rows = np.flatnonzero(ids == chunk)
                sides.append((stream[: rows[0]], stream[rows[0] : rows[-1] + 1]))
            found.append((sides[0], sides[1]))
        return found

    def inputs(self, kind: str = "logits") -> DistillationInputs:
        student, teacher = self.vocabularies
        logits, labels, alignment, shards = self.logits, self.labels, self.alignment, self.shards
        common = [
            (s, t)
            for s, t in product(range(len(student)), range(len(teacher)))
            if student[s] == teacher[t]
        ]
        ids = torch.tensor(common, dtype=torch.int64).reshape(-1, 2)
        table = CompletionTable.from_token_bytes(student, teacher)
        if kind == "topk":
            top = logits[1].topk(2, dim=-1)
            targets = TeacherTargets(
                kind="topk",
                shard=shards[1],
                topk_ids=top.indices,
                topk_logits=top.values,
                log_normaliser=torch.logsumexp(logits[1], dim=-1),
            )
        else:
            targets = TeacherTargets(kind="logits", shard=shards[1], logits=logits[1])
        return DistillationInputs(
            student_logits=logits[0].clone().requires_grad_(),
            student_shard=shards[0],
            labels=labels[0],
            teacher=targets,
            alignment=alignment,
            match=VocabularyMatch(common_student=ids[:, 0], common_teacher=ids[:, 1]),
            completions=ChunkCompletions.of(alignment, *labels, table),
        )

    def enumerated(self, chunk: int) -> tuple[list[float], list[float]]:
        """Q and P of every event of a chunk and of the rest, by summing over texts.

        Events are all pairs of a student's and a teacher's last token behind what was observed that
        make the same bytes; where both sides have several tokens the observed pair alone.
        """
        sides = self.chunks()[chunk]
        (_, student), (_, teacher) = sides
        if len(student) > 1 and len(teacher) > 1:
            pairs = [(student, teacher)]
        else:
            pairs = [
                ((*student[:-1], u), (*teacher[:-1], v))
                for u, v in product(*(range(len(vocabulary)) for vocabulary in self.vocabularies))
                if self._spell(0, (*student[:-1], u)) == self._spell(1, (*teacher[:-1], v))
            ]
        found = []
        for side, model in enumerate(self.models):
            context, events = sides[side][0], [pair[side] for pair in pairs]
            masses = [model.probability(event, context) for event in events]
            found.append([*masses, model.others(events, context)])
        return found[0], found[1]

    def _spell(self, side: int, tokens: Tokens) -> bytes:
        return b"".join(self.vocabularies[side][token] for token in tokens)


def divergence(q: list[float], p: list[float], tau: float, direction: str, mixture: float) -> float:
    """D(P || Q) of tempered distributions, with plain numbers.

    An event that one model rules out has the logarithm of the smallest normal number.
    """
    q, p = ([x ** (1 / tau) for x in side] for side in (q, p))
    q, p = ([x / sum(side) for x in side] for side in (q, p))

    def kl(first: list[float], second: list[float]) -> float:
        pairs = zip(first, second, strict=True)
        return sum(a * (log(a) - log(max(b, float_info.min))) for a, b in pairs if a > 0)

    if direction == "forward":
        return kl(p, q)
    if direction == "reverse":
        return kl(q, p)
    mix = [mixture * b + (1 - mixture) * a for a, b in zip(q, p, strict=True)]
    return mixture * kl(p, mix) + (1 - mixture) * kl(q, mix)


def run(inputs: DistillationInputs, **options: Any) -> tuple[LossOutput, torch.Tensor]:
    output = PartitionKLLoss(**options)(inputs)
    (grad,) = torch.autograd.grad(output.loss_sum, inputs.student_logits)
    return output, grad


@pytest.mark.parametrize(("vocabularies", "text", "options"), read_in_turn(VOCABULARIES), ids=str)
def test_each_chunk_has_the_divergence_of_enumerated_texts(
    vocabularies: str, text: bytes, options: dict[str, Any]
) -> None:
    pair = Pair(text, VOCABULARIES[vocabularies], seeds=(1, 2))
    output, _ = run(pair.inputs(), chain_weight=0.5, **options)
    tau, direction, mixture = (
        options["temperature"],
        options["direction"],
        options.get("mixture", 0.5),
    )
    for chunk, ((_, student), (_, teacher)) in enumerate(pair.chunks()):
        weight = 1.0 if len(student) == len(teacher) == 1 else 0.5
        truth = divergence(*pair.enumerated(chunk), tau, direction, mixture) * tau**2 * weight
        assert output.chunk_loss[chunk].item() == pytest.approx(truth, rel=1e-9, abs=1e-12)


def test_the_toy_texts_have_chunks_of_every_kind_and_several_completions() -> None:
    kinds, completions = set(), 0
    for vocabularies in VOCABULARIES.values():
        for text in TEXTS:
            pair = Pair(text, vocabularies, seeds=(1, 2))
            for chunk, ((_, student), (_, teacher)) in enumerate(pair.chunks()):
                kinds.add((min(len(student), 2), min(len(teacher), 2)))
                if len(student) != len(teacher):
                    completions = max(completions, len(pair.enumerated(chunk)[0]) - 1)
    assert kinds == {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert completions >= 3


@pytest.mark.parametrize(("vocabularies", "text", "options"), read_in_turn(PREFIX_FREE), ids=str)
def test_one_language_tokenized_two_ways_has_neither_loss_nor_gradient(
    vocabularies: str, text: bytes, options: dict[str, Any]
) -> None:
    pair = Pair(text, PREFIX_FREE[vocabularies], seeds=(1, 1))
    assert pair.streams[0] != pair.streams[1]
    for kind in ("logits", "topk"):
        output, grad = run(pair.inputs(kind), **options)
        assert abs(output.loss_sum.item()) < 1e-12
        assert grad.abs().max().item() < 1e-12


def test_the_teachers_topk_gives_what_its_logits_give_on_fewer_events() -> None:
    pair = Pair(TEXTS[1], VOCABULARIES["overlapping"], seeds=(1, 2))
    whole, _ = run(pair.inputs())
    top, _ = run(pair.inputs("topk"))
    # A coarser partition can only bring two distributions closer.
    assert (top.chunk_loss <= whole.chunk_loss + 1e-12).all()


def test_a_chunk_whose_observed_token_is_outside_the_topk_needs_its_log_probability() -> None:
    pair = Pair(TEXTS[0], PREFIX_FREE["pairs of bytes"], seeds=(1, 2))
    inputs = pair.inputs("topk")
    teacher, completions = inputs.teacher, inputs.completions
    rows = completions.chains.teacher
    unknown = {
        int(completions.chain_chunk[chain])
        for row, label, chain in zip(*(ids.tolist() for ids in rows[:3]), strict=True)
        if label not in teacher.topk_ids[0, row].tolist()
    }
    assert unknown
    left_out, _ = run(inputs)
    assert int(left_out.count) == completions.chunk_count - len(unknown)
    assert not left_out.chunk_loss[list(unknown)].any()

    whole = pair.inputs().teacher
    picked = whole.logits[0, torch.arange(len(pair.streams[1])), list(pair.streams[1])][None]
    known, _ = run(replace(inputs, teacher=replace(teacher, label_log_probs=picked)))
    assert int(known.count) == completions.chunk_count


def test_a_chunk_without_a_label_is_left_out_unless_it_has_one_token_a_side() -> None:
    case = CASES["partition_kl"]
    inputs = case.build(case.batch(), (0, 0))
    classes = inputs.alignment.chunk_class
    found = torch.cat([inputs.completions.single_chunk, inputs.completions.chain_chunk])
    output, _ = run(inputs)
    assert int(output.count) == len(found) < inputs.alignment.chunk_count
    assert set(torch.nonzero(classes == 0)[:, 0].tolist()) <= set(found.tolist())


def test_without_the_teachers_labels_the_count_ahead_is_an_upper_bound() -> None:
    case = CASES["partition_kl"]
    inputs = case.build(case.batch(), (0, 0))
    known, count = known_ahead(inputs), int(PartitionKLLoss()(inputs).count)
    assert count < int(known.chunks())
    assert int(PartitionKLLoss().count_ahead(replace(known, teacher_labels=None))) >= count


def test_an_implementation_that_is_none_is_refused() -> None:
    with pytest.raises(LossError, match=r"no such implementation of partition_kl; got 'cuda'"):
        PartitionKLLoss(implementation="cuda")


@pytest.mark.parametrize("kind", ["logits", "topk"])
def test_kernels_give_what_torch_gives(kind: str) -> None:
    inputs = Pair(TEXTS[1], VOCABULARIES["overlapping"], seeds=(1, 2)).inputs(kind)
    teacher = inputs.teacher
    if teacher.logits is not None:
        teacher = replace(teacher, logits=teacher.logits.float())
    logits = inputs.student_logits.detach().float().requires_grad_()
    inputs = replace(inputs, student_logits=logits, teacher=teacher)
    options = {"temperature": 1.5, "chain_weight": 0.5}
    by_torch, plain = run(inputs, implementation="torch", **options)
    by_kernel, grad = run(inputs, implementation="triton", **options)
    # A small divergence is a difference of logarithms, which fp32 rounds in each of the two forms.
    assert by_kernel.loss_sum.item() == pytest.approx(by_torch.loss_sum.item(), rel=1e-5)
    torch.testing.assert_close(grad, plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"match": None}, "needs to know which tokens both vocabularies have; got no match"),
        ({"completions": None}, "needs ChunkCompletions as completions; got none"),
    ],
)
def test_what_is_missing_is_named(parts: dict[str, Any], message: str) -> None:
    inputs = Pair(TEXTS[0], PREFIX_FREE["pairs of bytes"], seeds=(1, 2)).inputs()
    with pytest.raises(LossError, match=message):
        PartitionKLLoss()(replace(inputs, **parts))


def test_completions_of_another_batch_are_refused() -> None:
    inputs = Pair(TEXTS[0], PREFIX_FREE["pairs of bytes"], seeds=(1, 2)).inputs()
    other = Pair(TEXTS[1], VOCABULARIES["overlapping"], seeds=(1, 2)).inputs()
    assert inputs.completions.chunk_count != other.completions.chunk_count
    with pytest.raises(LossError, match="partition_kl are of another alignment; got"):
        PartitionKLLoss()(replace(inputs, completions=other.completions))


def test_a_weight_that_is_none_is_refused() -> None:
    with pytest.raises(LossError, match=r"chain_weight of partition_kl.*got -1"):
        PartitionKLLoss(chain_weight=-1)

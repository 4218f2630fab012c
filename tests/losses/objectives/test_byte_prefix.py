"""``byte_prefix`` over texts tokenized two ways, against a target made token by token."""

from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from megatron_ext.errors import LossError
from megatron_ext.losses import (
    BytePrefixLoss,
    DistillationInputs,
    LossOutput,
    PrefixTable,
    TeacherTargets,
)
from megatron_ext.losses import prefix_table as module
from megatron_ext.tokenizers import MegatronTokenizer, MegatronTokenizerText
from tests.losses.microbatch import known_ahead
from tests.losses.objectives.test_partition_kl_loss import divergence
from tests.losses.toy_language import TEXTS, TwoReadings, read_in_turn

Vocabulary = tuple[bytes, ...]

EXACT: dict[str, tuple[Vocabulary, Vocabulary]] = {
    "bytes of pairs": ((b"a", b"b", b"c"), (b"a", b"ba", b"bb", b"bc", b"c")),
    "bytes of triples": ((b"c", b"b", b"a"), (b"aab", b"aaa", b"aac", b"ab", b"ac", b"b", b"c")),
    "one vocabulary": ((b"a", b"ba", b"bb", b"bc", b"c"), (b"a", b"ba", b"bb", b"bc", b"c")),
}
"""The student's tokens are within the teacher's, and no teacher token begins another."""

PAIRS = EXACT | {
    "pairs of bytes": ((b"aa", b"ab", b"ac", b"b", b"c"), (b"a", b"b", b"c")),
    "two codes": ((b"aa", b"ab", b"ac", b"b", b"c"), (b"a", b"ba", b"bb", b"bc", b"c")),
    "overlapping": ((b"a", b"b", b"c", b"ab", b"bab", b"cc"), (b"a", b"b", b"c", b"aba", b"ba")),
    "several ids of a token": ((b"a", b"b", b"c", b"ab", b"a"), (b"b", b"a", b"ab", b"c", b"a")),
    "bytes that the student lacks": ((b"a", b"b", b"ca", b"cb", b"cc"), (b"a", b"b", b"c", b"ca")),
}


class Reading(TwoReadings):
    """The objective's inputs for a text."""

    def inputs(self) -> DistillationInputs:
        labels, shards, alignment = self.labels, self.shards, self.alignment
        table = PrefixTable.from_token_bytes(*self.vocabularies)
        return DistillationInputs(
            student_logits=self.logits[0].clone().requires_grad_(),
            student_shard=shards[0],
            labels=labels[0],
            teacher_labels=labels[1],
            teacher=TeacherTargets(kind="logits", shard=shards[1], logits=self.logits[1]),
            alignment=alignment,
            completions=table.of_batch(alignment, *labels),
            prefix_columns=table.columns(*shards),
        )

    def target(self, row: int) -> tuple[dict[int, float], float]:
        """Teacher's mass of each student token at a row, and of anything else; by the definition.

        Of a start, every student token is in it; of a middle those that may follow.
        """
        student, teacher = self.vocabularies
        q = self.logits[1][0].softmax(dim=-1)
        begins = [0, *self.ends[1]]
        begin, end = ([0, *self.ends[0]])[row : row + 2]
        at = max(i for i, start in enumerate(begins[:-1]) if start <= begin)
        label = self.streams[0][row]
        said = teacher[self.streams[1][at]][: begin - begins[at]]

        def longest(text: bytes) -> int | None:
            found = [i for i, token in enumerate(student) if text.startswith(token)]
            return max(found, key=lambda i: (len(student[i]), -i), default=None)

        same = {text: [i for i, t in enumerate(student) if t == text] for text in student}
        masses = {} if said else dict.fromkeys(range(len(student)), 0.0)
        rest, seen = 0.0, dict.fromkeys(teacher, 0)
        for token, text in enumerate(teacher):
            place, seen[text] = seen[text], seen[text] + 1
            if not text.startswith(said):
                continue
            into = longest(text[len(said) :])
            if not said and place < len(same.get(text, [])):
                into = same[text][place]
            if into is None:
                rest += float(q[at, token])
            else:
                masses[into] = masses.get(into, 0.0) + float(q[at, token])
        total = sum(masses.values()) + rest
        if end > begins[at + 1]:
            last = min(i for i in range(len(begins)) if begins[i] >= end) - 1
            tail = teacher[self.streams[1][last]][: end - begins[last]]
            mass = sum(float(q[last, t]) for t, text in enumerate(teacher) if text.startswith(tail))
            for step in range(at, last):
                mass *= float(q[step, self.streams[1][step]])
            source = longest(teacher[self.streams[1][at]][len(said) :])
            masses[label] = masses.get(label, 0.0) + mass
            if source is None:
                rest -= mass
            else:
                masses[source] -= mass
        return {token: mass / total for token, mass in masses.items()}, rest / total


def run(inputs: DistillationInputs, **options: Any) -> tuple[LossOutput, torch.Tensor]:
    output = BytePrefixLoss(**options)(inputs)
    (grad,) = torch.autograd.grad(output.loss_sum, inputs.student_logits)
    return output, grad


@pytest.mark.parametrize(("pair", "text", "options"), read_in_turn(PAIRS), ids=str)
def test_each_row_is_compared_with_the_target_of_the_definition(
    pair: str, text: bytes, options: dict[str, Any]
) -> None:
    reading = Reading(text, PAIRS[pair], seeds=(1, 2))
    output, _ = run(reading.inputs(), **options)
    tau, direction, mixture = (
        options["temperature"],
        options["direction"],
        options.get("mixture", 0.5),
    )
    probs = reading.logits[0][0].softmax(dim=-1)
    truth = np.zeros(int(reading.chunk_ids[0].max()) + 1)
    for row, chunk in enumerate(reading.chunk_ids[0]):
        masses, rest = reading.target(row)
        q, p = [float(probs[row, token]) for token in masses], [*masses.values()]
        if len(q) < probs.shape[1]:
            # Otherwise nothing is left that the student could say.
            q, p = [*q, 1 - sum(q)], [*p, rest]
        truth[chunk] += tau**2 * divergence(q, p, tau, direction, mixture)
    assert int(output.count) == len(reading.streams[0])
    np.testing.assert_allclose(output.chunk_loss.numpy(), truth, rtol=1e-7, atol=1e-10)


def test_the_toy_texts_have_starts_middles_and_labels_that_span_tokens_in_both() -> None:
    middles, spans = 0, [0, 0]
    for pair in PAIRS.values():
        for text in TEXTS:
            rows = Reading(text, pair, seeds=(1, 2)).inputs().completions
            middles += len(rows.middles.student)
            is_middle = rows.spans.row >= len(rows.starts.student)
            spans = [spans[0] + int((~is_middle).sum()), spans[1] + int(is_middle.sum())]
    assert middles > 10
    assert min(spans) >= 2


@pytest.mark.parametrize(("pair", "text", "options"), read_in_turn(EXACT), ids=str)
def test_one_language_read_by_the_student_within_tokens_has_neither_loss_nor_gradient(
    pair: str, text: bytes, options: dict[str, Any]
) -> None:
    reading = Reading(text, EXACT[pair], seeds=(1, 1))
    output, grad = run(reading.inputs(), **options)
    assert int(output.count) == len(reading.streams[0])
    assert abs(output.loss_sum.item()) < 1e-12
    assert grad.abs().max().item() < 1e-12


@pytest.mark.parametrize("by", ["triton", "cpu"])
@pytest.mark.parametrize("pair", ["two codes", "overlapping"])
def test_kernels_and_loops_give_what_torch_gives(pair: str, by: str) -> None:
    pytest.importorskip("triton" if by == "triton" else "numba")
    inputs = Reading(TEXTS[1], PAIRS[pair], seeds=(1, 2)).inputs()
    logits = inputs.student_logits.detach().float().requires_grad_()
    teacher = replace(inputs.teacher, logits=inputs.teacher.logits.float())
    inputs = replace(inputs, student_logits=logits, teacher=teacher)
    # So high that a token without mass would show.
    by_torch, plain = run(inputs, implementation="torch", temperature=12.0)
    other, grad = run(inputs, implementation=by, temperature=12.0)
    assert other.loss_sum.item() == pytest.approx(by_torch.loss_sum.item(), rel=1e-6)
    torch.testing.assert_close(grad, plain, rtol=0, atol=1e-6)


def test_a_smoothing_that_is_no_share_is_refused() -> None:
    with pytest.raises(LossError, match=r"smoothing of byte_prefix is not a share; got 1"):
        BytePrefixLoss(smoothing=1)


def test_control_tokens_meet_their_partners_and_others_are_the_rest() -> None:
    table = PrefixTable.from_token_bytes(
        [b"a", None, b"b", None], [None, b"ab", b"b", None, b"c"], ((1, 0), (0, 1))
    )
    # A token with bytes is no partner, whatever it is paired with.
    assert table.starts.tolist() == [1, 0, 2, -1, -1]
    assert table.is_event.tolist() == [True, True, True, False]


def test_the_tokenizer_of_the_student_says_which_token_begins_a_teachers(tmp_path: Path) -> None:
    tokens = ["l", "o", "c", "a", "lo", "oc", "al", "ocal"]
    merges = [("o", "c"), ("a", "l"), ("oc", "al"), ("l", "o")]
    student, teacher = (
        _saved(Tokenizer(models.BPE({token: i for i, token in enumerate(vocab)}, pairs)), folder)
        for vocab, pairs, folder in (
            (tokens, merges, tmp_path / "student"),
            (["l", "o", "c", "a", "local", "locl"], [], tmp_path / "teacher"),
        )
    )
    assert student.text_to_ids("local") == [0, 7]
    none = np.array([], dtype=np.int64)
    table = PrefixTable.from_tokenizers(student, teacher, (none, none))
    # The longest that begins both is "lo".
    assert table.starts.tolist() == [0, 1, 2, 3, 0, 0]
    assert [table.next_in(b"local", cut) for cut in range(1, 5)] == [7, 2, 6, 0]
    assert [table.next_in(b"locl", cut) for cut in range(1, 4)] == [5, 2, 0]


def _saved(tokenizer: Tokenizer, folder: Path) -> MegatronTokenizerText:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return MegatronTokenizer.from_pretrained(folder)


def test_tokens_beyond_the_most_that_are_compared_are_part_of_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = EXACT["bytes of triples"]
    whole = PrefixTable.from_token_bytes(*pair)
    monkeypatch.setattr(module, "MOST_COMPLETIONS", 1)
    cut = PrefixTable.from_token_bytes(*pair)
    number = whole.number[b"aa"]
    behind = [
        t.next_token[t.next_pointers[number] : t.next_pointers[number + 1]] for t in (whole, cut)
    ]
    assert [ids.tolist() for ids in behind] == [[0, 1, 2], [0]]
    reading = Reading(b"aabca", pair, seeds=(1, 2))
    coarse, _ = run(reading.inputs())
    monkeypatch.undo()
    fine, _ = run(reading.inputs())
    assert coarse.count == fine.count
    assert (coarse.chunk_loss <= fine.chunk_loss + 1e-12).all()
    assert (coarse.chunk_loss < fine.chunk_loss - 1e-9).any()


def test_a_chunk_of_other_bytes_on_both_sides_has_its_start_alone() -> None:
    reading = Reading(b"aacbb", PAIRS["bytes of triples"], seeds=(1, 2))
    inputs = reading.inputs()
    exact = torch.zeros_like(inputs.alignment.is_exact)
    alignment = replace(inputs.alignment, is_exact=exact)
    table = PrefixTable.from_token_bytes(*reading.vocabularies)
    rows = table.of_batch(alignment, inputs.labels, inputs.teacher_labels)
    other = replace(inputs, alignment=alignment, completions=rows)
    output, _ = run(other)
    ahead = int(BytePrefixLoss().count_ahead(known_ahead(other)))
    assert int(output.count) == alignment.chunk_count == ahead
    assert int(output.count) < int(run(inputs)[0].count)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"prefix_columns": None}, "needs the columns of prefixes; got none"),
        ({"completions": None}, "needs PrefixRows as completions; got none"),
    ],
)
def test_what_is_missing_is_named(parts: dict[str, Any], message: str) -> None:
    inputs = Reading(TEXTS[0], PAIRS["pairs of bytes"], seeds=(1, 2)).inputs()
    with pytest.raises(LossError, match=message):
        BytePrefixLoss()(replace(inputs, **parts))


def test_rows_of_another_batch_are_refused() -> None:
    inputs = Reading(TEXTS[0], PAIRS["pairs of bytes"], seeds=(1, 2)).inputs()
    other = Reading(TEXTS[1], PAIRS["overlapping"], seeds=(1, 2)).inputs()
    assert inputs.completions.chunk_count != other.completions.chunk_count
    with pytest.raises(LossError, match="byte_prefix are of another alignment"):
        BytePrefixLoss()(replace(inputs, completions=other.completions))


def test_the_surprise_of_a_label_that_spans_tokens_is_that_of_all_of_them() -> None:
    reading = Reading(b"aacbb", PAIRS["pairs of bytes"], seeds=(1, 2))
    masses, _ = reading.target(0)
    first = reading.logits[1][0].log_softmax(dim=-1)
    assert reading.streams[0][0] == 0
    assert log(masses[0]) == pytest.approx(float(first[0, 0] + first[1, 0]))

"""The benchmark of losses: what it counts, what it compares with, and when it says nothing."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from benchmarks.loss_cost import cases, counted_bytes, counting, eager_recipe, gate, pairs
from benchmarks.loss_cost.microbatch import RankVocabulary, Shape, same_vocabulary
from benchmarks.loss_cost.traffic import Traffic
from megatron_ext.losses import DistillationInputs, ProjectedKLLoss

ROOT = Path(__file__).parents[1]
LOGITS = torch.ones(4, 8, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def vocabulary() -> RankVocabulary:
    return gate.small_vocabulary()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("losses")
    yield module
    for name in [name for name in sys.modules if name.split(".")[0] in ("losses", "loss_cost")]:
        del sys.modules[name]


def test_an_operator_reads_its_tensors_and_writes_its_results() -> None:
    with Traffic() as traffic:
        wide = LOGITS.float()
        wide.view(8, 4).add_(torch.ones(4))
    assert (traffic.read, traffic.written) == (64 + 128 + 16, 128 + 16 + 128)


def test_picking_reads_what_is_picked() -> None:
    index = torch.zeros(4, 1, dtype=torch.int64)
    with Traffic() as traffic:
        LOGITS.gather(-1, index)
    assert (traffic.read, traffic.written) == (8 + 32, 8)


def test_a_broadcast_tensor_is_read_at_its_own_size() -> None:
    vector = torch.ones(8)
    with Traffic() as traffic:
        vector.expand(100, 8).sum()
    assert traffic.read == 32


def test_peak_is_what_lives_at_once() -> None:
    with Traffic() as traffic:
        for _ in range(3):
            held = torch.zeros(100)
            del held
        first, second = torch.zeros(50), torch.zeros(10)
    assert traffic.peak == 400
    assert traffic.held == first.nbytes + second.nbytes


@pytest.mark.parametrize("implementation", ["torch", "eager"])
def test_counts_at_few_rows_tell_those_at_many(
    vocabulary: RankVocabulary, implementation: str
) -> None:
    objective = cases.OBJECTIVES[1]
    excerpt = replace(vocabulary, pair=vocabulary.pair.excerpt(16))
    bytes_at, _ = counting._recorded(objective, implementation, excerpt)
    recorded = counting.record(
        objective, implementation, excerpt.microbatch(80), counting.ONE_SLICE
    )
    assert bytes_at(80) == pytest.approx(recorded.moved, rel=1e-3)


def test_the_floors_are_those_of_the_published_shape() -> None:
    shape = Shape(
        student_rows=8192,
        teacher_rows=8192,
        student_columns=128_256,
        teacher_columns=151_936,
        chunks=8192,
        entries=153_451,
        direct_pairs=100_000,
        summed_columns=5_000,
    )
    once, twice = counted_bytes.floors(shape, 2, "logits")
    assert (round(once / 1e9, 1), round(twice / 1e9, 1)) == (6.7, 11.3)
    assert counted_bytes.floors(shape, 2, "none") == (4 * 8192 * 128_256, 6 * 8192 * 128_256)


def test_the_eager_recipe_is_the_published_loss(vocabulary: RankVocabulary) -> None:
    inputs = vocabulary.microbatch(24, dtype=torch.float32)
    objective = ProjectedKLLoss(numerics="nemo", vocab_topk=500)
    published, ours = [
        _value_and_gradient(loss, inputs)
        for loss in (
            lambda given: objective(given).loss_sum,
            lambda given: eager_recipe.eager_projected_kl(given, kept_columns=500),
        )
    ]
    torch.testing.assert_close(ours, published, rtol=1e-4, atol=1e-5)


def test_the_compiled_formula_is_the_loss(vocabulary: RankVocabulary) -> None:
    inputs = vocabulary.microbatch(24, dtype=torch.float32)
    of_formula = _value_and_gradient(cases.plain_projected_kl, inputs)
    of_op = _value_and_gradient(lambda given: ProjectedKLLoss()(given).loss_sum, inputs)
    torch.testing.assert_close(of_formula, of_op, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["vocab_kl", "next_token"])
def test_eager_losses_of_one_vocabulary_are_the_losses(
    vocabulary: RankVocabulary, name: str
) -> None:
    (objective,) = (one for one in cases.OBJECTIVES if one.name == name)
    inputs = same_vocabulary(vocabulary.microbatch(24, dtype=torch.float32))
    eager, ours = (
        _value_and_gradient(objective.loss(implementation), inputs)
        for implementation in ("eager", "torch")
    )
    torch.testing.assert_close(eager, ours, rtol=1e-4, atol=1e-5)


def test_a_pair_of_files_is_the_pair_that_was_saved(tmp_path: Path) -> None:
    name = "Llama 3.2 x Qwen 3"
    made = replace(pairs.synthetic_pair(*gate.SMALL, length=60), name=name)
    made.save(tmp_path)
    read = pairs.load_pair(name, tmp_path)
    assert read.source == "published"
    assert (read.projection, read.student_tokens) == (made.projection, made.student_tokens)
    assert np.array_equal(read.teacher_chunk, made.teacher_chunk)


def test_a_text_is_repeated_and_cut_between_chunks(vocabulary: RankVocabulary) -> None:
    pair = vocabulary.pair
    longer = pair.of_rows(len(pair.student_ids) + 57)
    assert len(longer.student_ids) == len(pair.student_ids) + 57
    for chunk in (longer.student_chunk, longer.teacher_chunk):
        assert np.array_equal(np.unique(chunk[chunk >= 0]), np.arange(60 + 56))
    assert longer.student_chunk[-1] == -1


def test_a_rank_has_its_share_of_both_vocabularies(vocabulary: RankVocabulary) -> None:
    rank = RankVocabulary.of(vocabulary.pair, 4)
    assert [shard.width for shard in rank.shards] == [384, 512]
    assert len(rank.match.common_student) == len(vocabulary.match.common_student) / 4
    inputs = rank.microbatch(24)
    for objective in cases.OBJECTIVES:
        given = same_vocabulary(inputs) if objective.same_vocabulary else inputs
        loss, gradient = _value_and_gradient(objective.loss("torch"), given)
        assert loss.isfinite()
        assert gradient.abs().max() > 0, objective.name


def test_a_wrong_kernel_ends_it_with_nothing_written(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def loss(self: object, implementation: str) -> object:
        factor = 1.1 if implementation == "triton" else 1.0
        return lambda given: factor * given.student_logits.float().square().sum()

    monkeypatch.setattr(sys.modules["loss_cost.cases"].Objective, "loss", loss)
    output = tmp_path / "counted.json"
    monkeypatch.setattr(sys, "argv", ["losses.py", "--counted", str(output)])
    assert script.main() == 1
    assert not output.exists()
    assert "WRONG" in capsys.readouterr().err


def test_times_are_refused_without_a_gpu(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["losses.py", "--output", str(tmp_path / "times.json")])
    with pytest.raises(SystemExit, match="2"):
        script.main()


def test_results_have_a_row_a_line(tmp_path: Path) -> None:
    from benchmarks.loss_cost.machine import write_results

    results = {"commit": "abc", "rows": [{"a": 1}, {"a": 2}], "not_run": []}
    write_results(tmp_path / "new" / "results.json", results)
    text = (tmp_path / "new" / "results.json").read_text()
    assert json.loads(text) == results
    assert len(text.splitlines()) == 8


def test_the_page_on_performance_is_current() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "generate_performance.py"))
    assert page["PAGE"].read_text(encoding="utf-8") == page["performance_page"](), (
        "run: python docs/generate_performance.py"
    )


def _value_and_gradient(
    loss: cases.Loss, inputs: DistillationInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    inputs.student_logits.grad = None
    value = loss(inputs)
    value.backward()
    gradient = inputs.student_logits.grad
    assert gradient is not None
    return value.detach(), gradient

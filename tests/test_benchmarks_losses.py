"""The benchmark of losses: what it counts, what it compares with, and when it says nothing."""

import importlib
import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.loss_cost import cases, counted_bytes, counting, eager_recipe, gate, heads, pairs
from benchmarks.loss_cost.heads import Heads
from benchmarks.loss_cost.microbatch import RankVocabulary, Shape, same_vocabulary
from benchmarks.loss_cost.traffic import Traffic
from megatron_ext.losses import ProjectedKLLoss, TeacherTargets

ROOT = Path(__file__).parents[1]
LOGITS = torch.ones(4, 8, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def vocabulary():
    return gate.small_vocabulary()


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("losses")
    yield module
    for name in [name for name in sys.modules if name.split(".")[0] in ("losses", "loss_cost")]:
        del sys.modules[name]


def test_an_operator_reads_its_tensors_and_writes_its_results():
    with Traffic() as traffic:
        wide = LOGITS.float()
        wide.view(8, 4).add_(torch.ones(4))
    assert (traffic.read, traffic.written) == (64 + 128 + 16, 128 + 16 + 128)


def test_picking_reads_what_is_picked():
    index = torch.zeros(4, 1, dtype=torch.int64)
    with Traffic() as traffic:
        LOGITS.gather(-1, index)
    assert (traffic.read, traffic.written) == (8 + 32, 8)


def test_a_broadcast_tensor_is_read_at_its_own_size():
    vector = torch.ones(8)
    with Traffic() as traffic:
        vector.expand(100, 8).sum()
    assert traffic.read == 32


def test_peak_is_what_lives_at_once():
    with Traffic() as traffic:
        for _ in range(3):
            held = torch.zeros(100)
            del held
        first, second = torch.zeros(50), torch.zeros(10)
    assert traffic.peak == 400
    assert traffic.held == first.nbytes + second.nbytes


@pytest.mark.parametrize("implementation", ["torch", "eager"])
def test_counts_at_few_rows_tell_those_at_many(vocabulary, implementation):
    objective = cases.OBJECTIVES[1]
    excerpt = replace(vocabulary, pair=vocabulary.pair.excerpt(counting.EXCERPT))
    bytes_at, _ = counting._recorded(objective, implementation, excerpt)
    recorded = counting.record(
        objective, implementation, excerpt.microbatch(84), counting.ONE_SLICE
    )
    assert bytes_at(84) == pytest.approx(recorded.moved, rel=1e-3)


def test_the_floors_are_those_of_the_published_shape():
    shape = Shape(
        student_rows=8192,
        teacher_rows=8192,
        student_columns=128_256,
        teacher_columns=151_936,
        chunks=8192,
        entries=153_451,
        direct_pairs=100_000,
        summed_columns=5_000,
        residual_rows=20_000,
        common=109_567,
        joined_rows=0,
    )
    once, twice = counted_bytes.floors(shape, 2, "logits")
    assert (round(once / 1e9, 1), round(twice / 1e9, 1)) == (6.7, 11.3)
    assert counted_bytes.floors(shape, 2, "none") == (4 * 8192 * 128_256, 6 * 8192 * 128_256)


def test_the_eager_recipe_is_the_published_loss(vocabulary):
    inputs = vocabulary.microbatch(24, dtype=torch.float32)
    objective = ProjectedKLLoss(numerics="nemo", vocab_topk=150)
    published, ours = [
        _value_and_gradient(loss, inputs)
        for loss in (
            lambda given: objective(given).loss_sum,
            lambda given: eager_recipe.eager_projected_kl(given, kept_columns=150),
        )
    ]
    torch.testing.assert_close(ours, published, rtol=1e-4, atol=1e-5)


def test_the_compiled_formula_is_the_loss(vocabulary):
    inputs = vocabulary.microbatch(24, dtype=torch.float32)
    of_formula = _value_and_gradient(cases.plain_projected_kl, inputs)
    of_op = _value_and_gradient(lambda given: ProjectedKLLoss()(given).loss_sum, inputs)
    torch.testing.assert_close(of_formula, of_op, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["vocab_kl", "next_token"])
def test_eager_losses_of_one_vocabulary_are_the_losses(vocabulary, name):
    (objective,) = (one for one in cases.OBJECTIVES if one.name == name)
    inputs = same_vocabulary(vocabulary.microbatch(24, dtype=torch.float32))
    eager, ours = (
        _value_and_gradient(objective.loss(implementation), inputs)
        for implementation in ("eager", "torch")
    )
    torch.testing.assert_close(eager, ours, rtol=1e-4, atol=1e-5)


def test_the_linear_form_is_the_loss_on_the_logits_of_the_heads(vocabulary):
    text = vocabulary.text(24)
    widths = [shard.width for shard in vocabulary.shards]
    columns = (widths[0], widths[1])
    given = Heads.random(text.lengths, columns, device="cpu", dtype=torch.float32, hidden=(16, 12))
    names = heads.TILED["projected_kl + next_token"]
    heads.linear_form(names, vocabulary, text, given, tile_rows=8)().backward()

    logits = given.student_hidden.detach() @ given.student_weight.detach().t()
    teacher = TeacherTargets(
        kind="logits",
        shard=vocabulary.shards[1],
        logits=(given.teacher_hidden @ given.teacher_weight.t())[None],
    )
    inputs = vocabulary.inputs(text, logits[None].requires_grad_(), teacher)
    _, gradient = _value_and_gradient(cases.OBJECTIVES[0].loss("torch"), inputs)
    expected = gradient[0] @ given.student_weight.detach()
    torch.testing.assert_close(given.student_hidden.grad, expected, rtol=1e-4, atol=1e-4)


def test_a_pair_of_files_is_the_pair_that_was_saved(tmp_path):
    name = "Llama 3.2 x Qwen 3"
    made = replace(pairs.synthetic_pair(*gate.SMALL, length=60), name=name)
    made.save(tmp_path)
    read = pairs.load_pair(name, tmp_path)
    assert read.source == "published"
    assert (read.projection, read.student_tokens) == (made.projection, made.student_tokens)
    assert np.array_equal(read.teacher_chunk, made.teacher_chunk)


def test_a_text_is_repeated_and_cut_between_chunks(vocabulary):
    pair = vocabulary.pair
    longer = pair.of_rows(len(pair.student_ids) + 7)
    assert len(longer.student_ids) == len(pair.student_ids) + 7
    for chunk in (longer.student_chunk, longer.teacher_chunk):
        assert np.array_equal(np.unique(chunk[chunk >= 0]), np.arange(60 + 6))
    assert longer.student_chunk[-1] == -1


def test_a_rank_has_its_share_of_both_vocabularies(vocabulary):
    rank = RankVocabulary.of(vocabulary.pair, 4)
    assert [shard.width for shard in rank.shards] == [128, 256]
    assert len(rank.match.common_student) == len(vocabulary.match.common_student) / 4
    inputs = rank.microbatch(24)
    for objective in cases.OBJECTIVES:
        given = same_vocabulary(inputs) if objective.same_vocabulary else inputs
        loss, gradient = _value_and_gradient(objective.loss("torch"), given)
        assert loss.isfinite()
        assert gradient.abs().max() > 0, objective.name


def test_a_wrong_kernel_ends_it_with_nothing_written(script, monkeypatch, tmp_path, capsys):
    def loss(self, implementation):
        factor = 1.1 if implementation == "triton" else 1.0
        return lambda given: factor * given.student_logits.float().square().sum()

    monkeypatch.setattr(sys.modules["loss_cost.cases"].Objective, "loss", loss)
    output = tmp_path / "counted.json"
    monkeypatch.setattr(sys, "argv", ["losses.py", "--counted", str(output)])
    assert script.main() == 1
    assert not output.exists()
    assert "WRONG" in capsys.readouterr().err


def test_everything_is_measured_that_can_be_and_the_rest_has_a_reason(
    script, monkeypatch, tmp_path, vocabulary
):
    timing = sys.modules["loss_cost.timing"].Timing

    def timed(run, *, clear, budget_ms):
        run()
        clear()
        return timing(ms_median=2.0, ms_min=1.0, ms_max=3.0, host_ms=1.5, repeats=3, peak_bytes=100)

    every = tuple(objective.name for objective in cases.OBJECTIVES)
    common = {"pair": script.QWEN, "ranks": 1, "rows": 12, "objectives": every}
    settings = [script.Setting(**common), script.Setting(**common, compiled=True)]
    for name, value in {
        "DEVICE": "cpu",
        "MAIN_LENGTH": 12,
        "TILES": (8,),
        "settings": lambda: settings,
        "timed": timed,
        "copy_bandwidth": lambda: 4e12,
        "load_pair": lambda name: replace(vocabulary.pair, name=name),
    }.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(torch, "compile", lambda loss, **options: loss)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    output = tmp_path / "losses.json"

    script.write_measured(output, [], seconds=600)

    results = json.loads(output.read_text())
    assert results["finished"]
    found = {(row["objective"], row["implementation"]) for row in results["rows"]}
    expected = {
        (objective.name, name)
        for objective in cases.OBJECTIVES
        for name in objective.implementations
        if not name.startswith("triton")
    }
    expected |= {("none", "bare products"), ("next_token", "linear form, tiles of 8")}
    assert found >= expected
    why = {row["implementation"]: row["why"] for row in results["not_run"]}
    assert {name for _, name in found} | set(why) >= {"triton", "triton, in place", "eager"}
    assert "liger" in why.get("liger, chunked", "liger")
    page = runpy.run_path(str(ROOT / "docs" / "generate_performance.py"))
    results["machine"]["gpu"] = {"name": "H", "multiprocessors": 1}
    text = "\n".join(page["_measured"](results))
    assert "| 2.00 |" in text
    assert "1.00 times the bare products" in text


def test_times_are_refused_without_a_gpu(script, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["losses.py", "--output", str(tmp_path / "times.json")])
    with pytest.raises(SystemExit, match="2"):
        script.main()


@pytest.mark.parametrize("gpu", [True, False], ids=["gpu", "no gpu"])
@pytest.mark.parametrize("status", [1, 0, 124], ids=["fail", "pass", "take too long"])
def test_one_command_tests_and_then_measures(script, monkeypatch, tmp_path, gpu, status):
    command = importlib.import_module("gpu")
    ran = []

    def run(*arguments, gpu, timeout=None, times_launches=True):
        ran.append(arguments)
        assert times_launches == (len(ran) == 2)
        return status if len(ran) == 1 else 0

    monkeypatch.setattr(command, "has_gpu", lambda: gpu)
    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--results", str(tmp_path)])
    assert command.main() == status
    assert ran[0][:2] == ("-m", "pytest")
    assert len(ran) == (1 if status == 1 else 2)
    if status != 1:
        written = "losses.json" if gpu else "losses_counted.json"
        option = "--output" if gpu else "--counted"
        assert ran[1][:3] == ("benchmarks/losses.py", option, str(tmp_path / written))


def test_a_child_that_takes_too_long_is_stopped(script):
    command = importlib.import_module("gpu")
    endless = ("-c", "import time; time.sleep(60)")
    assert command.run(*endless, gpu=False, timeout=0.1) == command.TIMED_OUT
    off = "import os; raise SystemExit(int(os.environ['MEGATRON_EXT_AUTOTUNE']) + 3)"
    assert command.run("-c", off, gpu=False, times_launches=False) == 3


def test_results_have_a_row_a_line(tmp_path):
    from benchmarks.loss_cost.machine import write_results

    results = {"commit": "abc", "rows": [{"a": 1}, {"a": 2}], "not_run": []}
    write_results(tmp_path / "new" / "results.json", results)
    text = (tmp_path / "new" / "results.json").read_text()
    assert json.loads(text) == results
    assert len(text.splitlines()) == 8


def _value_and_gradient(loss, inputs):
    inputs.student_logits.grad = None
    value = loss(inputs)
    value.backward()
    gradient = inputs.student_logits.grad
    return value.detach(), gradient

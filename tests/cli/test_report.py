"""``megatron-ext report``: runs as one page, whatever state they are in."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_ext.cli.main import main
from megatron_ext.cli.pages import frame, run_tables, token_view
from megatron_ext.cli.pages.chart import SIDE, Chart, Curve, means, smoothed
from megatron_ext.cli.pages.frame import element, swatch
from megatron_ext.training.faults import FaultCounts
from tests.cli.html_page import HtmlPage
from tests.cli.run_files import refusal
from tests.fork_server import run_python
from tests.training.tiny_run import vocabulary, write_rank_list

pytest.importorskip("mistral_common")

ASSETS = Path(frame.__file__).with_name("assets")
HOSTILE = "</script><script>alert('x')</script> \"onclick=\" & <img src=x onerror=alert(1)> naïve\n"
STEPS = 40


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        "tokenizer": {
            "library": "tiktoken",
            "model": str(write_rank_list(folder, 8001)),
            "tiktoken_num_special_tokens": 100,
            "vocab_size": 8001,
        },
        "teacher": {
            "library": "sentencepiece",
            "model": vocabulary("mistral_instruct_tokenizer_240323.model.v3"),
        },
    }


LOGGED = yaml.safe_load("""
{seconds: 2.0, seconds/data: 0.25, seconds/waiting: 0.125, seconds/teacher: 0.5,
 seconds/student: 1.0, memory_bytes: 3221225472, grad_norm: 1.5, tokens: 10, one_to_one: 6,
 one_to_many: 2, many_to_one: 0, many_to_many: 0, student_unaligned: 0, teacher_unaligned: 0,
 skipped_iterations: 0}
""")


def row(iteration, **more):
    kd = 4 / iteration
    changing = {"loss": 2 + 2 * kd, "ce": 2 + kd, "ce/accuracy": 0.25 + iteration / 1000, "kd": kd}
    changing |= {"tokens_per_second": 100.0 + iteration, "learning_rate": 1e-3 * iteration}
    return {"iteration": iteration, **LOGGED, **changing, **more}


def rows(count=STEPS, **more):
    found = [row(iteration, **more) for iteration in range(1, count + 1)]
    for one in found[9::10]:
        one |= {"student_bits_per_byte": 3.25, "teacher_bits_per_byte": 2.5}
        one |= {"agreement": one["loss"] / 8, "eval/mmlu/accuracy": one["loss"] / 16}
    return found


def write_run(folder, tokenizers, *, metrics=None, text=HOSTILE, **config):
    """A folder as a run leaves it; without metrics it has not begun."""
    folder.mkdir(parents=True)
    held_out = folder / "held-out.jsonl"
    held_out.write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
    values = {
        "run_dir": str(folder),
        "tokenizer": tokenizers["tokenizer"],
        "teacher": {"tokenizer": tokenizers["teacher"], "checkpoint": str(folder / "none")},
        "data": {"train": [], "validation": [str(held_out)], "text_key": "text"},
        "loss": {"objective": "projected_kl"},
        "optimizer": {"lr": 0.006},
        "training": {"train_iters": STEPS},
        **config,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    (folder / "data.json").write_text(json.dumps({"train": {"documents": 1234}}))
    if metrics is not None:
        lines = "".join(json.dumps(one) + "\n" for one in metrics)
        (folder / "metrics.jsonl").write_text(lines)
    return folder


class Page(HtmlPage):
    """Text of each section by its heading, and the paths that are drawn."""

    @property
    def paths(self):
        return [(one.get("class", ""), one["d"]) for tag, one in self.elements if tag == "path"]

    def section(self, heading):
        text = re.sub(r"\s+", " ", self.text)
        heads = ("In short", "Curves", "Rollouts", "Time", "Evaluation", "Data", "Configuration")
        heads = (*heads, "Texts")
        # The names stand in the navigation first.
        body = text[text.index("In short") :]
        begin = body.index(f" {heading} ") if heading != "In short" else 0
        later = [body.find(f" {head} ", begin + 1) for head in heads[heads.index(heading) + 1 :]]
        return body[begin : min([at for at in later if at > 0], default=len(body))]


def report(capsys, *words):
    main(["report", *map(str, words)])
    page = Path(capsys.readouterr().out.strip()).read_text(encoding="utf-8")
    # It is meant to be sent: the folders of the machine are not on it.
    assert str(Path(words[0]).parent) not in page
    return Page(page)


def refused(capsys, *words):
    error = refusal(capsys, "report", *words)
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("size", "words"),
    [(1023, "1,023 bytes"), (3 * 2**29, "1.5 GiB"), (999.6 * 2**20, "1,000 MiB"), (None, "–")],
)
def test_memory_has_three_digits_and_whole_numbers_in_full(size, words):
    assert token_view.memory(size) == words


def test_the_page_of_a_run_has_its_numbers_curves_settings_and_texts(capsys, tmp_path, tokenizers):
    run = write_run(tmp_path / "run", tokenizers, metrics=rows())
    (run / "evaluation").mkdir()
    (run / "evaluation" / "mmlu.json").write_text('{"accuracy": 0.375, "rows": [1, 2, 3]}')
    gsm8k = {"count": 8, "settings": {"limit": 8}, "metrics": {"flexible": 0.25}}
    (run / "evaluation" / "gsm8k.json").write_text(json.dumps(gsm8k))
    refused = "".join(
        json.dumps({"place": f"{run}/text.jsonl:{n}", "reason": "no text"}) + "\n"
        for n in range(12)
    )
    (run / "quarantine.jsonl").write_text(refused)
    page = report(capsys, run)
    assert (run / "report.html").exists()
    said = {
        "In short": (
            *("finished: 40 iterations", "trained tokens 400 ", "time of all steps 1.3 min"),
            *("tokens per second, median 120.5", "3 GiB"),
        ),
        "Curves": (
            *(" loss ", " ce ", " kd ", " grad_norm ", " learning_rate ", "ce/accuracy"),
            *(" student ", "bits per byte", " agreement ", " eval/mmlu/accuracy "),
            "Unchanged: tokens = 10, one_to_one = 6",
        ),
        "Time": ("waiting for samples: 5 s, 6.2%",),
        "Evaluation": (
            *("10 3.250 2.500", "mmlu.accuracy 0.375 mmlu.rows 3 Settings of these"),
            *("gsm8k.flexible 0.25 gsm8k.items 8", "evaluations key run gsm8k.settings.limit 8"),
        ),
        "Data": (
            *("train.documents 1,234", "one_to_one 75.0% one_to_many 25.0%"),
            "run left out: 12, the first place run/text.jsonl:0, reason no text",
        ),
        "Configuration": ("optimizer.lr 0.006",),
        "Texts": ("held-out.jsonl:1", "of the chunks are 1:1"),
    }
    for heading, parts in said.items():
        for part in parts:
            assert part in page.section(heading)
    # Of 2 s a step 1.75 are phases; waiting is a part of data.
    phases = r"data 10 s 12\.5%.*student 40 s 50\.0% other 10 s 12\.5%"
    assert re.search(phases, page.section("Time"))
    assert page.section("Data").count("no text") == 10


def completion(iteration, pieces, **more):
    """A line of ``rollouts.jsonl``; ``more`` by teacher in place of the only one's pieces."""
    of_teacher = {"bytes": 8, "student": 8 * math.log(2), "teacher": 16 * math.log(2)}
    return {
        "iteration": iteration,
        "prompt": "Say:",
        "completion": "".join(text for text, *_ in pieces) + "\N{REPLACEMENT CHARACTER}",
        "tokens": 9,
        "surprise": {"teacher": of_teacher | {"pieces": pieces, **more}},
    }


PIECES = [[" so", 1.0, 1.5], ["a", 1.0, 2.0], ["b", 3.0, 0.5], ["c", 1.0, 9.0], ["d", 1.0, None]]


def test_rollouts_have_curves_and_a_table_of_completions(capsys, tmp_path, tokenizers):
    logged = rows(20)
    for one in logged:
        one |= {"rollouts/stop_rate": one["iteration"] / 20, "rollouts/staleness": 0}
    run = write_run(tmp_path / "run", tokenizers, metrics=logged)
    lines = [completion(i, PIECES) for i in range(1, 101)]
    lines += [{**completion(101, []), "completion": "nothing", "surprise": None}]
    lines += [completion(102, PIECES, more_pieces=30)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "rollouts.jsonl").write_text(text, encoding="utf-8")
    page = report(capsys, run)
    section = page.section("Rollouts")
    assert "rollouts/stop_rate" in section
    assert "rollouts/staleness = 0" in section
    assert "rollouts" not in page.section("Curves")
    assert "step text tokens student, bits per byte teacher 1 Say: soabcd" in section
    # Sixteen steps, from the first to the last.
    table = section.split("Say:")[1:]
    assert len(table) == 16
    assert "soabcd … 30 more 9 1.000 2.000" in table[-1]
    # By how many times one is likelier than the other, which is 2, 10 and 100 for the levels.
    for style, texts in {"t1": "a", "s2": "b", "t3": "c", "unknown": "d"}.items():
        assert page.inside("bdi", style=style)[1:] == [texts] * 16
    assert page.inside("bdi", style="cut")[1:] == ["\N{REPLACEMENT CHARACTER}"] * 15
    titles = [one.get("title") for tag, one in page.elements if tag == "bdi"]
    assert "student 3 nats, teacher 0.5 nats" in titles


def test_completions_of_any_form_are_shown_as_far_as_they_can_be(capsys, tmp_path, tokenizers):
    run = write_run(tmp_path / "run", tokenizers, metrics=rows(3))
    odd = [
        {"iteration": 1, "prompt": HOSTILE, "completion": HOSTILE},
        {"iteration": 2, "surprise": {HOSTILE: {"pieces": [[HOSTILE, 1, 2], [1], "x"]}}},
        {"iteration": 3, "surprise": {"b": {"pieces": 3, "bytes": 0, "student": 1}}},
    ]
    text = "\n".join([*map(json.dumps, odd), '{"iteration": "4"}', "no json", ""])
    (run / "rollouts.jsonl").write_text(text, encoding="utf-8")
    page = report(capsys, run)
    assert "rollouts.jsonl: a line is not a completion" in page.text
    assert "<img" not in page.source
    # A table of each teacher; in both, the step whose completion nobody could compare.
    section = page.section("Rollouts")
    assert section.count("alert('x')") == 2 * 2 + 2
    assert section.count("student, bits per byte") == 2


def test_the_loss_of_each_teacher_is_a_line_of_the_loss_chart(capsys, tmp_path, tokenizers):
    teacher = {"tokenizer": tokenizers["teacher"], "checkpoint": "none"}
    logged = rows(**{"kd/first": 1.0, "kd/second": 2.0, "kd/first/teacher_entropy": 3.0})
    run = write_run(
        tmp_path / "run",
        tokenizers,
        metrics=logged,
        teacher=None,
        teachers={"first": teacher, "second": teacher},
    )
    page = report(capsys, run)
    loss = page.section("Curves").partition("Held-out")[0]
    assert "kd/first 1" in loss
    assert "kd/second 2" in loss
    assert "teacher_entropy" not in loss
    assert sum(kind == "smooth" for kind, _ in page.paths) >= 5
    texts = page.section("Texts")
    # The pairs are alike, and drawn once.
    assert "student and first" in texts
    assert "student and second" not in texts


def test_nothing_that_a_run_says_can_run_or_load_anything(capsys, tmp_path, tokenizers):
    name = "<b onload=x>"
    run = write_run(
        tmp_path / name,
        tokenizers,
        metrics=rows(**{HOSTILE: 1.0, f"kd/{HOSTILE}": 2.0}),
        teacher=None,
        teachers={HOSTILE: {"tokenizer": tokenizers["teacher"], "checkpoint": HOSTILE}},
        loss={"objective": HOSTILE},
    )
    (run / "data.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    (run / "evaluation").mkdir()
    (run / "evaluation" / "<i>.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    (run / "quarantine.jsonl").write_text(json.dumps({"reason": HOSTILE}) + "\n" + HOSTILE)
    pieces = [[HOSTILE, 1, 2.0, 0.5, [[HOSTILE, 50]], [[HOSTILE, 25], "x"]], [HOSTILE], 3]
    group = {"by": HOSTILE, "name": HOSTILE, "bytes": "x"}
    completion = {"prompt": HOSTILE, "student": HOSTILE, "teacher": 3}
    sampled = {"texts": [pieces, 1], "groups": [group, 1], "completions": [completion, 1]}
    kept = {"iteration": HOSTILE, "teachers": {HOSTILE: sampled, "odd": {"texts": 1}, "none": 3}}
    (run / "samples.json").write_text(json.dumps(kept))
    page = report(capsys, run)
    scripts = [one for tag, one in page.elements if tag == "script"]
    # The others are data.
    assert scripts.count({}) == 1
    assert {one.get("type", "application/json") for one in scripts} == {"application/json"}
    assert "<img" not in page.source
    assert "alert('x')" not in re.sub(r"<script[ >].*?</script>", "", page.source, flags=re.DOTALL)
    assert name in page.text
    # The text is there to be read, token by token.
    assert page.side(0) == page.side(1) == HOSTILE.replace("\n", "↵")


def test_several_runs_stand_over_and_beside_one_another(capsys, tmp_path, tokenizers):
    slow = write_run(tmp_path / "slow", tokenizers, metrics=rows())
    fast = write_run(tmp_path / "fast", tokenizers, metrics=rows(), optimizer={"lr": 0.05})
    output = tmp_path / "made" / "page.html"
    page = report(capsys, slow, fast, "--output", output)
    assert output.exists()
    assert not (slow / "report.html").exists()
    assert page.source.count('aria-label="loss over the iterations"') == 1
    loss = page.source.partition("<figcaption>loss<")[2].partition("</figure>")[0]
    assert "<bdi>slow</bdi>" in loss
    assert "<bdi>fast</bdi>" in loss
    assert loss.count('class="smooth"') == 2
    different = page.section("Configuration").partition("All keys")[0]
    assert "optimizer.lr 0.006 0.05" in different
    assert "data.validation slow/held-out.jsonl fast/held-out.jsonl" in different
    assert "train_iters" not in different
    assert "training.train_iters 40 40" in page.section("Configuration")


def test_runs_that_are_named_alike_are_told_apart_and_one_run_twice_is_refused(
    capsys, tmp_path, tokenizers
):
    runs = [write_run(tmp_path / name / "run", tokenizers, metrics=rows(3)) for name in "ab"]
    page = report(capsys, *runs, "--sample-bytes", "0")
    assert "a/run" in page.text
    assert "b/run" in page.text
    assert "named twice" in refused(capsys, runs[0], runs[0])


def test_a_run_that_has_not_begun_and_one_that_goes_on_are_shown_as_they_are(
    capsys, tmp_path, tokenizers
):
    waiting = write_run(tmp_path / "waiting", tokenizers)
    page = report(capsys, waiting)
    assert "no iteration of 40 was logged yet" in page.section("In short")
    assert "no metrics were logged" in page.section("Curves")
    assert "optimizer.lr" in page.section("Configuration")
    going = write_run(tmp_path / "going", tokenizers, metrics=rows(7))
    with (going / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 8, "lo')
    page = report(capsys, going)
    assert "at 7 of 40 iterations" in page.section("In short")
    assert "lines are not rows" not in page.text


def test_what_is_broken_is_said_and_the_rest_is_shown(capsys, tmp_path, tokenizers):
    run = write_run(tmp_path / "run", tokenizers)
    broken = ["no json", '"iteration"', '{"iteration": true}', "[" * 100_000, '{"loss": 1}']
    good = [json.dumps(one) for one in (*rows(3), row(2, loss=7.5), row(5, loss=math.nan))]
    huge = json.dumps(row(4, ce=10**400, kd=1e308, grad_norm=-1e308))
    (run / "metrics.jsonl").write_text("\n".join([*good, *broken, huge, ""]), encoding="utf-8")
    (run / "config.yaml").write_text("a: [1\n")
    (run / "data.json").write_bytes(b"\xff")
    page = report(capsys, run)
    assert "5 of 11 lines are not rows of metrics" in page.text
    assert "the first in line 6" in page.text
    assert "loss is not finite in 1 iterations, first in 5" in page.text
    assert "config.yaml cannot be read" in page.text
    assert "data.json cannot be read" in page.text
    assert "no configuration can be read" in page.section("Configuration").lower()
    assert "5 iterations" in page.section("In short")


def test_a_folder_without_a_run_is_refused_in_one_line(capsys, tmp_path, tokenizers):
    assert "there is no such run" in refused(capsys, tmp_path / "none")
    assert "holds no run" in refused(capsys, tmp_path)
    run = write_run(tmp_path / "run", tokenizers, metrics=rows(3))
    assert "the file cannot be written; got a folder" in refused(capsys, run, "--output", tmp_path)
    assert list(tmp_path.rglob(".*")) == []


def test_text_that_cannot_be_read_is_said_and_a_given_one_is_drawn(capsys, tmp_path, tokenizers):
    run = write_run(tmp_path / "run", tokenizers, metrics=rows(3))
    (run / "held-out.jsonl").unlink()
    assert "the text of the run cannot be read from here" in report(capsys, run).section("Texts")
    page = report(capsys, run, "--text", "Sold 201 of 2017.")
    assert "--text:1" in page.section("Texts")
    assert page.side(0) == page.side(1) == "Sold 201 of 2017."
    moved = {"tokenizer": {"model": "gone.model"}, "checkpoint": str(tmp_path / "gone")}
    other = write_run(tmp_path / "moved", tokenizers, metrics=rows(3), teacher=moved)
    assert "the tokenizer cannot be read from here" in report(capsys, other).section("Texts")


def test_a_long_run_makes_no_larger_a_page(capsys, tmp_path, tokenizers):
    run = write_run(tmp_path / "run", tokenizers, metrics=rows(5_000))
    page = report(capsys, run)
    assert len(page.source) < 300_000
    longest = max(d.count("L") for kind, d in page.paths if kind in ("raw", "smooth"))
    assert 300 < longest < 400


def test_the_page_of_a_real_run_has_all_that_it_logged(capsys, folder):
    page = report(capsys, folder / "teacher", "--output", folder / "report.html")
    logged = json.loads((folder / "teacher" / "metrics.jsonl").read_text().splitlines()[-1])
    numbers = [name for name, value in logged.items() if isinstance(value, int | float)]
    assert len(numbers) > 10
    for name in numbers:
        assert name == "iteration" or name.removeprefix("seconds/") in page.text


def test_neither_torch_nor_megatron_is_loaded(tmp_path, tokenizers):
    run = write_run(tmp_path / "run", tokenizers, metrics=rows(3))
    program = (
        "import sys; from megatron_ext.cli.main import main; "
        f"main(['report', {str(run)!r}]); "
        "sys.exit(bool({'torch', 'megatron'} & sys.modules.keys()))"
    )
    run_python(program)


def test_names_that_are_said_again_to_do_without_torch_are_those_of_the_trainer():
    assert set(run_tables.FAULTS) == set(FaultCounts().metrics())


def test_a_smoothed_line_does_not_lag_behind_and_stays_within_its_values():
    line = [(i, 5.0 - 0.1 * i) for i in range(20)]
    for weight in (0.0, 0.5, 0.99):
        assert smoothed(line, weight) == pytest.approx(np.array(line))
    noisy = [(i, float(i % 2)) for i in range(100)]
    values = [value for _, value in smoothed(noisy, 0.9)]
    assert all(0.4 < value < 0.6 for value in values[30:70])
    assert min(values) >= 0
    assert max(values) <= 1
    assert smoothed([(3, 7.0)]) == [(3, 7.0)]
    assert smoothed([]) == []


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=30), st.floats(0, 0.99))
def test_smoothing_is_the_weighted_regression_that_it_says(values, weight):
    scale = max(map(abs, values)) or 1.0
    y = np.array(values) / scale
    expected = []
    for i in range(len(y)):
        distance = np.arange(len(y)) - i
        w = np.float64(weight) ** np.abs(distance)
        s0, s1, s2 = w.sum(), (w * distance).sum(), (w * distance**2).sum()
        t0, t1 = (w * y).sum(), (w * y * distance).sum()
        determinant = s0 * s2 - s1 * s1
        flat = determinant <= 1e-12 * s0 * s2
        fit = t0 / s0 if flat else (s2 * t0 - s1 * t1) / determinant
        expected.append(min(max(fit, y.min()), y.max()))
    got = [value / scale for _, value in smoothed(list(enumerate(values)), weight)]
    # Sums of up to 30 terms in another order, over a determinant that may be 1e-12 of them.
    assert got == pytest.approx(expected, abs=1e-3)


def test_the_data_of_a_chart_says_each_curve_and_shared_iterations_once():
    points = [(1, 2.0), (2.5, 1 / 3)]
    curves = [Curve.of(name, points, most=9, number=0, run=run) for run, name in enumerate("ab")]
    data = Chart("x", [*curves, Curve.of("c", [(1, 1e9)], most=9, number=2)]).data
    assert [one.get("x") for one in data["curves"]] == [[1, 2.5], None, [1]]
    assert [one["y"] for one in data["curves"]] == [[2, 0.33333], [2, 0.33333], [1e9]]
    assert [one["run"] for one in data["curves"]] == [0, 1, 0]


def test_an_axis_of_shares_does_not_go_below_zero():
    chart = Chart("x", [Curve.of("x", [(1, 0.0), (2, 0.0)], most=9, number=0)])
    assert next(tick.label for tick in chart.y_ticks) == "0"


HELD_OUT = {"validation": {"sha256": "a" * 64}}


def write_measured(folder, tokenizers, bits, *, count=STEPS, data=HELD_OUT, **config):
    run = write_run(folder, tokenizers, metrics=rows(count, student_bits_per_byte=bits), **config)
    logged = [dict(one, student_bits_per_byte=bits) for one in rows(count)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in logged))
    (run / "data.json").write_text(json.dumps(data))
    return run


def test_the_headline_compares_with_the_teacher_and_with_a_run_without_one(
    capsys, tmp_path, tokenizers
):
    run = write_measured(tmp_path / "run", tokenizers, 2.75)
    alone = {"loss": {"objective": "next_token"}}
    base = write_measured(tmp_path / "base", tokenizers, 3.0, **alone)
    said = report(capsys, run, "--baseline", base).section("In short")
    assert "run: After 40 iterations the student has 2.750 bits per byte of held-out text" in said
    assert (
        "8.3% fewer than without a teacher: it closes 50% of the gap to its teacher (2.500)" in said
    )
    assert "student 2.750 bits per byte" in said
    assert "teachers teacher –" in said
    # The student that is behind, the text that is another one, and the run that is shorter.
    better = write_measured(tmp_path / "better", tokenizers, 2.625, **alone)
    said = report(capsys, run, base, better).section("In short")
    assert "4.8% more than without a teacher; its teacher has 2.500" in said
    other = write_measured(tmp_path / "other", tokenizers, 3.0, data={}, **alone)
    assert "than without" not in report(capsys, run, other).section("In short")
    short = write_measured(tmp_path / "short", tokenizers, 3.0, count=20, **alone)
    said = report(capsys, run, short).section("In short")
    assert "short was trained for 20 iterations, this run for 40" in said
    assert "its teacher 2.500" in report(capsys, run).section("In short")
    assert "So far, after 20 of 40 iterations" in report(capsys, short).section("In short")
    assert "learns from a teacher" in refused(capsys, base, "--baseline", run)


def test_a_run_without_held_out_text_has_its_loss_in_the_headline(capsys, tmp_path, tokenizers):
    run = write_run(tmp_path / "run", tokenizers, metrics=[row(i) for i in range(1, 41)])
    said = report(capsys, run).section("In short")
    assert "the loss went from 6.167 to 2.208" in said
    assert "Nothing was measured on held-out text" in said


def test_a_watched_page_reloads_itself_until_the_run_is_finished(
    capsys, tmp_path, tokenizers, monkeypatch
):
    run = write_run(tmp_path / "run", tokenizers, metrics=rows(7))
    seen = []

    def sleep(seconds):
        seen.append((seconds, (run / "report.html").read_text()))
        done = 20 * len(seen)
        lines = "".join(json.dumps(one) + "\n" for one in rows(done))
        (run / "metrics.jsonl").write_text(lines)

    monkeypatch.setattr("time.sleep", sleep)
    page = report(capsys, run, "--watch", "30")
    assert [seconds for seconds, _ in seen] == [30, 30]
    for _, source in seen:
        assert '<meta http-equiv="refresh" content="30">' in source
    assert "refresh" not in page.source.partition("<body>")[0]
    assert "finished: 40 iterations" in page.text
    assert "too small" in refused(capsys, run, "--watch", "0")


def test_many_points_are_means_of_their_neighbours():
    points = [(i, float(i)) for i in range(1000)]
    assert list(means(points, most=100))[:2] == [(4.5, 4.5), (14.5, 14.5)]
    assert list(means(points, most=1000)) == points
    assert list(means(points[:7], most=3)) == [(1, 1.0), (4, 4.0), (6, 6.0)]


@pytest.mark.parametrize(
    "values",
    [[1.0], [0.0, 0.0], [5.0, 5.0], [-1e308, 1e308], [1e-310, 2e-310], [1e9, 1e9 + 1e-7], [3, 1]],
    ids=str,
)
def test_any_finite_values_have_a_place_in_a_chart(values):
    curve = Curve.of("x", list(enumerate(values)), most=10, number=0)
    chart = Chart("x", [curve])
    (line,) = chart.lines
    numbers = [int(text) for text in re.findall(r"-?\d+", line.raw.removesuffix("h0"))]
    assert len(numbers) == 2 * len(values)
    assert all(0 <= number <= SIDE for number in numbers)
    assert all(0 <= tick.percent <= 100 for tick in (*chart.x_ticks, *chart.y_ticks))


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_colour_of_text_has_the_contrast_of_wcag_aa(theme):
    style = "".join((ASSETS / f"{name}.css").read_text() for name in ("frame", "alignment"))
    pairs = re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", style)
    colours = {name: both[theme == "dark"] for name, *both in pairs}
    tints = {name: name.partition("-")[0] for name in colours if "-tint" in name}
    texts = colours.keys() - {*tints, "paper", "card", "line"}
    assert len(tints) == 9
    assert len(texts) == 10
    grounds = [(text, ground) for text in texts for ground in ("paper", "card")]
    grounds += [pair for tint, hue in tints.items() for pair in ((hue, tint), ("ink", tint))]
    low = {pair: contrast(*(colours[name] for name in pair)) for pair in grounds}
    assert min(low.values()) >= 4.5, min(low.items(), key=lambda item: item[1])


@given(st.text(), st.text())
@example(f"&lt;{HOSTILE}", f"</b>{HOSTILE}")
def test_a_text_in_an_element_and_in_an_attribute_is_read_as_it_is(content, value):
    read = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: read.append((tag, attributes))
    parser.handle_endtag = read.append
    parser.handle_data = read.append
    parser.feed(element("b", element("i", content, {"title": value})))
    parser.close()
    data = [content] if content else []
    assert read == [("b", []), ("i", [("title", value)]), *data, "i", "b"]


def test_a_text_beside_a_colour_is_escaped():
    assert swatch("k1", HOSTILE).count("<") == 2

"""What runs on a GPU, run without one: see ``pretending.py``.

``MEGATRON_EXT_ALL_TEXT=1`` rehearses every objective and every kind of run, as ``make
rehearse-gpu`` does.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_ext.losses import LOSS_REGISTRY
from megatron_ext.losses.objective import FusedObjective
from tests.losses.objective_cases import CASES
from tests.process_group import run_ranks
from tests.rehearsal.guard import build_guard
from tests.rehearsal.rehearsed_runs import LAYOUT_RUNS, losses_on_cpu
from tests.rehearsal.rehearsed_verbs import VERBS, prepare_models, printed
from tests.training.tiny_run import write_corpus, write_rank_list

ALL = bool(os.environ.get("MEGATRON_EXT_ALL_TEXT"))
LOSSES = list(CASES) if ALL else ["partition_kl"]
RUNS = ["teacher", "alm"]
if ALL:
    RUNS += ["validated", "resumed", "distributed", "linear", "dskd", "learned", "packed"]
    RUNS += ["partition", "byte_prefix", "strict_topk"]
LAUNCHES = {
    "projected_kl": {"logits": 26, "tile": 35},
    "partition_kl": {"logits": 40, "tile": 42},
}
"""Most launches of a microbatch of logits beside cross-entropy, and of a tile of hidden states."""

if ALL:
    LAUNCHES |= {
        "hybrid_kl": {"logits": 38, "tile": 47},
        "uld": {"logits": 40, "tile": 49},
        "vocab_kl": {"logits": 35, "tile": 46},
        "alm": {"logits": 37, "tile": 46},
        "strict_topk": {"logits": 39, "tile": 48},
        "sampled_kl of samples": {"logits": 34},
    }
BY_TORCH = [
    name
    for name, case in CASES.items()
    if (ALL or name in ("partition_kl", "strict_topk"))
    and issubclass(LOSS_REGISTRY[case.name], FusedObjective)
]
"""Objectives that can be asked for torch alone."""

RANKS = (1, 2) if ALL else (2,)
"""Ranks of the runs, which are tensor-parallel; losses are rehearsed on one."""

RUNS_OF = {count: [*RUNS, *LAYOUT_RUNS] if ALL and count == 2 else RUNS for count in RANKS}
"""Two ranks also run what has a layout of its own."""

WAITING = {
    "uld by position": "model_rows.py",
}
"""Objectives that the host waits for once, and where."""


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    """What a process that believes in a GPU found."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ compiles the guard of a device that is not there")
    if torch.version.cuda is not None:
        pytest.skip("torch is built with CUDA: its own device would answer")
    folder = tmp_path_factory.mktemp("rehearsal")
    for ranks in RANKS:
        prepare(folder / str(ranks))
    if ALL:
        prepare_models(folder / "verbs")
    environment = os.environ | {"LD_PRELOAD": str(build_guard(folder)), "OMP_NUM_THREADS": "1"}
    request = json.dumps(
        {
            "losses": LOSSES,
            "microbatches": list(LAUNCHES),
            "torch": BY_TORCH,
            "runs": RUNS_OF,
            "verbs": ALL,
        }
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.rehearsal.rehearse", str(folder), request],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "answer.json").read_text())


def prepare(folder):
    """What runs read, in a folder of its own."""
    folder.mkdir()
    write_corpus(folder)
    write_rank_list(folder)


def runs_in(answer):
    """Name, number of ranks, and what each rank recorded of each run."""
    for count in RANKS:
        for of_rank in answer["runs"][str(count)]:
            yield from ((name, count, run) for name, run in of_rank.items())


def test_losses_and_their_gradients_are_those_of_the_cpu(answer):
    for name in LOSSES:
        for form in answer["losses"][name]:
            assert form["mismatches"] == []
            assert form["gradients"] >= 1
            # Sums in another order, in fp32.
            assert max(form["errors"]) < 1e-5, (name, form)


FIRST_STEP = (
    "rotary_pos_embedding.py",
    "shared_columns.py",
    "matched_columns.py",
    " leading_columns",
    " columns_until_last",
)
"""Where a process's first step waits or uploads: megatron-core for frequencies of positions, and
objectives for the tokens that both vocabularies have."""


def in_every_step(lines):
    """Lines but for those of ``FIRST_STEP``."""
    return [x for x in lines if not any(place in x for place in FIRST_STEP)]


def test_losses_upload_nothing_and_the_host_waits_for_two_at_most_once(answer):
    for name in LOSSES:
        for form in answer["losses"][name]:
            assert len(form["waits"]) == (name in WAITING), (name, form)
            assert all(WAITING[name] in wait for wait in form["waits"])
            assert form["uploads"] == [], (name, form)


def test_a_microbatch_launches_no_more_than_it_did(answer):
    for name, most in LAUNCHES.items():
        launched = answer["microbatches"][name]
        assert "logits" in launched, name
        assert all(launched[form] <= most[form] for form in launched), (name, launched)


def test_an_objective_by_torch_launches_no_kernel(answer):
    assert set(answer["torch"]) == set(BY_TORCH)
    for name, kernels in answer["torch"].items():
        assert kernels == [], name


def test_runs_end_and_no_tensor_of_the_host_meets_one_of_the_device(answer):
    for name, count, run in runs_in(answer):
        assert run["device"] == "cuda:0"
        assert run["mismatches"] == []
        assert run["steps"] == (2 if name in TWO_STEPS else 1), (name, count)


TWO_STEPS = ("validated", "pipeline", "context", "replicas", "replicas sharded")


@pytest.mark.parametrize("count", RANKS)
def test_losses_of_runs_are_those_of_as_many_ranks_on_a_cpu(answer, tmp_path, count):
    folder = tmp_path / "cpu"
    prepare(folder)
    truth = run_ranks(count, losses_on_cpu, folder, RUNS_OF[count], count)[0]
    for of_rank in answer["runs"][str(count)]:
        losses = {name: run["losses"] for name, run in of_rank.items()}
        for name in losses:
            # Means over tokens in bf16, which rounds to 4e-3.
            assert losses[name] == pytest.approx(truth[name], rel=1e-4), (name, count)
        # The third step alone, from the checkpoint after the second.
        for name, before in (("resumed", "validated"), ("pipeline resumed", "pipeline")):
            assert losses.get(name, [])[:2] == (losses[before] if name in losses else [])


def test_a_step_uploads_each_microbatch_once_and_the_host_waits_for_it_twice(answer):
    for name, count, run in runs_in(answer):
        if name in LAYOUT_RUNS:
            # Stages, replicas and experts wait for each other, too.
            continue
        last = run["last"]
        assert len(in_every_step(last["waits"])) == 2, (name, count, last)
        assert in_every_step(last["uploads"]) == [], (name, count, last)
        assert last["pinned"] == last["microbatches"], (name, count, last)


NUMBER = re.compile(r"\d+\.\d+")


@pytest.mark.skipif(not ALL, reason="verbs are rehearsed with MEGATRON_EXT_ALL_TEXT")
@pytest.mark.filterwarnings("ignore")
def test_verbs_that_read_models_print_what_they_print_on_a_cpu(answer, tmp_path):
    folder = tmp_path / "cpu"
    prepare_models(folder)
    for name in VERBS:
        truth, rehearsed = "\n".join(printed(folder, name)), answer["verbs"][name]
        assert rehearsed["mismatches"] == []
        lines = "\n".join(rehearsed["printed"])
        assert NUMBER.sub("", lines) == NUMBER.sub("", truth), (name, lines, truth)
        numbers = [list(map(float, NUMBER.findall(text))) for text in (lines, truth)]
        # Probes are in bf16 on a GPU.
        tolerance = 0.05 if name == "probe" else 1e-3
        assert numbers[0] == pytest.approx(numbers[1], rel=tolerance), (name, lines, truth)

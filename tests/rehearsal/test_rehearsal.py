"""What runs on a GPU, run without one: see ``pretending.py``.

``MEGATRON_EXT_ALL_TEXT=1`` rehearses every objective and every kind of run, as ``make
rehearse-gpu`` does.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.losses.objective_cases import CASES
from tests.rehearsal.guard import build_guard

ALL = bool(os.environ.get("MEGATRON_EXT_ALL_TEXT"))
LOSSES = list(CASES) if ALL else ["partition_kl"]
RUNS = ["teacher"]
if ALL:
    RUNS += [
        "strict_topk",
        "validated",
        "resumed",
        "distributed",
        "linear",
        "dskd",
        "learned",
        "packed",
    ]
    RUNS += ["partition"]

WAITING = {
    "projected_kl on the teacher's top tokens": "torch_evaluation.py",
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
    environment = os.environ | {"LD_PRELOAD": str(build_guard(folder)), "OMP_NUM_THREADS": "1"}
    request = json.dumps({"losses": LOSSES, "runs": RUNS})
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.rehearsal.rehearse", str(folder), request],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "answer.json").read_text())


def test_losses_and_their_gradients_are_those_of_the_cpu(answer):
    for name in LOSSES:
        for form in answer["losses"][name]:
            assert form["mismatches"] == []
            assert form["gradients"] >= 1
            # Sums in another order, in fp32.
            assert max(form["errors"]) < 1e-5, (name, form)


def uploads_of(lines):
    """Uploads but for megatron-core's of frequencies of positions, in a process's first step."""
    return [x for x in lines if "rotary_pos_embedding.py" not in x]


def test_losses_upload_nothing_and_the_host_waits_for_two_at_most_once(answer):
    for name in LOSSES:
        for form in answer["losses"][name]:
            assert len(form["waits"]) == (name in WAITING), (name, form)
            assert all(WAITING[name] in wait for wait in form["waits"])
            assert uploads_of(form["uploads"]) == [], (name, form)


def test_runs_end_and_no_tensor_of_the_host_meets_one_of_the_device(answer):
    for name in RUNS:
        run = answer["runs"][name]
        assert run["device"] == "cuda:0"
        assert run["mismatches"] == []
        assert all(math.isfinite(loss) for loss in run["losses"])
    if ALL:
        # The third step alone, from the checkpoint after the second.
        resumed = answer["runs"]["resumed"]
        assert resumed["steps"] == 1
        assert resumed["losses"][:2] == answer["runs"]["validated"]["losses"]


def test_a_step_uploads_each_microbatch_once_and_the_host_waits_for_it_twice(answer):
    for name in RUNS:
        last = answer["runs"][name]["last"]
        assert len(last["waits"]) == 2, (name, last)
        assert uploads_of(last["uploads"]) == [], (name, last)
        assert last["pinned"] == last["microbatches"], (name, last)

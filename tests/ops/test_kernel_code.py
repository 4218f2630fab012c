"""The machine code of kernels keeps the committed bounds: resources, loads, instructions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.machine_code import assembly, bounds, launches

triton = pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernel_code.py"
EVERYTHING = os.environ.get("MEGATRON_EXT_ALL_TEXT") == "1"
CHOSEN = [] if EVERYTHING else ["--core", "--arch", "90"]


def test_compiled_kernels_keep_their_bounds():
    version = triton.__version__.partition("+")[0]
    if version != bounds.TRITON:
        pytest.skip(f"the bounds are of the code of Triton {bounds.TRITON}; this is {version}")
    command = [sys.executable, SCRIPT, *CHOSEN]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 2 and "CANNOT" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert not done.returncode, done.stderr[-3000:]
    for reports in json.loads(done.stdout).values():
        assert set(launches.CORE) <= set(reports)


def test_bounds_are_those_of_launches():
    names = {launch.name for launch in launches.launches()}
    assert set(bounds.BOUNDS) <= names
    # The sweeps have a bound on the one that is launched first.
    assert {name for name in names if not name.startswith("sweep")} <= set(bounds.BOUNDS)
    assert set(launches.CORE) <= set(bounds.BOUNDS)


def test_a_broken_bound_is_named():
    name = "row_statistics_kernel plain 4096x8"
    kept = {"instructions_a_column": 9.8, "occupancy": 0.75}
    assert not bounds.broken(name, kept)
    said = bounds.broken(name, kept | {"instructions_a_column": 27.0, "occupancy": 0.12})
    assert [text.partition(" is ")[0].split()[-1] for text in said] == [
        "instructions_a_column",
        "occupancy",
    ]


def _listing(*texts):
    return [(16 * place, text) for place, text in enumerate(texts)]


def test_a_loop_with_wide_loads_is_taken_for_that_over_columns():
    body = ["LDG.E.128 R4, [R2]", "FADD R4, R4, R5", "BRA 0x10", "NOP", "BRA 0x50"]
    listing = _listing("MOV R1, R2", *body)
    assert [(loop.instructions, loop.wide_loads) for loop in assembly.loops(listing)] == [(3, 1)]
    assert assembly.counted(listing, 2)["instructions_a_column"] == 1.5


def test_passes_are_the_loops_that_load_ahead_or_those_over_blocks_of_rows():
    ahead = ["LDGSTS.E.BYPASS.128 [R1], [R2]", "BRA 0x0", "LDG.E.128 R4, [R2]", "NOP", "BRA 0x20"]
    assert assembly.counted(_listing(*ahead), 1)["passes"] == [2]
    rows = ["FADD R1, R1, R2", "LDG.E.128 R4, [R2]", "BRA 0x10", "BRA 0x0", "BRA 0x0"]
    assert assembly.counted(_listing(*rows), 1)["passes"] == [4]
    assert assembly.counted(_listing("NOP", "NOP"), 1)["counted"] == "whole code"


@pytest.mark.parametrize(
    ("registers", "warps", "shared", "share"),
    [(48, 8, 64, 0.625), (32, 8, 0, 1.0), (168, 4, 16, 0.1875), (40, 8, 131072, 0.125)],
)
def test_occupancy_is_that_of_the_scarcest_resource(registers, warps, shared, share):
    assert assembly.occupancy(90, registers, warps, shared) == share

"""The machine code of kernels keeps the committed bounds: resources, loads, instructions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.machine_code import assembly, bounds, launches

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernel_code.py"
EVERYTHING = os.environ.get("MEGATRON_EXT_ALL_TEXT") == "1"
CHOSEN = [] if EVERYTHING else ["--core", "--arch", "90"]


def test_compiled_kernels_keep_their_bounds():
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


def test_only_a_loop_with_wide_loads_is_taken_for_that_over_columns():
    body = ["LDG.E.128 R4, [R2]", "FADD R4, R4, R5", "BRA 0x10", "NOP", "BRA 0x50"]
    listing = [(16 * place, text) for place, text in enumerate(["MOV R1, R2", *body])]
    assert assembly.loops(listing) == [assembly.Loop(3, 1, False)]
    assert assembly.counted(listing, 2)["instructions_a_column"] == 1.5


@pytest.mark.parametrize(
    ("registers", "warps", "shared", "share"),
    [(48, 8, 64, 0.625), (32, 8, 0, 1.0), (168, 4, 16, 0.1875), (40, 8, 131072, 0.125)],
)
def test_occupancy_is_that_of_the_scarcest_resource(registers, warps, shared, share):
    assert assembly.occupancy(90, registers, warps, shared) == share

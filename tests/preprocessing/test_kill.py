"""A run that is killed anywhere is taken up, and its output is that of one that was not."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.preprocessing.runs import write_json_lines

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_run_killed_before_any_of_its_changes_on_the_disk_goes_on(tmp_path):
    (tmp_path / "data").mkdir()
    records = [{"text": f"text {i}"} for i in range(30)]
    write_json_lines(tmp_path / "data" / "a.jsonl", [*records, {"title": "no text"}])
    finished = subprocess.run(
        [sys.executable, "-m", "tests.preprocessing.kill_points", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    # Two shards, a plan, a report and the output itself.
    assert int(finished.stdout) > 20

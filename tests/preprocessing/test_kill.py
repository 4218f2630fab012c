"""A run that is killed anywhere is taken up, and its output is that of one that was not."""

import sys

import pytest

from tests.fork_server import run_forked
from tests.preprocessing.kill_points import kill_everywhere
from tests.preprocessing.runs import write_json_lines


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_run_killed_before_any_of_its_changes_on_the_disk_goes_on(tmp_path):
    (tmp_path / "data").mkdir()
    records = [{"text": f"text {i}"} for i in range(30)]
    write_json_lines(tmp_path / "data" / "a.jsonl", [*records, {"title": "no text"}])
    code, changes, errors = run_forked(tmp_path, kill_everywhere, tmp_path)
    assert code == 0, errors[-3000:]
    # Two shards, a plan, a report and the output itself.
    assert int(changes) > 20

"""Documents that a run left out, each with its place and the reason: ``quarantine.jsonl``."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_ext.data.packed_dataset import RefusedDocument
from megatron_ext.files import whole_lines, write_bytes
from megatron_ext.training.run_folder import QUARANTINE_FILE


def log_refused(run_dir: Path, document: RefusedDocument, *, iteration: int) -> None:
    """Append a line; ranks append to one file, each line in one write."""
    line = json.dumps({"iteration": iteration, **document._asdict()}, ensure_ascii=False)
    with (run_dir / QUARANTINE_FILE).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def forget_refused(run_dir: Path, *, last_iteration: int) -> None:
    """Drop the lines of later iterations, and a line cut short: a resumed run does them again."""
    path = run_dir / QUARANTINE_FILE
    lines = whole_lines(path)
    kept = [line for line in lines if json.loads(line)["iteration"] <= last_iteration]
    content = b"".join(line + b"\n" for line in kept)
    if path.exists() and content != path.read_bytes():
        write_bytes(path, content)

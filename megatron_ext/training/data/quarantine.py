"""Documents that a run left out, each with its place and the reason: ``quarantine.jsonl``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from megatron_ext.atomic_file import write_text
from megatron_ext.data.packed_dataset import RefusedDocument

QUARANTINE_FILE: Final = "quarantine.jsonl"


def log_refused(run_dir: Path, document: RefusedDocument, *, iteration: int) -> None:
    """Append a line; ranks append to one file, each line in one write."""
    line = json.dumps({"iteration": iteration, **document._asdict()}, ensure_ascii=False)
    with (run_dir / QUARANTINE_FILE).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def forget_refused(run_dir: Path, *, last_iteration: int) -> None:
    """Drop the lines of later iterations, and a line cut short: a resumed run does them again."""
    path = run_dir / QUARANTINE_FILE
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    kept = [line for line in whole if json.loads(line)["iteration"] <= last_iteration]
    if kept != lines:
        write_text(path, "".join(kept))

"""Kill a run at random moments and compare it with the run that nothing interrupts.

    python benchmarks/kill_run.py --config run.yaml --kills 20 --output kills.json

The run of the configuration is made twice, beside its ``run_dir``: once through, and once killed
with SIGKILL again and again and started again each time, about half of the times inside a save, in
turn with and without ``training.async_save``; the whole process group is killed, or the main
process alone, whose writers then live on. After each kill, and at the end, every metric of every
iteration but times and memory must be bitwise that of the first run, every checkpoint must be
whole, and ``latest`` must name one. Exits with 1 where that is not so.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_ext.training.configuration.config import DistillConfig
from megatron_ext.training.configuration.yaml_file import read_config_file
from megatron_ext.training.metrics import read_metrics
from megatron_ext.typed_mapping import build_config

_CONTEXT = multiprocessing.get_context("forkserver")
_START_LIMIT_S = 600
_OF_THE_MACHINE = ("seconds", "tokens_per_second", "memory_bytes")


def main() -> None:
    """The two runs, a line for each kill, and what was found."""
    arguments = _arguments()
    config = build_config(DistillConfig, *read_config_file(Path(arguments.config)))
    draw = random.Random(arguments.seed)
    # Imported once: that takes longer than a start from there.
    _CONTEXT.set_forkserver_preload(["megatron_ext.training.distill"])
    whole = _renamed(config, "whole", is_async=False)
    process = _start(whole)
    process.join()
    if process.exitcode:
        sys.exit("the run that nothing interrupts has failed")
    expected = read_metrics(Path(whole.run_dir))
    kills = [
        _kill_once(_renamed(config, "killed", is_async=bool(number % 2)), number, draw, expected)
        for number in range(1, arguments.kills + 1)
    ]
    last = _renamed(config, "killed", is_async=True)
    process = _start(last)
    process.join()
    found = read_metrics(Path(last.run_dir))
    result = {
        "kills": kills,
        "inside_a_save": sum(kill["inside_a_save"] for kill in kills),
        "iterations": len(found),
        "exit_code": process.exitcode,
        "different_iterations": _differing(found, expected),
        "missing_iterations": len(expected) - len(found),
    }
    print(json.dumps({name: value for name, value in result.items() if name != "kills"}))
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    bad = [kill for kill in kills if kill["different_iterations"] or kill["broken"]]
    if bad or result["different_iterations"] or result["missing_iterations"] or process.exitcode:
        sys.exit(1)


def _kill_once(
    config: DistillConfig, number: int, draw: random.Random, expected: list[dict[str, Any]]
) -> dict[str, Any]:
    """Start the run, kill it, and look at what it has left."""
    run, checkpoints = Path(config.run_dir), Path(config.run_dir) / "checkpoints"
    wants_save = draw.random() < 0.5
    alone = draw.random() < 0.5
    interval = config.training.save_interval
    limit = _rows(run) + draw.randrange(2 * interval)
    leftovers = set(checkpoints.glob(".iter_*.partial"))
    process = _start(config)
    deadline = time.monotonic() + _START_LIMIT_S
    while process.is_alive() and time.monotonic() < deadline:
        if wants_save and set(checkpoints.glob(".iter_*.partial")) - leftovers:
            time.sleep(draw.uniform(0.0, 0.15))
            break
        if not wants_save and _rows(run) >= limit:
            time.sleep(draw.uniform(0.0, 0.3))
            break
        time.sleep(0.001)
    was_alive = process.is_alive()
    with suppress(ProcessLookupError):
        (os.kill if alone else os.killpg)(process.pid, signal.SIGKILL)
    process.join()
    broken = _broken(checkpoints)
    kill = {
        "number": number,
        "async_save": config.training.async_save,
        "main_process_alone": alone,
        "was_running": was_alive,
        "inside_a_save": bool(set(checkpoints.glob(".iter_*.partial")) - leftovers),
        "iterations_logged": _rows(run),
        "latest": _latest(checkpoints),
        "different_iterations": _differing(read_metrics(run), expected),
        "broken": broken,
    }
    print(json.dumps(kill), flush=True)
    return kill


def _start(config: DistillConfig) -> Any:
    process = _CONTEXT.Process(target=_run, args=(config,))
    process.start()
    return process


def _run(config: DistillConfig) -> None:
    os.setsid()
    from megatron_ext.training.distill import distill
    from megatron_ext.training.inputs import read_inputs

    with Path(config.run_dir + ".log").open("a", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    distill(config, read_inputs(config, world_size=1))


def _renamed(config: DistillConfig, name: str, *, is_async: bool) -> DistillConfig:
    training = dataclasses.replace(config.training, async_save=is_async)
    run_dir = str(Path(config.run_dir).with_name(f"{Path(config.run_dir).name}-{name}"))
    return dataclasses.replace(config, run_dir=run_dir, training=training)


def _rows(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _latest(checkpoints: Path) -> str | None:
    path = checkpoints / "latest"
    return path.read_text(encoding="utf-8").strip() if path.exists() else None


def _broken(checkpoints: Path) -> list[str]:
    """Checkpoints that lack what is written last, and a ``latest`` that names none."""
    present = [path for path in checkpoints.glob("iter_*") if path.is_dir()]
    needed = ("common.pt", ".metadata", "metadata.json", "tokenizer")
    broken = [
        f"{path.name} lacks {name}"
        for path, name in itertools.product(present, needed)
        if not (path / name).exists()
    ]
    latest = _latest(checkpoints)
    if latest is not None and not (checkpoints / latest).is_dir():
        broken.append(f"latest names {latest}")
    return broken


def _differing(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> list[int]:
    """Iterations that are not, in this order, bitwise those of the other run."""
    return [
        there["iteration"]
        for here, there in zip(found, expected, strict=False)
        if _repeatable(here) != _repeatable(there)
    ]


def _repeatable(row: dict[str, Any]) -> dict[str, Any]:
    """What a row says of the run, and not of the machine."""
    return {name: value for name, value in row.items() if not name.startswith(_OF_THE_MACHINE)}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", required=True, help="a run, which is made beside its run_dir")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", help="JSON with a record of every kill")
    return parser.parse_args()


if __name__ == "__main__":
    main()

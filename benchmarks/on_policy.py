"""On-policy distillation after off-policy, against off-policy alone, on a task with exact answers.

    python -m benchmarks.on_policy --output benchmarks/results/on_policy.json

The task is to sort words: behind ``yield class import:`` stands `` class import yield`` and the end
of the text. A teacher with SentencePiece's tokens learns it from many problems, a smaller student
with the first 3,900 of Tekken's tokens is distilled from it on few. From there on one student goes
on with the recorded texts, one samples every text itself (``data.rollouts``), one half of them from
the same prompts, and one half of them from other prompts, of which nobody gives an answer. Each
begins from the same weights and takes as many steps of as many rows; the tokens that it trains are
counted. What they write for problems that nobody has seen is measured: the share of exact answers
and of those that end by themselves, at checkpoints along the way.
"""

from __future__ import annotations

import argparse
import json
import keyword
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks.loss_cost.machine import commit, machine, write_results

_WORDS: Final = sorted(keyword.kwlist, key=str.lower)
_SEQ: Final = 96
_STUDENT_IDS: Final = 4000
_ROWS: Final = 16
_BRANCHES: Final = {
    "off-policy": (None, "student"),
    "mixed": (0.5, "student"),
    "on-policy": (1.0, "student"),
    "mixed, more prompts": (0.5, "more"),
}
"""Share of rows that the student samples, and the problems whose prompts it gets."""

_GROUPS: Final[list[Any]] = []
"""Process groups of this process, once there are any."""


def problem(draw: random.Random) -> tuple[str, str]:
    """A prompt and its answer."""
    words = draw.sample(_WORDS, draw.randint(3, 5))
    return " ".join(words) + ":", " " + " ".join(sorted(words, key=_WORDS.index))


def write_problems(folder: Path, counts: Mapping[str, int], seed: int) -> None:
    """Texts and prompts as JSON lines, no problem twice."""
    draw, seen = random.Random(seed), set[str]()
    for name, count in counts.items():
        pairs = []
        while len(pairs) < count:
            prompt, answer = problem(draw)
            if prompt not in seen:
                seen.add(prompt)
                pairs.append((prompt, answer))
        for kind, texts in (("text", [p + a for p, a in pairs]), ("prompt", [p for p, _ in pairs])):
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            (folder / f"{name}.{kind}.jsonl").write_text(lines)
        (folder / f"{name}.json").write_text(json.dumps(pairs))


def write_ranks(path: Path) -> None:
    """The head of Tekken's vocabulary as Megatron's JSON rank list."""
    whole = json.loads((resources.files("mistral_common") / "data/tekken_240911.json").read_text())
    path.write_text(json.dumps(whole["vocab"][: _STUDENT_IDS - 100]))


def model(layers: int, width: int) -> dict[str, Any]:
    """A section of a model."""
    return {
        "num_layers": layers,
        "hidden_size": width,
        "num_attention_heads": 4,
        "ffn_hidden_size": 3 * width,
        "seq_length": _SEQ,
        "untie_embeddings_and_output_weights": True,
        "init_method_std": 0.05,
    }


def train(root: Path, name: str, config: Mapping[str, Any]) -> Path:
    """Train a run, unless it is there."""
    run_dir = root / name
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"run_dir": str(run_dir), **config}))
    subprocess.run(
        [sys.executable, "-m", "megatron_ext", "distill", "--config", str(path)],
        check=True,
        stdout=(root / f"{name}.log").open("w"),
        stderr=subprocess.STDOUT,
    )
    return run_dir


def training(steps: int, seed: int, saves: int) -> dict[str, Any]:
    """A section of training."""
    return {
        "train_iters": steps,
        "micro_batch_size": _ROWS,
        "global_batch_size": _ROWS,
        "seed": seed,
        "save_interval": max(steps // saves, 1),
        "keep_checkpoints": saves + 1,
        "variable_seq_lengths": True,
        "seq_length_multiple": 8,
    }


def teacher_of(root: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The section of a teacher that has learnt the task."""
    vocabulary = resources.files("mistral_common") / "data"
    tokenizer = {
        "library": "sentencepiece",
        "model": str(vocabulary / "mistral_instruct_tokenizer_240323.model.v3"),
    }
    run = train(
        root,
        "teacher",
        {
            "tokenizer": tokenizer,
            "student": model(2, 128),
            "data": {"train": [str(root / "teacher.text.jsonl")]},
            "loss": {"objective": "next_token"},
            "optimizer": {"lr": 2e-3, "lr_warmup_iters": 20, "lr_decay_style": "cosine"},
            "training": training(arguments.teacher_steps, 1, 1),
        },
    )
    return {"tokenizer": tokenizer, "checkpoint": str(run), "model": model(2, 128)}


def student_config(root: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """What all students have in common."""
    return {
        "tokenizer": {
            "library": "tiktoken",
            "model": str(root / "ranks.json"),
            "tiktoken_num_special_tokens": 100,
            "vocab_size": _STUDENT_IDS,
        },
        "student": model(3, 96),
        "teacher": teacher_of(root, arguments),
        "loss": {
            "objective": arguments.objective,
            "options": json.loads(arguments.options),
            "ce_weight": 1.0,
        },
    }


def measured(
    checkpoints: Sequence[Path], pairs: Sequence[tuple[str, str]], rows: int = 64
) -> list[dict[str, float]]:
    """Share of exact answers, and of those that end by themselves, for each checkpoint."""
    from megatron_ext.evaluation.language_model import GenerationOptions, prompt_ids
    from megatron_ext.evaluation.megatron_language_model import (
        ModelOptions,
        groups_for,
        load_mixture,
        open_model,
    )

    found = []
    options_of_models = ModelOptions(precision="fp32", micro_batch_size=rows)
    if not _GROUPS:
        _GROUPS.append(groups_for(options_of_models))
    for checkpoint in checkpoints:
        opened = open_model(checkpoint, options_of_models)
        language_model = load_mixture([opened], options_of_models, _GROUPS[0])
        options = GenerationOptions(max_new_tokens=48)
        ids = [prompt_ids(prompt, language_model) for prompt, _ in pairs]
        ends = language_model.ends()
        answers = language_model.generator.generate(
            ids, options, places=range(len(ids)), is_done=lambda new, ends=ends: bool(ends & {*new})
        )
        stops = [next((n for n, i in enumerate(a.ids) if i in ends), None) for a in answers]
        texts = [
            language_model.tokenizer.detokenize(answer.ids[:stop])
            for answer, stop in zip(answers, stops, strict=True)
        ]
        exact = [
            stop is not None and text.split() == answer.split()
            for (_, answer), text, stop in zip(pairs, texts, stops, strict=True)
        ]
        found.append(
            {
                "exact": sum(exact) / len(pairs),
                "stopped": sum(stop is not None for stop in stops) / len(pairs),
            }
        )
    return found


def tokens_until(run: Path) -> dict[int, int]:
    """Trained tokens up to each iteration."""
    total, sums = 0, {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        total += row["tokens"]
        sums[row["iteration"]] = total
    return sums


def curve(run: Path, pairs: Sequence[tuple[str, str]]) -> list[dict[str, float]]:
    """Measurements of a run's checkpoints, by trained tokens."""
    tokens = tokens_until(run)
    places = {int(path.name.removeprefix("iter_")): path for path in run.glob("checkpoints/iter_*")}
    rows = measured([places[n] for n in sorted(places)], pairs)
    return [
        {"iteration": n, "tokens": tokens[n], **row}
        for n, row in zip(sorted(places), rows, strict=True)
    ]


def compare(root: Path, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The branches of one seed, from one student that learnt off-policy."""
    base = student_config(root, arguments)
    recorded = {"train": [str(root / "student.text.jsonl")]}
    optimizer = {"lr": 2e-3, "lr_warmup_iters": 10, "lr_decay_style": "constant"}
    first = train(
        root,
        f"first-{seed}",
        {
            **base,
            "data": recorded,
            "optimizer": optimizer,
            "training": training(arguments.first_steps, seed, 1),
        },
    )
    pairs = json.loads((root / "test.json").read_text())[: arguments.problems]
    result: dict[str, Any] = {"first": curve(first, pairs)[-1]}
    for name, (share, prompts) in _BRANCHES.items():
        rollouts = {
            "prompts": [str(root / f"{prompts}.prompt.jsonl")],
            "max_new_tokens": 48,
            "micro_batch_size": _ROWS,
            "share": share,
        }
        run = train(
            root,
            f"{name.replace(', ', '-').replace(' ', '-')}-{seed}",
            {
                **base,
                "initial_checkpoint": str(first),
                "data": {**recorded, **({"rollouts": rollouts} if share else {})},
                "optimizer": {**optimizer, "lr": 5e-4},
                "training": training(arguments.steps, seed, arguments.points),
            },
        )
        result[name] = {
            "curve": curve(run, pairs),
            "last_rollouts": last_rollouts(run),
            "seconds": seconds_of(run),
        }
    return result


def last_rollouts(run: Path) -> dict[str, float]:
    """Metrics of the samples of the last step."""
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return {name: value for name, value in row.items() if name.startswith("rollouts/")}


def seconds_of(run: Path) -> dict[str, float]:
    """Mean seconds of each phase of a step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][1:]
    names = {name for row in rows for name in row if name.startswith("seconds")}
    return {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in sorted(names)}


def draw(results: Mapping[str, Any], path: Path) -> None:
    """A picture of the share of exact answers by trained tokens, one line a branch and seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for seed, found in results["seeds"].items():
        for number, name in enumerate(_BRANCHES):
            points = [{**found["first"], "tokens": 0}, *found[name]["curve"]]
            axes.plot(
                [point["tokens"] / 1000 for point in points],
                [point["exact"] for point in points],
                color=f"C{number}",
                marker="o",
                markersize=3,
                label=name if seed == min(results["seeds"]) else None,
            )
    axes.set_xlabel("thousands of trained tokens behind the common start")
    axes.set_ylabel("exact answers")
    axes.set_ylim(0, 1)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train and measure, and write the raw numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the runs stay, and go on when cut off")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--objective", default="partition_kl")
    parser.add_argument("--options", default="{}", help="of the objective, as JSON")
    parser.add_argument("--teacher-problems", type=int, default=20000)
    parser.add_argument("--teacher-steps", type=int, default=400)
    parser.add_argument("--student-problems", type=int, default=500)
    parser.add_argument(
        "--more-prompts", type=int, default=5000, help="prompts without answers, of one branch"
    )
    parser.add_argument("--first-steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=400, help="steps of each branch")
    parser.add_argument("--points", type=int, default=5, help="checkpoints of each branch")
    parser.add_argument("--problems", type=int, default=300, help="problems of a measurement")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = arguments.folder or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        counts = {
            "test": arguments.problems,
            "student": arguments.student_problems,
            "teacher": arguments.teacher_problems,
            "more": arguments.more_prompts,
        }
        write_problems(root, counts, 0)
        write_ranks(root / "ranks.json")
        found = {str(seed): compare(root, seed, arguments) for seed in arguments.seeds}
        pairs = json.loads((root / "test.json").read_text())[: arguments.problems]
        teacher = curve(root / "teacher", pairs)[-1]
    results = {
        "commit": commit(),
        "machine": machine(),
        "setting": {
            k: v for k, v in vars(arguments).items() if k not in ("folder", "output", "picture")
        },
        "teacher": teacher,
        "seeds": found,
    }
    print(json.dumps({key: results[key] for key in ("teacher", "seeds")}, indent=2))
    if arguments.output is not None:
        write_results(arguments.output, results)
    if arguments.picture is not None:
        draw(results, arguments.picture)


if __name__ == "__main__":
    main()

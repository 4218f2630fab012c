"""Compare every objective on several pairs of vocabularies, which ``megatron-ext align`` rests on.

    MEGATRON_EXT_SHARED=DIR python examples/compare_objectives/pairs.py

``DIR`` holds published vocabularies and corpora, as the tests use them. It may be stopped at any
time: the same command goes on, and ``--measure`` writes the results of what is finished.
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from run import OBJECTIVES, Pair, machine

from megatron_ext.alignment.audit import AuditDocument, PairAudit
from megatron_ext.files import write_text
from megatron_ext.tokenizers import MegatronTokenizer

SHARED = Path(os.environ.get("MEGATRON_EXT_SHARED") or "shared")
_GSM8K = {"data": ["gsm8k/train.jsonl"], "text_keys": ("question", "answer")}
_WAGAHAI = {"data": ["wagahai/wagahaiwa_nekodearu.txt"]}
_CODE = {"data": [f"python_code/{name}.py.txt" for name in ("argparse", "ast", "typing")]}

PAIRS: dict[str, dict[str, Any]] = {
    "near": {"student": ("cl100k", 2048), "teacher": ("o200k", 2048), **_GSM8K},
    "numbers": {"student": ("r50k", 2048), "teacher": ("tekken", 2048), **_GSM8K},
    "longer": {"student": ("cl100k", 4096), "teacher": ("tekken", 1024), **_GSM8K},
    "shorter": {"student": ("o200k", 1024), "teacher": ("r50k", 4096), **_GSM8K},
    "characters": {"student": ("o200k", 2048), "teacher": ("kyoto", 8000), **_WAGAHAI},
    "code": {"student": ("r50k", 2048), "teacher": ("o200k", 2048), **_CODE},
    "script": {"student": ("tekken", 2048), "teacher": ("cl100k", 2048), **_WAGAHAI},
}
"""Name -> each side's vocabulary and the ids that are kept of it, and a text.

The rule of the audit was made from the first four, and tested on the others.
"""

_SHORT = ("--init-method-std", "0.1", "--seq-length", "128", "--teacher-seq-length", "224")
_STEPS = {"steps": 150, "teacher_steps": 250}


def main() -> None:
    """Train what is not trained yet, and write what is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/compare_pairs"))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/objectives.json"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS), choices=PAIRS, metavar="NAME")
    parser.add_argument("--objectives", nargs="+", default=OBJECTIVES, choices=OBJECTIVES)
    parser.add_argument("--measure", action="store_true", help="train nothing more")
    arguments = parser.parse_args()
    pairs = {name: _pair(name, arguments.run_dir) for name in arguments.pairs}
    students = [(objective, seed) for seed in arguments.seeds for objective in arguments.objectives]
    if not arguments.measure:
        _train(list(pairs.values()), arguments.seeds, arguments.objectives)
    results: dict[str, Any] = {"machine": machine(), "pairs": {}}
    if arguments.output.exists():
        # Pairs that are not named keep what was measured.
        results["pairs"] = json.loads(arguments.output.read_text(encoding="utf-8"))["pairs"]
    for name, pair in pairs.items():
        finished = [student for student in students if pair.is_finished(*student)]
        if finished:
            pair.prepare()
            results["pairs"][name] = {"audit": _audit(pair), **pair.results(finished)}
    write_text(arguments.output, json.dumps(results, indent=1) + "\n")
    print(table(results["pairs"]))


def table(pairs: Mapping[str, Any]) -> str:
    """Bits per byte and agreement, means over seeds, in Markdown; a row an objective."""
    lines = [f"| | {' | '.join(pairs)} |", f"|---{'|---' * len(pairs)}|"]
    for objective in OBJECTIVES:
        cells = []
        for pair in pairs.values():
            runs = [run for run in pair["students"] if run["objective"] == objective]
            bits, agreement = (
                sum(run[key] for run in runs) / max(len(runs), 1)
                for key in ("bits_per_byte", "agreement")
            )
            cells.append(f"{bits:.3f}, {agreement:.1%} ({len(runs)})" if runs else "")
        lines.append(f"| `{objective}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _train(pairs: Sequence[Pair], seeds: Sequence[int], objectives: Sequence[str]) -> None:
    """The first seed pair by pair, others objective by objective: a part of it says most."""
    for pair in pairs:
        pair.prepare()
        for objective in objectives:
            pair.train(objective, seeds[0])
    for seed in seeds[1:]:
        for objective in objectives:
            for pair in pairs:
                pair.train(objective, seed)


def _pair(name: str, root: Path) -> Pair:
    values = PAIRS[name]
    (student, student_size), (teacher, teacher_size) = values["student"], values["teacher"]
    return Pair(
        root=root / name,
        student=_vocabulary(student),
        teacher=_vocabulary(teacher),
        sizes={"student": student_size, "teacher": teacher_size},
        data=[SHARED / "corpora" / file for file in values["data"]],
        text_keys=values.get("text_keys", ()),
        student_flags=_SHORT,
        teacher_flags=("--init-method-std", "0.05", "--seq-length", "224"),
        **_STEPS,
    )


def _vocabulary(name: str) -> Path:
    if name == "tekken":
        carried = importlib.resources.files("mistral_common") / "data"
        return Path(str(carried / "tekken_240911.json"))
    if name == "kyoto":
        return SHARED / "tokenizers" / "sp_tiny" / "kyoto_ja_unigram_8000.model"
    return SHARED / "tokenizers" / "openai_tiktoken" / f"{name}_base.tiktoken"


def _audit(pair: Pair) -> dict[str, Any]:
    """What ``megatron-ext align`` counts on the held-out text."""
    student, teacher = (
        MegatronTokenizer.from_pretrained(pair.tokenizers[side]) for side in ("student", "teacher")
    )
    audit = PairAudit(student, teacher)
    text = (pair.root / "data" / "validation.jsonl").read_text(encoding="utf-8")
    audit.add(AuditDocument(json.loads(line)["text"], "held out") for line in text.splitlines())
    return audit.report().total.as_row()


if __name__ == "__main__":
    main()

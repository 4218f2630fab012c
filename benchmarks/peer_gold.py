"""A whole training step by GOLD beside TRL's ``GOLDTrainer``, at the same objective.

    pip install trl==1.16.0
    python -m benchmarks.peer_gold --student-tokenizer llama3_2/ --teacher-tokenizer qwen3/ \\
        --data gsm8k.jsonl --output benchmarks/results/peer_gold.json

Both train a Llama of 2 layers x 64 from a Llama of 4 layers x 128, random weights in whole
published vocabularies, on the same conversations, in fp32 on one thread: matched tokens by the
Jensen-Shannon divergence, unmatched ones by sorted L1, over the answers alone, no cross-entropy, no
generation. TRL pairs tokens by their strings and multiplies the probabilities of a chunk's tokens;
ours pairs them by bytes and takes the mean of a chunk's rows (docs/losses.md), so that losses
differ, but not what has to be computed.

Each side runs twice in a process of its own, for few and for more steps. The processor time of a
step is the difference over the number of steps between; the memory is the peak of the longer run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from benchmarks.loss_cost.machine import ROOT, commit, machine, write_results

_FEW: Final = 2
_SIZES: Final = {"student": (64, 2), "teacher": (128, 4)}
"""Hidden size and layers."""

_HEAD_WIDTH: Final = 32


def main() -> None:
    """Measure both sides, print the ratio, and write the raw numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    for side in _SIZES:
        parser.add_argument(f"--{side}-tokenizer", type=Path, help="folder with a chat template")
    parser.add_argument("--data", type=Path, help="JSON lines with question and answer")
    parser.add_argument("--rows", type=int, default=4, help="conversations of a step")
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4, help="steps between the two runs")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--train-trl", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train_trl is not None:
        train_trl(json.loads(arguments.train_trl.read_text()))
        return
    if find_spec("trl") is None:
        parser.error("TRL is not installed: pip install trl==1.16.0")
    with tempfile.TemporaryDirectory() as name:
        results = compare(Path(name), arguments)
    print(json.dumps({key: value for key, value in results.items() if key != "machine"}, indent=2))
    if arguments.output is not None:
        write_results(arguments.output, results)


def compare(root: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Times and memory of both sides, and their ratios."""
    for side, (hidden, layers) in _SIZES.items():
        write_model(root / side, getattr(arguments, f"{side}_tokenizer"), hidden, layers)
    write_conversations(arguments.data, root / "train.jsonl", arguments.rows)
    setting = {"rows": arguments.rows, "seq_length": arguments.seq_length}
    found = {side: measured(side, root, setting, arguments.steps) for side in ("ours", "trl")}
    ours, trl = found["ours"], found["trl"]
    return {
        "commit": commit(),
        "machine": machine(),
        "versions": {name: version(name) for name in ("trl", "transformers", "torch")},
        "setting": {**setting, "steps": arguments.steps, "sizes": _SIZES},
        **found,
        "times_faster": trl["seconds_per_step"] / ours["seconds_per_step"],
        "share_of_memory": ours["peak_mib"] / trl["peak_mib"],
    }


def measured(
    side: str, root: Path, setting: Mapping[str, int], steps: int
) -> dict[str, float | list[float]]:
    """Processor seconds of a step and peak memory of one side, from two runs."""
    # What is compiled or downloaded once is not of a step.
    run(side, root, setting, 1)
    runs = [run(side, root, setting, count) for count in (_FEW, _FEW + steps)]
    seconds, peaks = zip(*runs, strict=True)
    return {
        "seconds_per_step": (seconds[1] - seconds[0]) / steps,
        "peak_mib": peaks[1],
        "runs_seconds": list(seconds),
    }


def run(side: str, root: Path, setting: Mapping[str, int], steps: int) -> tuple[float, float]:
    """Processor seconds and peak MiB of a process that trains for some steps."""
    values = {**setting, "root": str(root), "steps": steps}
    file = root / f"{side}-{steps}.json"
    if side == "ours":
        file.write_text(json.dumps(our_run(values)))
        words = ["-m", "megatron_ext", "distill", "--config", str(file)]
    else:
        file.write_text(json.dumps(values))
        words = ["-m", "benchmarks.peer_gold", "--train-trl", str(file)]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    log = file.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env={**os.environ, **threads},
            stdout=output,
            stderr=output,
        )
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{side} failed:\n{log.read_text()[-3000:]}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def our_run(values: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of ``megatron-ext distill``."""
    root, rows, length = values["root"], values["rows"], values["seq_length"]
    tokenizer = {"prompt_format": "auto"}
    return {
        "run_dir": f"{root}/run-{values['steps']}",
        "initial_checkpoint": f"{root}/student",
        "tokenizer": {**tokenizer, "model": f"{root}/student"},
        "student": {"seq_length": length},
        "teacher": {
            "checkpoint": f"{root}/teacher",
            "tokenizer": {**tokenizer, "model": f"{root}/teacher"},
            "model": {"seq_length": length},
        },
        "data": {"train": [f"{root}/train.jsonl"], "conversations": True},
        "loss": {
            "objective": "gold",
            "options": {"direction": "jensen_shannon", "uncommon_topk": None},
            "ce_weight": 0.0,
        },
        "optimizer": {"lr": 1e-4},
        "training": {
            "train_iters": values["steps"],
            "micro_batch_size": rows,
            "global_batch_size": rows,
            "variable_seq_lengths": True,
            "save_interval": 1000,
            "eval_interval": 1000,
        },
    }


def train_trl(values: Mapping[str, Any]) -> None:
    """The same by TRL, in this process."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.experimental.gold import GOLDConfig, GOLDTrainer

    root = Path(values["root"])
    lines = (root / "train.jsonl").read_text(encoding="utf-8").splitlines()
    arguments = GOLDConfig(
        output_dir=str(root / f"trl-{values['steps']}"),
        max_steps=values["steps"],
        per_device_train_batch_size=values["rows"],
        gradient_accumulation_steps=1,
        max_length=values["seq_length"],
        learning_rate=1e-4,
        lmbda=0.0,
        beta=0.5,
        temperature=1.0,
        use_uld_loss=True,
        uld_use_hybrid_loss=True,
        uld_hybrid_matched_weight=1.0,
        uld_hybrid_unmatched_weight=1.0,
        teacher_tokenizer_name_or_path=str(root / "teacher"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    student, teacher = (AutoModelForCausalLM.from_pretrained(root / side) for side in _SIZES)
    trainer = GOLDTrainer(
        model=student,
        teacher_model=teacher,
        args=arguments,
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=AutoTokenizer.from_pretrained(root / "student"),
    )
    trainer.train()


def write_model(folder: Path, tokenizer: Path, hidden: int, layers: int) -> None:
    """A Llama with random weights and a published tokenizer, as a HuggingFace folder."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    read = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(read),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // _HEAD_WIDTH,
        num_key_value_heads=hidden // _HEAD_WIDTH,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=read.bos_token_id,
        eos_token_id=read.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    if read.pad_token is None:
        read.pad_token = read.eos_token
    read.save_pretrained(folder)


def write_conversations(source: Path, target: Path, rows: int) -> None:
    """The first questions and answers as conversations, twice as many as a step has."""
    with source.open(encoding="utf-8") as lines:
        records = [json.loads(line) for line, _ in zip(lines, range(2 * rows), strict=False)]
    messages = [
        [
            {"role": "user", "content": record["question"]},
            {"role": "assistant", "content": record["answer"]},
        ]
        for record in records
    ]
    text = "".join(json.dumps({"messages": turns}, ensure_ascii=False) + "\n" for turns in messages)
    target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

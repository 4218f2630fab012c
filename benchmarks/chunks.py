"""What objectives over chunks cost on the CPU, and that it is linear in the chunks.

    python benchmarks/chunks.py --output benchmarks/results/chunks.json

Forward and backward of one microbatch of random fp32 logits over 8,192 student and 6,144 teacher
tokens, half of them shared, without shards: 1,024 and 8,192 chunks, of which nine in ten have one
token a side and the others two or three on one. Each measurement runs in a process of its own, so
that its peak memory is its own; "peak" is what it takes beyond the inputs. Milliseconds are
processor time of one thread, which other processes hardly touch, the least of the repeats.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from alignment import write_results

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses import (
    LOSS_REGISTRY,
    ChunkCompletions,
    CompletionTable,
    DistillationInputs,
    ProjectionShard,
    TeacherTargets,
    VocabularyMatch,
)
from megatron_ext.losses.learned_projection import LearnedProjection
from megatron_ext.projection import SparseProjection

VOCABS = (8192, 6144)
CHUNKS = (1024, 8192)
SHARDS = tuple(VocabShard(start=0, stop=vocab, vocab_size=vocab) for vocab in VOCABS)


def projection() -> SparseProjection:
    """Every second student token is a teacher's; the others have three candidates."""
    rows = np.arange(VOCABS[0])
    exact = (rows % 2 == 0) & (rows < VOCABS[1])
    candidates = np.random.default_rng(0).integers(0, VOCABS[1], (int((~exact).sum()), 3))
    return SparseProjection.from_entries(
        np.concatenate([rows[exact], np.repeat(rows[~exact], 3)]),
        np.concatenate([rows[exact], candidates.flatten()]),
        np.ones(int(exact.sum()) + candidates.size),
        VOCABS,
    )


def microbatch(chunks: int) -> DistillationInputs:
    """One sample of ``chunks`` chunks; every tenth has two or three tokens on one side."""
    generator = torch.Generator().manual_seed(0)
    index = torch.arange(chunks)
    sizes = torch.ones(2, chunks, dtype=torch.int64)
    sizes[1, index % 20 == 7], sizes[0, index % 20 == 17] = 3, 2
    ids = [torch.repeat_interleave(index, side)[None] for side in sizes]
    labels = [
        torch.randint(0, vocab, side.shape, generator=generator)
        for vocab, side in zip(VOCABS, ids, strict=True)
    ]
    logits = [
        torch.randn(1, side.shape[1], vocab, generator=generator).mul_(3)
        for vocab, side in zip(VOCABS, ids, strict=True)
    ]
    alignment = AlignmentBatch.from_chunk_ids(*ids)
    common = torch.arange(0, min(VOCABS), 2)
    table = CompletionTable.from_token_bytes(
        *([token.to_bytes(3, "big") for token in range(vocab)] for vocab in VOCABS)
    )
    return DistillationInputs(
        student_logits=logits[0].requires_grad_(),
        student_shard=SHARDS[0],
        labels=labels[0],
        teacher=TeacherTargets(kind="logits", shard=SHARDS[1], logits=logits[1]),
        teacher_labels=labels[1],
        alignment=alignment,
        projection=ProjectionShard.from_projection(
            projection(), student_shard=SHARDS[0], teacher_shard=SHARDS[1]
        ),
        match=VocabularyMatch(common_student=common, common_teacher=common),
        completions=ChunkCompletions.of(alignment, *labels, table),
    )


def learned(inputs: DistillationInputs) -> DistillationInputs:
    module = LearnedProjection(projection(), student_shard=SHARDS[0], teacher_shard=SHARDS[1])
    return replace(inputs, projection=module())


def unchanged(inputs: DistillationInputs) -> DistillationInputs:
    return inputs


CASES: dict[str, tuple[str, dict[str, Any], Callable[[DistillationInputs], DistillationInputs]]] = {
    "projected_kl": ("projected_kl", {}, unchanged),
    "projected_kl, learned projection": ("projected_kl", {}, learned),
    "partition_kl": ("partition_kl", {}, unchanged),
    "gold": ("gold", {}, unchanged),
    "strict_topk": ("strict_topk", {"top_k": 16}, unchanged),
    "alm": ("alm", {"debias": False}, unchanged),
}
"""Label -> objective, its options, and what is done to its inputs."""


def measure_here(label: str, chunks: int, repeats: int) -> dict[str, Any]:
    """Run one objective in this process."""
    torch.set_num_threads(1)
    name, options, change = CASES[label]
    objective = LOSS_REGISTRY[name](**options)
    inputs = microbatch(chunks)
    before = peak_mib()
    forward, backward = [], []
    for _ in range(repeats):
        inputs.student_logits.grad = None
        given = change(inputs)
        start = time.process_time()
        loss = objective(given).loss_sum
        middle = time.process_time()
        loss.backward()
        backward.append(time.process_time() - middle)
        forward.append(middle - start)
    return {
        "objective": label,
        "chunks": chunks,
        "repeats": repeats,
        "forward_ms": 1000 * min(forward),
        "backward_ms": 1000 * min(backward),
        "peak_mib": peak_mib() - before,
        "logits_mib": inputs.student_logits.numel() * 4 / 2**20,
    }


def peak_mib() -> float:
    """Most resident memory of this process so far; Linux counts in KiB, macOS in bytes."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def measure(label: str, chunks: int, repeats: int) -> dict[str, Any]:
    """The same in a child process."""
    command = [sys.executable, __file__, "--child", label, "--chunks", str(chunks)]
    command += ["--repeats", str(repeats)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, Any] = json.loads(output)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each objective")
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--chunks", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        print(json.dumps(measure_here(arguments.child, arguments.chunks, arguments.repeats)))
        return
    results = []
    for label in CASES:
        for chunks in CHUNKS:
            result = measure(label, chunks, arguments.repeats)
            results.append(result)
            print(
                f"{label}, {chunks:,} chunks: forward {result['forward_ms']:,.0f} ms,"
                f" backward {result['backward_ms']:,.0f} ms,"
                f" peak {result['peak_mib']:,.0f} MiB beside {result['logits_mib']:,.0f} MiB of"
                " student logits",
                flush=True,
            )
    write_results(arguments.output, results)


if __name__ == "__main__":
    main()

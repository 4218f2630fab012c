"""Vectors that kernels are given begin at multiples of 16 bytes, however many chunks there are.

Triton compiles a kernel for each set of pointers that do, unless it is told not to look: a launch
with another set waits for the compiler.
"""

from dataclasses import replace

import pytest
import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.chunk_rows import ChunkedLogits
from megatron_ext.ops.partition_kl.chain_chunks import compare_chains_by_kernel
from megatron_ext.ops.projected_kl import ProjectedKLOptions, WeightedLabels, evaluate_projected_kl
from tests.ops.kernel_case import INTERPRETED
from tests.ops.projected_kl_case import Case, column_plan, paired_projection, sharded
from tests.ops.test_chain_kernels import STEPS, plan_of, random_logits

interpreter = pytest.importorskip("triton.runtime.interpreter")


ANYWHERE = {("row_statistics_kernel", "peak_ptr"), ("row_statistics_kernel", "total_ptr")}
"""Arguments at which Triton is told not to look."""


@pytest.fixture
def elsewhere(monkeypatch):
    """Kernels and arguments that were launched on other addresses."""
    if not INTERPRETED:
        pytest.skip("the interpreter alone shows what a kernel is given")
    found, call = set(), interpreter.GridExecutor.__call__

    def recorded(self, *args, **options):
        for name, value in (dict(zip(self.arg_names, args, strict=False)) | options).items():
            if isinstance(value, torch.Tensor) and value.data_ptr() % 16:
                found.add((self.fn.__name__, name))
        return call(self, *args, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", recorded)
    return found


def test_projected_kl(elsewhere):
    case = Case.random(vocabs=(47, 41), lengths=(11, 9), chunk_count=3)
    case = replace(case, projection=paired_projection(47, 41))
    shards = [VocabShard(start=0, stop=width, vocab_size=width) for width in (47, 41)]
    student = ChunkedLogits.of(case.student_logits.float(), case.student_chunk_id, 3, shards[0])
    teacher = ChunkedLogits.of(case.teacher_logits.float(), case.teacher_chunk_id, 3, shards[1])
    plan = column_plan(case.projection, *shards)
    evaluate_projected_kl(
        student,
        teacher,
        sharded(case.projection, plan),
        ProjectedKLOptions(),
        gradient=torch.empty_like(student.logits),
        cross_entropy=WeightedLabels(torch.arange(11), torch.ones(11)),
        implementation="triton",
    )
    assert elsewhere == ANYWHERE


def test_chains(elsewhere):
    student, teacher = (random_logits(steps, spread=1.0) for steps in STEPS)
    compare_chains_by_kernel(student, teacher, plan_of("forward", 1.0), None, with_gradient=True)
    assert elsewhere == set()

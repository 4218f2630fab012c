"""Write the tables of ``scaling.md`` from the formulas of a dry run and the results of benchmarks.

    python docs/generate_scaling.py

Each table stands between ``<!-- name -->`` and ``<!-- /name -->``. A test compares the page with
what this would write.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NamedTuple

from megatron_ext import MegatronTokenizer, SparseProjection, TokenizerConfig
from megatron_ext.training.configuration.config import (
    DataConfig,
    DistillConfig,
    LossConfig,
    ModelConfig,
    ParallelConfig,
    TeacherConfig,
    TrainingConfig,
)
from megatron_ext.training.dry_run.memory import rank_memory
from megatron_ext.training.dry_run.plan import PairCost, Plan, pair_cost
from megatron_ext.training.dry_run.step_time import H100, step_seconds, wire_bytes
from megatron_ext.training.objective import head_rows
from megatron_ext.training.run_loss import with_vocabulary_layout
from megatron_ext.training.run_plan import RunPlan

PAGE = Path(__file__).with_name("scaling.md")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

LENGTH: Final = 4096
ROWS: Final = 1024
"""Of a global batch that does not grow: four million tokens."""

ROWS_OF_REPLICA: Final = 16
"""Of one that grows with the replicas."""

STUDENT: Final = ModelConfig(
    num_layers=16,
    hidden_size=2048,
    num_attention_heads=32,
    num_query_groups=8,
    ffn_hidden_size=8192,
    seq_length=LENGTH,
)
TEACHER: Final = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    ffn_hidden_size=14336,
    seq_length=LENGTH + LENGTH // 4,
    untie_embeddings_and_output_weights=True,
)
"""A teacher of 32,768 tokens needs a quarter more of them for the same text."""

TOKENIZERS: Final = {
    "student": "tekken_240911.json",
    "teacher": "mistral_instruct_tokenizer_240323.model.v3",
}

NOT_MEASURED: Final = (
    "`benchmarks/end_to_end.py` has not been run on a quiet machine yet: there is no figure here."
)


class Layout(NamedTuple):
    """How a run is spread over GPUs."""

    gpus: int
    tp: int = 1
    pp: int = 1
    vp: int = 1

    def __str__(self) -> str:
        axes = {"TP": self.tp, "PP": self.pp, "VP": self.vp}
        axes["DP"] = self.gpus // (self.tp * self.pp)
        return " ".join(f"{name}{size}" for name, size in axes.items() if size > 1) or "alone"


LAYOUTS: Final = (
    Layout(1),
    Layout(8),
    Layout(8, tp=2),
    Layout(8, tp=8),
    Layout(64),
    Layout(64, tp=2, pp=2, vp=4),
    Layout(1024),
    Layout(1024, tp=2),
    Layout(1024, tp=2, pp=2, vp=4),
    Layout(1024, tp=8, pp=4, vp=2),
)


def scaling_page() -> str:
    """The text of ``scaling.md`` with its tables as the formulas and results have them now."""
    regions = {
        "models": _models(),
        "memory": _table(_memory()),
        "scaled": _table(_scaled()),
        "shares": _table(_shares()),
        "wire": _table(_wire()),
        "measured": _measured(),
    }
    page = PAGE.read_text(encoding="utf-8")
    for name, lines in regions.items():
        region = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        assert region.search(page), f"the page has no region {name}"
        text = "\n".join(lines)
        page = region.sub(lambda match, text=text: f"{match[1]}\n{text}\n\n{match[2]}", page)
    return page


def plan_of(layout: Layout, rows: int, *, distils: bool = True) -> Plan:
    """The plan of the page's run under a layout, on Transformer Engine's layers."""
    config = with_vocabulary_layout(_config(layout, rows, distils=distils), on_gpu=True)
    sizes = {name: _tokenizers()[name].vocab_size for name in TOKENIZERS}
    run = RunPlan.of(config)
    plan = Plan.of(
        run,
        world_size=layout.gpus,
        vocab_size=sizes["student"],
        teacher_rows={
            name: head_rows(teacher, sizes[name]) for name, teacher in run.teachers.items()
        },
        has_flash=True,
    )
    if not distils:
        return plan
    is_laid_out = config.training.vocabulary_layout == "co_sharded"
    teacher = plan.teachers["teacher"]
    key = plan.student.tp, plan.student.padded_vocab_size, teacher.padded_vocab_size, is_laid_out
    if key not in _PAIRS:
        _PAIRS[key] = pair_cost(_projection(), plan.student, teacher, is_laid_out=is_laid_out)
    return dataclasses.replace(plan, pairs={"teacher": _PAIRS[key]})


_PAIRS: dict[tuple[int, int, int, bool], PairCost] = {}
"""Cost of the pair by tensor-parallel ranks, rows of both heads, and whether they are laid out: all
that it depends on."""


def _config(layout: Layout, rows: int, *, distils: bool) -> DistillConfig:
    return DistillConfig(
        run_dir="run",
        tokenizer=TokenizerConfig(),
        student=STUDENT,
        teacher=TeacherConfig(tokenizer=TokenizerConfig(), model=TEACHER, checkpoint="teacher"),
        data=DataConfig(train=("text.jsonl",), packing=False),
        loss=LossConfig(objective="projected_kl" if distils else "next_token", linear=distils),
        training=TrainingConfig(
            train_iters=1,
            global_batch_size=rows,
            precision="bf16",
        ),
        parallel=ParallelConfig(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vp,
            sequence_parallel=layout.tp > 1,
            use_distributed_optimizer=True,
        ),
    )


@cache
def _tokenizers() -> dict[str, Any]:
    data = Path(str(files("mistral_common") / "data"))
    return {
        name: MegatronTokenizer.from_pretrained(data / file) for name, file in TOKENIZERS.items()
    }


@cache
def _projection() -> SparseProjection:
    return SparseProjection.from_tokenizers(**_tokenizers())


def _replicas(layout: Layout) -> int:
    return layout.gpus // (layout.tp * layout.pp)


def _models() -> list[str]:
    plan = plan_of(Layout(1), ROWS)
    lines = []
    for name, shape in (("student", plan.student), ("teacher", plan.teachers["teacher"])):
        model = shape.model
        lines.append(
            f"- {name}: {shape.parameters(0) / 1e9:.2f} billion parameters, {model.num_layers} "
            f"layers of {model.hidden_size:,}, a vocabulary of {shape.padded_vocab_size:,}, rows "
            f"of {model.seq_length:,} tokens"
        )
    return lines


def _memory() -> Iterator[Sequence[str]]:
    """GiB of the first and the last stage."""
    yield ("GPUs", "layout", "weights, gradients", "optimizer", "teacher", "activations", "loss",
           "all of the fullest rank")  # fmt: skip
    for layout in LAYOUTS:
        plan = plan_of(layout, _rows_at_least(layout))
        stages = [rank_memory(plan, stage) for stage in {0, layout.pp - 1}]
        rank = max(stages, key=lambda memory: memory.total)
        parts = (
            rank.student_weights + rank.gradients,
            rank.optimizer_state,
            rank.teacher_weights + rank.teacher_targets,
            rank.activations + rank.batch,
            rank.loss,
            rank.total,
        )
        yield (f"{layout.gpus:,}", str(layout), *(f"{part / 2**30:.1f}" for part in parts))


def _rows_at_least(layout: Layout) -> int:
    return max(ROWS, _replicas(layout))


def _scaled() -> Iterator[Sequence[str]]:
    """A global batch that stays the same, and one with as many rows for each replica."""
    yield ("GPUs", "layout", "seconds a step", "student tokens a second", "of one GPU's",
           "over plain + teacher", "16 rows a replica: seconds a step", "of one GPU's")  # fmt: skip
    one = ROWS * LENGTH / _seconds(LAYOUTS[0], ROWS)
    for layout in LAYOUTS:
        rows = ROWS_OF_REPLICA * _replicas(layout)
        fixed, growing = _seconds(layout, ROWS), _seconds(layout, rows)
        yield (
            f"{layout.gpus:,}",
            str(layout),
            f"{fixed:.2f}",
            f"{ROWS * LENGTH / fixed:,.0f}",
            f"{ROWS * LENGTH / fixed / (one * layout.gpus):.0%}",
            f"{fixed / _apart(layout, ROWS):.2f}",
            f"{growing:.2f}",
            f"{rows * LENGTH / growing / (one * layout.gpus):.0%}",
        )


def _seconds(layout: Layout, rows: int) -> float:
    return step_seconds(plan_of(layout, rows)).total


def _apart(layout: Layout, rows: int) -> float:
    """Seconds of the student's plain step and of the teacher's forward pass, one after the other.

    Together they have all that a distillation step has, but what the loss moves for the teacher and
    sends for columns of several ranks.
    """
    plan = plan_of(layout, rows)
    both, plain = step_seconds(plan), step_seconds(plan_of(layout, rows, distils=False))
    without = step_seconds(dataclasses.replace(plan, pairs={}))
    return both.total - (both.loss - plain.loss) - (both.total - without.total)


def _shares() -> Iterator[Sequence[str]]:
    """Parts that are nothing under any of the layouts are left out."""
    shares = {
        layout: step_seconds(plan_of(layout, _rows_at_least(layout))).shares() for layout in LAYOUTS
    }
    names = [name for name in shares[LAYOUTS[0]] if any(part[name] for part in shares.values())]
    yield ("GPUs", "layout", *(name.replace("_", " ") for name in names))
    for layout, part in shares.items():
        yield (f"{layout.gpus:,}", str(layout), *(f"{part[name]:.1%}" for name in names))


def _wire() -> Iterator[Sequence[str]]:
    """GB a step and rank, of the last stage."""
    yield ("GPUs", "layout", "replicas", "tensor", "pipeline", "tied embedding", "loss")
    for layout in LAYOUTS:
        plan = plan_of(layout, _rows_at_least(layout))
        sent = wire_bytes(plan, plan.stages - 1)
        parts = (
            sent.data_parallel,
            sent.tensor_parallel,
            sent.pipeline,
            sent.tied_embedding,
            sent.loss,
        )
        yield (f"{layout.gpus:,}", str(layout), *(f"{part / 1e9:.2f}" for part in parts))


def _measured() -> list[str]:
    path = RESULTS / "end_to_end.json"
    if not path.exists():
        return [NOT_MEASURED]
    found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    machine = found["machine"]
    rows = [
        ("student's plain step", f"{found['plain_seconds']:.2f} s"),
        ("teacher's forward pass", f"{found['teacher_seconds']:.2f} s"),
        ("distillation step", f"{found['distil_seconds']:.2f} s"),
        ("distillation over the other two", f"{found['ratio']:.3f}"),
        ("share of the run in which no sample was at hand", f"{found['waiting_share']:.2%}"),
        ("student tokens a second", f"{found['tokens_per_second']:,.0f}"),
    ]
    gpu = machine.get("gpu")
    where = gpu["name"] if gpu else f"{machine['cpu']}, {found['threads']} threads"
    return [
        f"On {where}, torch {machine['torch']}, {found['precision']}:",
        "",
        *_table([("what", "median"), *rows]),
    ]


def _table(rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> list[str]:
    header, *body = rows
    bar = ["---" if index < 2 else "--:" for index in range(len(header))]
    return [f"| {' | '.join(cells)} |" for cells in (header, bar, *body)]


if __name__ == "__main__":
    PAGE.write_text(scaling_page(), encoding="utf-8")
    print(f"wrote {PAGE} for {H100.name}")

"""The result of a dry run as a page of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from megatron_ext.errors import counted
from megatron_ext.training.dry_run.memory import RankMemory, rank_memory
from megatron_ext.training.dry_run.plan import ModelShape, Plan
from megatron_ext.training.dry_run.step_time import (
    H100,
    WireBytes,
    step_arithmetic,
    step_seconds,
    wire_bytes,
)

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def report(
    plan: Plan,
    data: Mapping[str, Any],
    checkpoints: Mapping[str, bool],
    doubts: Mapping[str, Sequence[str]],
) -> str:
    """The page.

    Args:
        data: The summary of ``RunData``.
        checkpoints: Paths that the run would load, and whether they say what model they hold.
        doubts: Warnings about the tokenizers of their models, by path.
    """
    stages = _shown_stages(plan)
    parts = [
        _run(plan),
        _text(data),
        _checked(checkpoints, doubts),
        _table(
            "memory of a rank, by pipeline stage",
            {stage: rank_memory(plan, stage) for stage in stages},
        ),
        _table(
            "sent by a rank in a step, by pipeline stage",
            {stage: wire_bytes(plan, stage) for stage in stages},
        ),
        _arithmetic(plan),
        _time(plan),
        "nothing was started, and nothing was written",
    ]
    return "\n\n".join(parts) + "\n"


def summary(plan: Plan, data: Mapping[str, Any], *, start: str | None) -> str:
    """The run in about ten lines, for its start.

    Args:
        data: The summary of ``RunData``.
        start: Checkpoint that the student's weights are from; None for random ones.
    """
    loss, training, optimizer = plan.run.loss, plan.run.training, plan.run.optimizer
    weights = f"kd_weight {loss.kd_weight:g}, " if plan.teachers else ""
    options = f" {dict(loss.options)}" if loss.options else ""
    peak = max(rank_memory(plan, stage).total for stage in range(plan.stages))
    sections = {name: plan.run.teachers[name].config for name in plan.teachers}
    sources = {
        name: section.checkpoint if section.ema_decay is None else _AVERAGE
        for name, section in sections.items()
    }
    lines = [
        _run(plan),
        f"weights     student: {start or 'random'}"
        + "".join(f"; {name}: {source}" for name, source in sources.items() if source),
        _text(data),
        f"objective   {loss.objective}{options}, {weights}ce_weight {loss.ce_weight:g}",
        f"training    {training.train_iters:,} iterations, learning rate {optimizer.lr:g}, "
        f"{optimizer.lr_decay_style}",
        f"memory      about {_bytes(peak)} a rank at the peak of a step, by estimate",
        f"run         {plan.run.run_dir}; config.yaml there has every setting",
    ]
    return "\n".join(lines) + "\n"


_AVERAGE: Final = "the average of the student"


def _shown_stages(plan: Plan) -> list[int]:
    """The first, the second and the last stage: all between are like the second."""
    return sorted({0, min(1, plan.stages - 1), plan.stages - 1})


def _run(plan: Plan) -> str:
    student, training = plan.student, plan.run.training
    layers = "Transformer Engine's" if plan.has_flash else "megatron-core's local ones"
    context = f"CP {plan.cp} x " if plan.cp > 1 else ""
    lines = [
        f"processes   {plan.world_size}: TP {student.tp} x {context}PP {student.pp} x DP {plan.dp}"
        + _experts_over(plan),
        f"step        {counted(training.global_batch_size, 'row')} in "
        f"{counted(plan.microbatches, 'microbatch')} of {plan.batch} for each replica",
        f"layers      {layers}, {training.precision}",
        f"student     {_model(student)}",
    ]
    learning = student.tp * sum(plan.learning(stage) for stage in range(plan.stages))
    if learning < student.tp * sum(map(plan.student_parameters, range(plan.stages))):
        lines.append(f"learning    {learning:,} parameters on the ranks of a replica")
    lines += [f"{name:<11} {_teacher(plan, name)}" for name in plan.teachers]
    rollouts = plan.run.data.rollouts
    if rollouts is not None:
        engine = "the student" if rollouts.engine is None else rollouts.engine.kind
        lines.append(
            f"rollouts    {rollouts.share:.0%} of the rows, up to {rollouts.max_new_tokens} tokens "
            f"each, sampled by {engine}; not in the estimates below"
        )
    return "\n".join(lines)


def _experts_over(plan: Plan) -> str:
    """How the processes of a stage share experts, where any model has them."""
    shapes = [shape for shape in (plan.student, *plan.local_teachers) if shape.model.num_experts]
    if not shapes:
        return ""
    return f"; experts: EP {shapes[0].ep} x ETP {shapes[0].etp}"


def _teacher(plan: Plan, name: str) -> str:
    """A teacher's model, or its place and its targets where it is remote or cached."""
    form, teacher = plan.forms.get(name), plan.run.teachers[name].config
    if teacher.ema_decay is not None:
        return f"{_AVERAGE}, of which an update keeps {teacher.ema_decay:.7g}"
    if form is None:
        return _model(plan.teachers[name])
    sent = f"{form}, {form.bytes_per_token:,} bytes a token"
    if teacher.cache is not None:
        return f"from its cache: {sent}"
    serving, shape = teacher.serving, plan.teachers[name]
    weights = shape.tp * sum(shape.parameters(stage) for stage in range(shape.pp)) * plan.element
    where = {
        "own_ranks": f"on ranks of its own ({serving.ranks}), TP "
        f"{serving.tensor_model_parallel_size} x PP {serving.pipeline_model_parallel_size}: about "
        f"{_bytes(weights / serving.replica_size)} of weights on each",
        "process": f"in a process beside each replica: about {_bytes(weights)} of weights there",
        "server": f"on the server at {', '.join(serving.address)}",
        "engine": f"by {teacher.engine.kind} at {', '.join(teacher.engine.url)}"
        if teacher.engine
        else "",
    }
    return f"{where[teacher.placement]}; {sent}"


def _model(shape: ModelShape) -> str:
    # Of all stages and ranks; a tied head is counted where it is kept.
    parameters = shape.tp * sum(shape.parameters(stage) for stage in range(shape.pp))
    return (
        f"{parameters:,} parameters on the ranks of a replica, vocabulary padded to "
        f"{shape.padded_vocab_size:,}, rows of {shape.model.seq_length:,} tokens"
    )


def _text(data: Mapping[str, Any]) -> str:
    lines = []
    for split in ("train", "validation"):
        if data.get(split):
            text = data[split]
            read = f"{counted(text['documents'], 'document')}, {counted(text['bytes'], 'byte')}"
            lines.append(f"{split:<11} {read}")
    return "\n".join(lines)


def _checked(checkpoints: Mapping[str, bool], doubts: Mapping[str, Sequence[str]]) -> str:
    lines = ["checked     configuration, run folder, files, tokenizers, pairs and projections"]
    for path, compared in checkpoints.items():
        what = "does not say what model it holds"
        if compared:
            what = "the model fits" if doubts.get(path) else "model and tokenizer fit"
        lines.append(f"checkpoint  {path}: {what}")
        lines += [f"warning     {path}: {doubt}" for doubt in doubts.get(path, ())]
    return "\n".join(lines)


def _table(title: str, columns: Mapping[int, RankMemory | WireBytes]) -> str:
    """A row for each part that is not 0, and the total."""
    values = {stage: {**asdict(part), "total": part.total} for stage, part in columns.items()}
    rows = [title.ljust(46) + "".join(f"{f'stage {stage}':>14}" for stage in values)]
    for name in next(iter(values.values())):
        numbers = [part[name] for part in values.values()]
        if any(numbers) or name == "total":
            shown = "".join(f"{_bytes(number):>14}" for number in numbers)
            rows.append(f"  {name.replace('_', ' '):<44}{shown}")
    return "\n".join(rows)


def _arithmetic(plan: Plan) -> str:
    work = step_arithmetic(plan)
    parts = {name: value for name, value in asdict(work).items() if name != "loss_bytes"}
    rows = _shares(parts, work.operations)
    return "\n".join(
        [
            f"FLOPs of a step, all ranks: {work.operations:.3g}",
            *rows,
            f"  bytes of logits moved by the loss: {_bytes(work.loss_bytes)}",
        ]
    )


def _time(plan: Plan) -> str:
    seconds = step_seconds(plan)
    return "\n".join(
        [
            f"time shares on {H100.name}, computed and not measured",
            f"(at {H100.reached_operations:.0%} of its arithmetic and {H100.reached_bytes:.0%} of "
            "its bytes a second, without overlap):",
            *_shares(asdict(seconds), seconds.total),
        ]
    )


def _shares(parts: Mapping[str, float], total: float) -> Sequence[str]:
    return [
        f"  {name.replace('_', ' '):<44}{value / total:>14.1%}"
        for name, value in parts.items()
        if value
    ]


def _bytes(number: float) -> str:
    unit = 0
    while number >= 1024 and unit < len(_UNITS) - 1:
        number /= 1024
        unit += 1
    return f"{number:,.0f} {_UNITS[unit]}" if unit == 0 else f"{number:,.1f} {_UNITS[unit]}"

"""Time, arithmetic and traffic of a step: computed from data-sheet rates, never measured.

Operations: a product with ``w`` weights takes ``2 w`` operations for each token; attention
``4 T h`` in each layer, every position being compared with every other; a backward pass twice its
forward, and once more where layers are recomputed. The loss is counted in bytes instead, since it
is bound by memory: each logit is read twice, and the gradient written once (``B2`` of
docs/performance.md). Adapters are not counted: they are narrow.

Traffic: collectives are taken to be rings, so that an all-reduce of ``m`` bytes over ``r`` ranks
sends ``2 m (r - 1) / r`` from each, a reduce-scatter or an all-gather half of that.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from megatron_ext.constants import DELTA_CHUNK as CHUNK
from megatron_ext.training.dry_run.plan import FP32, ModelShape, Plan

_FORWARD_AND_BACKWARD = 3
"""Operations of a forward and a backward pass, in those of a forward pass."""

_FROZEN = 2
"""The same of weights that do not learn, of which there is no gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArithmetic:
    """Operations of one optimizer step, on all ranks."""

    student_layers: int
    student_head: int
    teacher_layers: int
    teacher_heads: int
    loss_bytes: int
    """Bytes of logits that the loss moves."""

    @property
    def operations(self) -> int:
        """Sum of all operations."""
        layers = self.student_layers + self.teacher_layers
        return layers + self.student_head + self.teacher_heads


def step_arithmetic(plan: Plan) -> StepArithmetic:
    """Operations of a step, over all microbatches and replicas."""
    rows = plan.run.training.global_batch_size
    student = plan.student
    teachers = plan.teachers
    layers, head = (
        _FORWARD_AND_BACKWARD if part in plan.learning_parts else _FROZEN
        for part in ("layers", "head")
    )
    return StepArithmetic(
        student_layers=round((layers + plan.recomputed_share) * rows * _layers(student)),
        student_head=head * rows * _head(student),
        # Remote layers are computed by others; a head is applied where its targets are read.
        teacher_layers=rows * sum(_layers(teacher) for teacher in plan.local_teachers),
        teacher_heads=rows * sum(_head(teachers[name]) for name in _with_heads(plan)),
        loss_bytes=rows * plan.element * _logits_moved(plan),
    )


def _with_heads(plan: Plan) -> list[str]:
    """Teachers whose hidden states the student's ranks turn into logits."""
    forms = plan.forms
    return [name for name in plan.teachers if name not in forms or forms[name].kind == "hidden"]


def _layers(shape: ModelShape) -> int:
    """Operations of the forward pass of one row."""
    length = shape.model.seq_length
    attention = 4 * length * shape.heads * shape.model.head_width
    per_token = 2 * shape.token_products + shape.tp * attention
    if shape.model.is_hybrid:
        moved = 2 * (shape.linear_products - shape.attention_products) - attention
        per_token += round(shape.linear_share * shape.tp * (moved + _linear_rule(shape)))
    return shape.model.num_layers * length * per_token


def _linear_rule(shape: ModelShape) -> int:
    """Operations of the gated delta rule for a token, of a rank's heads.

    The state is read twice and written once; of a chunk, half of its pairs of positions are
    compared twice, solved for and added up.
    """
    model = shape.model
    heads = (model.linear_num_value_heads or 0) // shape.tp
    key, value = model.linear_key_head_dim or 0, model.linear_value_head_dim or 0
    return heads * (6 * key * value + CHUNK * (3 * key + 2 * value))


def _head(shape: ModelShape) -> int:
    return 2 * shape.model.seq_length * shape.model.hidden_size * shape.padded_vocab_size


def _logits_moved(plan: Plan) -> int:
    student = plan.student.model.seq_length * plan.student.padded_vocab_size
    moved = 3 * student
    for teacher in plan.teachers.values():
        moved += 3 * student + 2 * teacher.model.seq_length * teacher.padded_vocab_size
    return moved


_STATISTICS: Final = 3
"""fp32 numbers of a row that a term sums over ranks: its peak, its sum, its label or chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireBytes:
    """Bytes that a rank of one pipeline stage sends in a step."""

    data_parallel: int
    """Gradients over replicas and the ranks that share their rows, and with the distributed
    optimizer the weights back."""

    context_parallel: int
    """Keys and values of whole rows in every layer, and of the student's their gradients back. Rows
    of chunks that two ranks have a part of are not counted."""

    tensor_parallel: int
    """Layers of the student, there and back, and of the teachers."""

    pipeline: int
    """Hidden states to the next stage and their gradients to the one before."""

    tied_embedding: int
    """The embedding's gradient between the first and the last stage."""

    served_targets: int
    """Targets of remote teachers, received by the first rank of the last stage and passed on to the
    ranks that share its rows; on the last stage."""

    loss: int
    """Statistics of rows, and sums over columns of several ranks; on the last stage."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(getattr(self, item.name) for item in fields(self))


def wire_bytes(plan: Plan, stage: int) -> WireBytes:
    """Bytes that a rank of ``stage`` sends."""
    return WireBytes(
        data_parallel=_data_parallel(plan, stage),
        context_parallel=_context_parallel(plan),
        tensor_parallel=_tensor_parallel(plan, stage),
        pipeline=_pipeline(plan, stage),
        tied_embedding=_tied_embedding(plan, stage),
        served_targets=_served_targets(plan) if plan.student.is_last(stage) else 0,
        loss=_loss(plan) if plan.student.is_last(stage) else 0,
    )


def all_reduced(message: int, ranks: int) -> int:
    """Bytes that each of ``ranks`` sends in an all-reduce of ``message`` bytes."""
    return 2 * message * (ranks - 1) // ranks


def _data_parallel(plan: Plan, stage: int) -> int:
    experts = plan.expert_learning(stage)
    dense = plan.learning(stage) - experts
    parts = ((dense, plan.gradient_ranks), (experts, plan.expert_ranks))
    if plan.run.parallel.use_distributed_optimizer:
        each = FP32 + plan.element
        return sum(parameters * each * (ranks - 1) // ranks for parameters, ranks in parts)
    return sum(all_reduced(parameters * FP32, ranks) for parameters, ranks in parts)


def _context_parallel(plan: Plan) -> int:
    """An all-gather a layer forward, a reduce-scatter backward: as an all-reduce together. Layers
    of linear attention have two all-to-alls each way."""
    recomputes = plan.run.training.recompute_granularity == "selective"
    again = plan.student.layers if recomputes else plan.student.layers * plan.recomputed_share
    halves = round((2 * plan.student.layers + again) * _keys_and_values(plan, plan.student))
    for teacher in plan.local_teachers:
        halves += teacher.layers * _keys_and_values(plan, teacher)
    return plan.microbatches * halves * (plan.cp - 1) // plan.cp


def _keys_and_values(plan: Plan, shape: ModelShape) -> int:
    """Bytes of a microbatch's whole rows, of a rank's heads; of linear attention, on average over
    kinds of layers, those of this rank's positions that heads are exchanged for."""
    width = 2 * shape.query_groups * shape.model.head_width * plan.cp
    if shape.model.is_hybrid:
        exchanged = shape.linear_width + shape.linear_values
        width = round(width + shape.linear_share * (exchanged - width))
    return plan.tokens(shape) * width * plan.element


def _tensor_parallel(plan: Plan, stage: int) -> int:
    """Two all-reduces a layer each way, one behind the embedding, one of the head's input.

    Sequence parallelism makes each of them a reduce-scatter and an all-gather: as many bytes.
    """
    recomputed = round(2 * plan.student.layers * plan.recomputed_share)
    student = 4 * plan.student.layers + recomputed + (stage == 0) + plan.student.is_last(stage)
    total = student * _hidden(plan, plan.student)
    for teacher in plan.local_teachers:
        total += (2 * teacher.layers + (stage == 0)) * _hidden(plan, teacher)
    return plan.microbatches * all_reduced(total, plan.student.tp)


def _hidden(plan: Plan, shape: ModelShape) -> int:
    """Bytes of hidden states at full width and length, over all ranks that share them."""
    return plan.tokens(shape) * shape.model.hidden_size * plan.element


def _pipeline(plan: Plan, stage: int) -> int:
    """Between chunks of an interleaved pipeline the last stage sends to the first, too."""
    forward = plan.chunks - plan.student.is_last(stage)
    backward = plan.chunks - (stage == 0)
    if plan.stages == 1:
        return 0
    total = (forward + backward) * plan.hidden_bytes(plan.student)
    total += forward * sum(plan.hidden_bytes(teacher) for teacher in plan.local_teachers)
    return plan.microbatches * total


def _tied_embedding(plan: Plan, stage: int) -> int:
    is_end = stage == 0 or plan.student.is_last(stage)
    learns = "head" in plan.learning_parts
    if not (plan.student.is_tied and plan.stages > 1 and is_end and learns):
        return 0
    return all_reduced(plan.student.head_rows * plan.student.model.hidden_size * FP32, 2)


def _served_targets(plan: Plan) -> int:
    teachers = plan.run.teachers
    return sum(
        plan.microbatches * plan.cp * plan.tokens(plan.teachers[name]) * form.bytes_per_token
        for name, form in plan.forms.items()
        if teachers[name].config.is_remote
    )


def _loss(plan: Plan) -> int:
    """Rows of cross-entropy, rows of both models for each teacher, and columns of several ranks.

    As many chunks are taken as the student has tokens, the most there can be.
    """
    tokens = plan.tokens(plan.student)
    message = _STATISTICS * FP32 * tokens
    for name, teacher in plan.teachers.items():
        message += _STATISTICS * FP32 * (tokens + plan.tokens(teacher))
        if name in plan.pairs:
            # Predictions of both models for each crossing column.
            message += 2 * FP32 * tokens * plan.pairs[name].crossing_columns
    return plan.microbatches * all_reduced(message, plan.student.tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """An accelerator and its links: data-sheet rates, and the assumed shares that are reached."""

    name: str
    operations: float
    """Operations a second, of bf16 products."""
    memory: float
    """Bytes a second of its memory."""
    link: float
    """Bytes a second that a rank sends within its node."""
    network: float
    """Bytes a second that a rank sends to other nodes."""
    node: int
    """Accelerators of a node."""
    reached_operations: float = 0.4
    reached_bytes: float = 0.7


H100: Final = Machine(
    name="H100 SXM",
    operations=989e12,
    memory=3.35e12,
    link=450e9,
    network=50e9,
    node=8,
)
"""NVIDIA's data sheet; one 400 Gb/s adapter for each accelerator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Seconds of one step, without any overlap."""

    student: float
    teachers: float
    heads: float
    loss: float
    tensor_parallel: float
    context_parallel: float
    pipeline: float
    bubble: float
    """Waiting time of the fullest stage for the others: ``(P - 1) / (V M)`` of its work."""
    data_parallel: float

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return float(sum(getattr(self, item.name) for item in fields(self)))

    def shares(self) -> dict[str, float]:
        """Each part over the total."""
        return {item.name: getattr(self, item.name) / self.total for item in fields(self)}


def step_seconds(plan: Plan) -> StepSeconds:
    """Seconds of a step of H100s, on the last stage, which has heads and loss besides layers."""
    work = step_arithmetic(plan)
    products = H100.operations * H100.reached_operations
    stage_ranks = plan.gradient_ranks * plan.student.tp
    layers = products * stage_ranks * plan.stages
    student = work.student_layers / layers
    teachers = work.teacher_layers / layers
    heads = (work.student_head + work.teacher_heads) / (products * stage_ranks)
    loss = work.loss_bytes / (H100.memory * H100.reached_bytes * stage_ranks)
    sent = wire_bytes(plan, plan.stages - 1)
    first = wire_bytes(plan, 0)
    bubble = (plan.stages - 1) / (plan.chunks * plan.microbatches)
    tp = plan.student.tp
    return StepSeconds(
        student=student,
        teachers=teachers,
        heads=heads,
        loss=loss,
        tensor_parallel=_seconds(sent.tensor_parallel + sent.loss, among=tp),
        context_parallel=_seconds(sent.context_parallel, among=plan.cp * tp),
        pipeline=_seconds(first.pipeline, among=plan.world_size),
        # The teacher's schedule fills and drains the pipeline, too.
        bubble=bubble * (student + teachers),
        data_parallel=_seconds(sent.data_parallel + sent.tied_embedding, among=plan.world_size),
    )


def _seconds(sent: int, *, among: int) -> float:
    """Seconds in which a rank sends bytes to others, among so many."""
    return sent / (H100.reached_bytes * (H100.link if among <= H100.node else H100.network))

"""Memory of one rank at the peak of a step, part by part, in bytes.

Rounding by the allocator, and buffers of communication libraries and of torch, are not included.

Activations of a layer, kept for the backward pass, with ``n = B T`` tokens, hidden size ``h``, a
rank's attention width ``q``, its heads ``a`` of width ``d``, its feed-forward width ``f``, and
``e`` bytes an element:

    two norms   2 (8 n h + 4 n + e n h)      fp32 input and quotient, 1 / rms; the output in e
    attention   e n (2 q + 2 g)              joint product of query, key and value, ``g`` the width
                                             of the latter; the context
                e n (q + g)                  with rotary embeddings, which copy query and key
    normalisers 4 a n
    packed      2 e n q + e B T^2            keys and values of every head; the mask
    rotary      4 e T d                      sines and cosines
    MLP         5 e n f, with GELU 2 e n f   both halves, one of them shifted, the gate, the product
                e n f, e n f                 the sigmoid of quick GELU; a gate that has a limit
    gate        3 e n q                      of attention's output: it, its sigmoid, the product
    sinks       e B (T + 1) (a + 2 g / d)    one more number a head of query, key, value and context
                e B T q                      the context without it

Over ``c`` context-parallel ranks ``n`` is a rank's ``B T / c``. Then attention keeps the keys and
values that its two slices of queries, of ``s = T / 2c`` positions, are compared with:

    attention   2 e n q                      query and context
                2 e n q more                 without rotary embeddings and as many key-value heads
    gathered    2 e B (T + s) q + e n q      keys and values of every head; each slice's context
                4 a n + e s (T + s)          normalisers; the masks, of every row where it has one

Norms of queries and keys are left out. Linear attention keeps the input and the result of what is
computed again between its two products; every stage of a model with it is taken to have both kinds
of layers in the same parts.

Latent attention is taken to keep queries, keys and values of its heads at the width of a query, and
its dense layers as those of experts, without a measurement.

These are the tensors that autograd saves under megatron-core's local layers on a CPU; a test
records them. Transformer Engine's layers are taken to keep query, key, value and context at their
own width, ``4 a n`` for the attention's normalisers, and norms of ``2 (2 e n h + 4 n)``. That is
stated, not measured.

Sequence parallelism cuts what the norms keep. Full recomputation keeps the input of each stretch of
layers, and a stretch's own activations while it is computed again; selective recomputation keeps
normalisers, repeated heads and masks of one layer instead of all.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from megatron_ext.constants import DELTA_CHUNK, INT4_GROUP
from megatron_ext.training.dry_run.plan import FP32, ModelShape, Plan


def layer_activations(plan: Plan, shape: ModelShape) -> int:
    """Bytes of one layer for one microbatch of full rows, on average over kinds of attention."""
    attention = _attention(plan, shape) + _scores(plan, shape)
    if shape.model.attention_output_gate:
        attention += 3 * plan.element * plan.tokens(shape) * shape.heads * shape.model.head_width
    if shape.model.attention_sinks and plan.cp == 1:
        attention = _with_sinks(plan, shape)
    if shape.model.is_hybrid:
        linear = plan.tokens(shape) * plan.element * (shape.linear_width + shape.linear_values)
        attention = round(attention + shape.linear_share * (linear - attention))
    return 2 * norm_activations(plan, shape) + attention + _feed_forward(plan, shape)


def _feed_forward(plan: Plan, shape: ModelShape) -> int:
    """Bytes of a feed-forward layer without its norm."""
    model, tokens, element = shape.model, plan.tokens(shape), plan.element
    of_gate = (model.gate_activation == "quick_gelu") + (model.gate_limit is not None)
    width = 5 + of_gate if model.swiglu else 2
    if model.num_experts is None:
        return width * element * tokens * shape.ffn
    ranks = shape.tp if plan.run.parallel.sequence_parallel else 1
    routed = tokens * model.moe_router_topk // ranks * shape.etp
    experts = element * routed * (model.hidden_size + (width + 1) * shape.expert_ffn)
    shared = width * element * tokens * shape.shared_ffn
    gate = element * tokens * model.hidden_size // ranks * model.moe_shared_expert_gate
    return experts + shared + gate + _routing(plan, shape, tokens // ranks)


def _routing(plan: Plan, shape: ModelShape, tokens: int) -> int:
    """Bytes of a router: logits, the mask and the weights of all experts; in bf16 its input and its
    matrix in fp32."""
    experts = shape.model.num_experts or 0
    copies = FP32 * shape.model.hidden_size if plan.element != FP32 else 0
    return copies * (tokens + experts) + tokens * 2 * FP32 * experts


def norm_activations(plan: Plan, shape: ModelShape) -> int:
    """Bytes of one normalisation, its output included."""
    hidden, element = shape.model.hidden_size, plan.element
    if shape.model.normalization == "LayerNorm":
        row = 2 * element * hidden + 2 * FP32
    elif plan.has_flash:
        row = 2 * element * hidden + FP32
    else:
        row = 2 * FP32 * hidden + FP32 + element * hidden
    ranks = shape.tp if plan.run.parallel.sequence_parallel else 1
    return plan.tokens(shape) * row // ranks


def stage_activations(plan: Plan, shape: ModelShape, stage: int) -> int:
    """Bytes of one microbatch on a stage, without its logits."""
    final_norm = norm_activations(plan, shape) if shape.is_last(stage) else 0
    return _kept_of_layers(plan, shape) + final_norm


def kept_activations(plan: Plan, stage: int) -> int:
    """Bytes of all the student's microbatches that a stage keeps at once.

    Under 1F1B stage ``p`` of ``P`` keeps ``P - p`` microbatches; under the interleaved schedule of
    ``V`` chunks ``2 (P - p - 1) + (V - 1) P + 1`` chunks of one.
    """
    one = stage_activations(plan, plan.student, stage)
    if plan.chunks == 1:
        kept = one * min(plan.microbatches, plan.stages - stage)
    else:
        warm_up = 2 * (plan.stages - stage - 1) + (plan.chunks - 1) * plan.stages + 1
        kept = one * min(plan.microbatches * plan.chunks, warm_up) // plan.chunks
    return kept + _computed_again(plan, plan.student)


def _attention(plan: Plan, shape: ModelShape) -> int:
    tokens, element = plan.tokens(shape), plan.element
    width = shape.model.head_width
    query, key_value = shape.heads * width, shape.query_groups * width
    if plan.has_flash:
        return tokens * (2 * element * (query + key_value) + FP32 * shape.heads)
    rotary = 4 * element * plan.row_length(shape) // plan.cp * width
    has_rotary = shape.model.position_embedding_type == "rope"
    is_joint = shape.heads == shape.query_groups
    if plan.cp > 1:
        # Without rotary embeddings queries are a part of the joint product, which stays whole.
        behind = rotary if has_rotary else 2 * element * tokens * query * is_joint
        return 2 * element * tokens * query + behind
    product = element * tokens * (query + 2 * key_value)
    context = own_query = element * tokens * query
    if has_rotary:
        # Repeated for packed rows, values are no longer part of the product.
        kept = (
            rotary if _is_masked(plan, shape) else product + element * tokens * key_value + rotary
        )
        return context + own_query + kept
    if is_joint:
        return context + product
    return context + own_query + (0 if _is_masked(plan, shape) else product)


def _with_sinks(plan: Plan, shape: ModelShape) -> int:
    """Bytes of an attention with sinks, which makes queries, keys and values wider by a number and
    longer by a row; of one with a mask every head has its keys and values."""
    is_masked, width = _is_masked(plan, shape), shape.model.head_width + 1
    rows = plan.tokens(shape) + plan.batch
    queries = plan.tokens(shape) if is_masked else rows
    groups = shape.heads if is_masked else shape.query_groups
    kept = 2 * queries * shape.heads * width + 2 * rows * groups * width
    context = plan.tokens(shape) * shape.heads * shape.model.head_width
    length = plan.row_length(shape)
    masks = (queries if plan.run.data.packing else length) * (length + 1) if is_masked else 0
    rotary = 4 * length * shape.model.head_width
    normalisers = FP32 * shape.heads * queries
    return plan.element * (kept + context + masks + rotary) + normalisers


def _is_masked(plan: Plan, shape: ModelShape) -> bool:
    """Whether attention has a mask, for which the heads of keys and values are repeated."""
    return plan.run.data.packing or shape.model.has_window


def _scores(plan: Plan, shape: ModelShape) -> int:
    """Bytes of what attention keeps beside its inputs and its output."""
    if plan.has_flash:
        return 0
    if plan.cp > 1:
        return _gathered(plan, shape)
    tokens, length = plan.tokens(shape), shape.model.seq_length
    normalisers = FP32 * shape.heads * tokens
    if not _is_masked(plan, shape):
        return normalisers
    repeated = 2 * tokens * shape.heads * shape.model.head_width
    # Rows of several texts have masks of their own; a window is the same in all.
    rows = tokens if plan.run.data.packing else length
    return normalisers + plan.element * (repeated + rows * length)


def _gathered(plan: Plan, shape: ModelShape) -> int:
    tokens, query = plan.tokens(shape), shape.heads * shape.model.head_width
    width = plan.row_length(shape) // (2 * plan.cp)
    seen = plan.row_length(shape) + width
    masks = width * seen * (plan.batch if plan.run.data.packing else 1)
    kept = 2 * plan.batch * seen * query + tokens * query + masks
    return plan.element * kept + FP32 * shape.heads * tokens


def _kept_of_layers(plan: Plan, shape: ModelShape) -> int:
    training = plan.run.training
    one = layer_activations(plan, shape)
    if training.recompute_granularity is None:
        return shape.layers * one
    if training.recompute_granularity == "selective":
        return shape.layers * (one - _scores(plan, shape))
    again = round(shape.layers * plan.recomputed_share)
    stretch = _stretch(plan) if training.recompute_method == "uniform" else 1
    inputs = -(-again // stretch) * plan.hidden_bytes(shape)
    return inputs + (shape.layers - again) * one


def _computed_again(plan: Plan, shape: ModelShape) -> int:
    """Bytes that one recomputed stretch keeps during its backward pass."""
    training = plan.run.training
    linear = _of_linear_rule(plan, shape) if shape.model.is_hybrid else 0
    if training.recompute_granularity is None:
        return linear
    if training.recompute_granularity == "selective":
        return _scores(plan, shape) + linear
    stretch = _stretch(plan) if training.recompute_method == "uniform" else 1
    return min(stretch, shape.layers) * layer_activations(plan, shape) + linear


def _of_linear_rule(plan: Plan, shape: ModelShape) -> int:
    """Bytes that one layer of linear attention keeps between its products while these are computed
    again, by torch: measured, in fp32. flash-linear-attention keeps less."""
    model = shape.model
    keys, values = (model.linear_num_key_heads or 0, model.linear_num_value_heads or 0)
    key, value = model.linear_key_head_dim or 0, model.linear_value_head_dim or 0
    of_value = 5 * key + 11 * value + 6 * DELTA_CHUNK + 2 * key * value // DELTA_CHUNK
    numbers = (keys * 12 * key + values * of_value) // shape.tp
    return FP32 * plan.tokens(shape) * numbers


def _stretch(plan: Plan) -> int:
    return plan.run.training.recompute_num_layers or 1


SLICE_BYTES: Final = {"cpu": 4 << 20, "cuda": 128 << 20}
"""One fp32 temporary of a loss, see ``distributed.row_slices``."""

_SLICES: Final = 4
"""Temporaries of a slice that live at once."""

_INT32: Final = 4
_TOKEN_BYTES: Final = 3 * 8 + 3 * 8
"""Token, label and position; chunk id, chunk start and end; int64 each."""

_INPUT_BYTES: Final = 3 * 8
"""Token, label and position of a rank's part of a row, beside the whole row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of a rank of one pipeline stage, in bytes."""

    student_weights: int

    gradients: int
    """Gradients in fp32."""

    optimizer_state: int
    """Two moments, and in bf16 fp32 weights; a rank's share with the distributed optimizer."""

    teacher_weights: int
    """Weights of teachers on the student's ranks, and on the last stage the heads of others."""

    teacher_targets: int
    """Hidden states of a whole global batch, or the targets of a remote or cached teacher; on the
    last stage."""

    batch: int
    """Tokens, labels, positions, chunks and masks of a whole global batch."""

    activations: int
    """Activations of the student's microbatches in flight, or of a teacher's layer if larger."""

    loss: int
    """Logits or tiles of them, their gradients, temporaries, projections; on the last stage."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(getattr(self, item.name) for item in fields(self))


def rank_memory(plan: Plan, stage: int) -> RankMemory:
    """The memory of a rank of ``stage``."""
    learning = plan.learning(stage)
    is_last = plan.student.is_last(stage)
    teachers, local = list(plan.teachers.values()), plan.local_teachers
    return RankMemory(
        student_weights=plan.student_parameters(stage) * plan.element,
        gradients=learning * FP32,
        optimizer_state=_optimizer_state(plan, stage),
        teacher_weights=sum(_weights(plan, name, stage) for name in plan.models)
        + (_heads(plan) * plan.element if is_last else 0),
        teacher_targets=sum(_targets(plan, name) for name in plan.models) if is_last else 0,
        batch=sum(_batch(plan, shape) for shape in (plan.student, *teachers)),
        activations=max(
            kept_activations(plan, stage),
            *(layer_activations(plan, teacher) for teacher in local),
            0,
        ),
        loss=_loss(plan) if is_last else 0,
    )


def _weights(plan: Plan, name: str, stage: int) -> int:
    """Bytes of one teacher's weights, which are 0 where its model is elsewhere."""
    if name in plan.forms:
        return 0
    teacher, config = plan.teachers[name], plan.run.teachers[name].config
    if config.ema_decay is not None:
        # Fp32 averages of what learns, and in bf16 the rounded ones that the model has.
        return plan.learning(stage) * (FP32 if plan.element == FP32 else FP32 + plan.element)
    weights = teacher.parameters(stage) * plan.element
    if config.weight_precision is None:
        return weights
    products = teacher.layers * teacher.layer_products
    # A byte of each; the scale of a row is left out.
    rounded = products
    if config.weight_precision == "int4":
        rounded = products // 2 + products // INT4_GROUP * (plan.element + 1)
    return weights - products * plan.element + rounded


def _optimizer_state(plan: Plan, stage: int) -> int:
    parameters = plan.learning(stage)
    # In fp32 the weights are their own main copy.
    each = FP32 * (2 if plan.element == FP32 else 3)
    if not plan.run.parallel.use_distributed_optimizer:
        return parameters * each
    experts = plan.expert_learning(stage)
    dense = parameters - experts
    return -(-dense * each // plan.gradient_ranks) - (-experts * each // plan.expert_ranks)


def _targets(plan: Plan, name: str) -> int:
    """Bytes of one teacher's targets; forms other than ``hidden`` take the bytes that are sent."""
    teacher, form = plan.teachers[name], plan.forms.get(name)
    width = plan.state_layers[name] * teacher.model.hidden_size * plan.element
    if form is not None and form.kind != "hidden":
        width = form.bytes_per_token
    return plan.microbatches * plan.tokens(teacher) * width


def _heads(plan: Plan) -> int:
    """Numbers of elements of the heads of remote and cached teachers with hidden states."""
    return sum(
        plan.teachers[name].head_rows * plan.teachers[name].model.hidden_size
        for name, form in plan.forms.items()
        if form.kind == "hidden"
    )


def _batch(plan: Plan, shape: ModelShape) -> int:
    # A packed row's mask is [1, S, T] booleans.
    masked = plan.row_length(shape) if plan.run.data.packing else 0
    cut = _INPUT_BYTES if plan.cp > 1 else 0
    return plan.microbatches * plan.tokens(shape) * (plan.cp * _TOKEN_BYTES + cut + masked)


def _loss(plan: Plan) -> int:
    teachers = plan.teachers.values()
    tables = sum(pair.entries for pair in plan.pairs.values()) * 2 * (FP32 + _INT32)
    slices = _SLICES * SLICE_BYTES["cuda" if plan.has_flash else "cpu"]
    if plan.teachers and plan.run.loss.linear:
        return tables + slices + _tiles(plan)
    # The logits, and a gradient of each term of the loss; a copy of the logits of the chunks that a
    # context-parallel rank owns.
    terms = 1 + len(plan.teachers) * (2 if plan.cp > 1 else 1)
    student = (1 + terms) * plan.tokens(plan.student) * plan.student.head_rows
    # One teacher at a time turns its hidden states into logits.
    teacher = max((plan.tokens(shape) * shape.head_rows for shape in teachers), default=0)
    return tables + slices + (student + teacher) * plan.element


def _tiles(plan: Plan) -> int:
    """A tile's logits of both models and their gradient; gradients of hidden states and head."""
    rows = plan.run.loss.linear_tile_rows
    student = plan.student
    widest = max(teacher.head_rows for teacher in plan.teachers.values())
    tile = min(rows, plan.tokens(student)) * 2 * student.head_rows + rows * widest
    hidden = plan.tokens(student) * student.model.hidden_size
    head = student.head_rows * student.model.hidden_size
    return (tile + hidden) * plan.element + head * FP32

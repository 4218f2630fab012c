"""Bytes that microbatches keep for the backward pass, on one rank.

The model of a layer, with ``n = B T`` tokens, hidden size ``h``, a rank's attention width ``q``,
its heads ``a`` of width ``d``, its feed-forward width ``f``, and ``e`` bytes an element:

    two norms   2 (8 n h + 4 n + e n h)      fp32 input and quotient, 1 / rms; the output in e
    attention   4 e n q                      query, key and value of every head; the context
                2 e n q more                 with rotary embeddings and as many key-value heads
    scores      4 a B T^2, in bf16 6 a B T^2 probabilities in fp32, and in bf16 once more
    mask        T^2                          what a layer makes; a packed row brings its own
    rotary      4 e T d                      sines and cosines
    MLP         5 e n f, with GELU 2 e n f   both halves, one of them shifted, the gate, the product

Over ``c`` context-parallel ranks ``n`` is a rank's ``B T / c``. Then attention keeps no scores, but
the keys and values that its two slices of queries, of ``s = T / 2c`` positions, are compared with:

    attention   2 e n q                      query and context
                2 e n q more                 without rotary embeddings and as many key-value heads
    gathered    2 e B (T + s) q + e n q      keys and values of every head; each slice's context
                4 a n + e s (T + s)          normalisers; the masks, of every row where it has one

These are the tensors that autograd saves under megatron-core's local layers on a CPU; a test
records them. Transformer Engine's layers are taken to keep the same, less scores and mask (but
``4 a n`` for the attention's normaliser), with keys and values at their own width and norms of
``2 (2 e n h + 4 n)``. That is stated, not measured.

Sequence parallelism cuts what the norms keep. Full recomputation keeps the input of each stretch of
layers, and a stretch's own activations while it is computed again; selective recomputation keeps
scores and mask of one layer instead of all.
"""

from __future__ import annotations

from megatron_ext.training.dry_run.model_shape import ModelShape
from megatron_ext.training.dry_run.plan import FP32, Plan


def layer_activations(plan: Plan, shape: ModelShape) -> int:
    """Bytes of one layer for one microbatch of full rows."""
    mlp = (5 if shape.model.swiglu else 2) * plan.element * plan.tokens(shape) * shape.ffn
    attention = _attention(plan, shape) + _scores(plan, shape)
    return 2 * norm_activations(plan, shape) + attention + mlp


def norm_activations(plan: Plan, shape: ModelShape) -> int:
    """Bytes of one normalisation, its output included."""
    hidden, element = shape.model.hidden_size, plan.element
    if shape.model.normalization == "LayerNorm":
        row = 2 * element * hidden + 2 * FP32
    elif plan.has_flash:
        row = 2 * element * hidden + FP32
    else:
        row = 2 * FP32 * hidden + FP32 + element * hidden
    ranks = shape.tp if plan.config.parallel.sequence_parallel else 1
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
    query, key_value = (count * shape.head_width for count in (shape.heads, shape.query_groups))
    if plan.has_flash:
        return tokens * (2 * element * (query + key_value) + FP32 * shape.heads)
    rotary = 4 * element * plan.row_length(shape) // plan.cp * shape.head_width
    has_rotary = shape.model.position_embedding_type == "rope"
    is_joint = shape.heads == shape.query_groups
    if plan.cp > 1:
        # Without rotary embeddings queries are a part of the joint product, which stays whole.
        behind = rotary if has_rotary else 2 * element * tokens * query * is_joint
        return 2 * element * tokens * query + behind
    total = 4 * element * tokens * query
    if has_rotary:
        if is_joint:
            # Values are a part of the joint product, which stays whole behind them.
            total += 2 * element * tokens * query
        total += rotary
    return total


def _scores(plan: Plan, shape: ModelShape) -> int:
    if plan.has_flash:
        return 0
    if plan.cp > 1:
        return _gathered(plan, shape)
    length = shape.model.seq_length
    score = FP32 if plan.element == FP32 else FP32 + plan.element
    mask = 0 if plan.config.data.packing else length * length
    return score * shape.heads * plan.tokens(shape) * length + mask


def _gathered(plan: Plan, shape: ModelShape) -> int:
    tokens, query = plan.tokens(shape), shape.heads * shape.head_width
    width = plan.row_length(shape) // (2 * plan.cp)
    seen = plan.row_length(shape) + width
    masks = width * seen * (plan.batch if plan.config.data.packing else 1)
    kept = 2 * plan.batch * seen * query + tokens * query + masks
    return plan.element * kept + FP32 * shape.heads * tokens


def _kept_of_layers(plan: Plan, shape: ModelShape) -> int:
    training = plan.config.training
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
    """What one stretch keeps while its backward pass is under way."""
    training = plan.config.training
    if training.recompute_granularity is None:
        return 0
    if training.recompute_granularity == "selective":
        return _scores(plan, shape)
    stretch = _stretch(plan) if training.recompute_method == "uniform" else 1
    return min(stretch, shape.layers) * layer_activations(plan, shape)


def _stretch(plan: Plan) -> int:
    return plan.config.training.recompute_num_layers or 1

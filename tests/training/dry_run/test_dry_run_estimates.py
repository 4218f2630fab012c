"""How memory, traffic and arithmetic of a plan follow from its sizes."""

import dataclasses

import pytest

from megatron_ext.teachers.target_form import TargetForm
from megatron_ext.training.configuration.config import LossConfig
from megatron_ext.training.dry_run.memory import kept_activations, rank_memory, stage_activations
from megatron_ext.training.dry_run.plan import PairCost
from megatron_ext.training.dry_run.report import report
from megatron_ext.training.dry_run.step_time import (
    all_reduced,
    step_arithmetic,
    step_seconds,
    wire_bytes,
)
from tests.training.dry_run.planned_runs import BATCH, MODELS, plan_of, planned_run
from tests.training.tiny_run import CP2, PP2, TP2, changed

TOKENS, TEACHER_TOKENS = BATCH * 24, BATCH * 40


def last_stage(plan):
    return rank_memory(plan, plan.stages - 1)


def test_targets_are_the_hidden_states_of_every_microbatch_on_the_last_stage_alone():
    plan = plan_of(planned_run(**PP2), world_size=4)
    assert (plan.dp, plan.microbatches) == (2, 2)
    assert rank_memory(plan, 0).teacher_targets == 0
    assert rank_memory(plan, 1).teacher_targets == 2 * TEACHER_TOKENS * 64 * 4


@pytest.mark.parametrize(
    ("kind", "head", "width"), [("hidden", 128 * 64 * 4, 256), ("topk", 0, 28)], ids=str
)
def test_a_teacher_elsewhere_takes_its_targets_and_head_and_nothing_of_its_layers(
    kind, head, width
):
    config = changed(planned_run(**PP2), teacher={"placement": "process"})
    form = TargetForm.of(kind, precision="fp32", top_k=4, hidden_size=64, vocab_size=256)
    here = plan_of(config, world_size=2)
    plan = dataclasses.replace(here, forms={"teacher": form})
    assert rank_memory(plan, 0).teacher_weights == 0
    assert last_stage(plan).teacher_weights == head
    assert form.bytes_per_token == width
    assert last_stage(plan).teacher_targets == 4 * TEACHER_TOKENS * width
    assert wire_bytes(plan, 1).served_targets == 4 * TEACHER_TOKENS * width
    assert wire_bytes(plan, 0).served_targets == wire_bytes(here, 1).served_targets == 0
    assert wire_bytes(plan, 0).pipeline < wire_bytes(here, 0).pipeline
    work, work_here = step_arithmetic(plan), step_arithmetic(here)
    assert work.teacher_layers == 0 < work_here.teacher_layers
    assert work.teacher_heads == (work_here.teacher_heads if kind == "hidden" else 0)
    sent = f"{form}, {width} bytes a token"
    assert f"of weights there; {sent}" in report(plan, {}, {}, {})
    assert "in a process" not in report(here, {}, {}, {})


def test_rounded_weights_of_a_teacher_take_a_byte_each_and_in_int4_half_of_one():
    def weights(precision):
        teacher = {"library": "huggingface", "weight_precision": precision}
        return last_stage(plan_of(changed(planned_run(), teacher=teacher))).teacher_weights

    exact = weights(None)
    products, rest = divmod(exact - weights("int8"), 3)
    assert rest == 0 < products
    # Each 32 columns have a scale of four bytes, as weights in fp32, and a zero of one.
    assert exact - weights("int4") == 4 * products - products // 2 - products // 32 * 5


def test_logits_and_gradients_of_both_terms_are_on_the_last_stage_alone():
    slices = 4 * (4 << 20)
    plan = plan_of(planned_run(**PP2), world_size=2)
    assert rank_memory(plan, 0).loss == 0
    heads = 3 * TOKENS * 128 + TEACHER_TOKENS * 128
    assert last_stage(plan).loss == slices + heads * 4
    sharded = plan_of(planned_run(**TP2), world_size=2)
    # 64 and 128 tokens are 256 rows over two ranks, by make_vocab_size_divisible_by.
    assert last_stage(sharded).loss == slices + heads * 4
    pairs = {"teacher": PairCost(entries=100)}
    assert last_stage(dataclasses.replace(plan, pairs=pairs)).loss == slices + heads * 4 + 1600


def test_tiles_take_the_place_of_all_logits():
    whole = last_stage(plan_of(planned_run())).loss
    loss = LossConfig(linear=True, linear_tile_rows=4)
    tiled = last_stage(plan_of(planned_run(loss=loss))).loss
    assert tiled < whole
    assert tiled - 4 * (4 << 20) == 4 * (4 * 2 * 128 + 4 * 128 + TOKENS * 32 + 128 * 32)


def test_packed_rows_bring_masks_and_heads_of_keys_are_repeated_for_them():
    plain, packed = (plan_of(planned_run(packing=p)) for p in (False, True))
    masks = plain.microbatches * (TOKENS * 24 + TEACHER_TOKENS * 40)
    assert last_stage(packed).batch - last_stage(plain).batch == masks
    # Keys and values of 4 heads instead of 2, and a copy of each layer's mask in fp32; values are
    # no longer a part of the product of query, key and value.
    repeated, mask = TOKENS * (2 * 32 - 16), BATCH * 24 * 24
    product = TOKENS * (32 + 2 * 16)
    change = 2 * 4 * (repeated + mask - product)
    assert kept_activations(packed, 0) - kept_activations(plain, 0) == change


@pytest.mark.parametrize(
    ("parallel", "microbatches", "kept"),
    [
        ({}, 4, [1]),
        (PP2, 4, [2, 1]),
        (PP2, 1, [1, 1]),
        ({**PP2, "virtual_pipeline_model_parallel_size": 1}, 2, [2, 1]),
    ],
    ids=["one-stage", "two-stages", "fewer-microbatches", "plain-schedule"],
)
def test_a_stage_keeps_the_microbatches_between_it_and_the_last(parallel, microbatches, kept):
    config = planned_run(global_batch_size=microbatches * BATCH, **parallel)
    plan = plan_of(config, world_size=len(kept))
    assert plan.microbatches == microbatches
    for stage, count in enumerate(kept):
        one = stage_activations(plan, plan.student, stage)
        assert kept_activations(plan, stage) == count * one


def test_an_interleaved_pipeline_keeps_more_on_its_first_stage():
    four = {"num_layers": 4}
    kept = []
    for chunks in (1, 2):
        parallel = PP2 | {"virtual_pipeline_model_parallel_size": chunks}
        config = changed(planned_run(), student=four, teacher={"model": four}, parallel=parallel)
        kept.append(kept_activations(plan_of(config, world_size=2), 0))
    # Two microbatches of two chunks, against five chunks of half a microbatch.
    assert kept[1] / kept[0] == pytest.approx(5 / 4)


def test_recomputed_layers_keep_their_input_and_cost_a_forward_pass_more():
    plain, recompute = plan_of(planned_run()), {"granularity": "full", "method": "uniform"}
    training = {f"recompute_{key}": value for key, value in recompute.items()}
    again = plan_of(changed(planned_run(), training=training | {"recompute_num_layers": 1}))
    inputs = 2 * TOKENS * 32 * 4
    final_norm = TOKENS * (12 * 32 + 4)
    assert stage_activations(again, again.student, 0) == inputs + final_norm
    assert kept_activations(again, 0) < kept_activations(plain, 0)
    ratio = step_arithmetic(again).student_layers / step_arithmetic(plain).student_layers
    assert ratio == pytest.approx(4 / 3)


def test_no_layer_keeps_what_grows_with_the_square_of_a_row():
    local, fused = (plan_of(planned_run(), has_flash=f) for f in (False, True))
    longer = dataclasses.replace(MODELS[0][0], seq_length=48)
    for plan, growth in ((local, pytest.approx(2.0)), (fused, pytest.approx(2.0))):
        long = plan_of(planned_run(longer), has_flash=plan.has_flash)
        ratio = stage_activations(long, long.student, 0) / stage_activations(plan, plan.student, 0)
        assert ratio == growth


def test_gradients_go_around_in_fp32_and_weights_come_back_in_their_own():
    parameters = plan_of(planned_run()).student.parameters(0)
    plain = plan_of(planned_run(precision="bf16"), world_size=4)
    sharded = plan_of(planned_run(precision="bf16", use_distributed_optimizer=True), world_size=4)
    assert wire_bytes(plain, 0).data_parallel == all_reduced(4 * parameters, 4)
    assert wire_bytes(sharded, 0).data_parallel == parameters * (4 + 2) * 3 // 4


def test_ranks_that_share_rows_gather_keys_and_values_and_keep_a_part_of_the_rest():
    whole, cut = plan_of(planned_run()), plan_of(planned_run(**CP2), world_size=2)
    assert (cut.dp, cut.cp, cut.microbatches) == (1, 2, whole.microbatches)
    # Two query groups of eight in the student, four heads of sixteen in the teacher.
    student, teacher = TOKENS * 2 * 16 * 4, TEACHER_TOKENS * 2 * 64 * 4
    halves = 2 * (2 * student + teacher)
    assert wire_bytes(cut, 0).context_parallel == cut.microbatches * halves // 2
    assert wire_bytes(whole, 0).context_parallel == 0
    parameters = whole.student.parameters(0)
    assert wire_bytes(cut, 0).data_parallel == all_reduced(4 * parameters, 2)
    before, after = rank_memory(whole, 0), rank_memory(cut, 0)
    assert after.teacher_targets == before.teacher_targets / 2
    assert after.activations < before.activations
    assert after.student_weights == before.student_weights
    sharded = plan_of(planned_run(**CP2, use_distributed_optimizer=True), world_size=2)
    assert rank_memory(sharded, 0).optimizer_state == before.optimizer_state / 2
    assert step_seconds(cut).context_parallel > step_seconds(whole).context_parallel == 0
    assert step_seconds(cut).student == step_seconds(whole).student / 2


def test_rows_that_do_not_divide_are_filled_up():
    config = planned_run(dataclasses.replace(MODELS[0][0], seq_length=25), **CP2)
    plan = plan_of(config, world_size=2)
    assert plan.row_length(plan.student) == 28
    assert plan.tokens(plan.student) == BATCH * 14


def test_layers_embedding_and_head_are_summed_over_tensor_parallel_ranks():
    plan = plan_of(planned_run(**TP2), world_size=2)
    student, teacher = TOKENS * 32 * 4, TEACHER_TOKENS * 64 * 4
    message = (4 * 2 + 2) * student + (2 * 2 + 1) * teacher
    assert wire_bytes(plan, 0).tensor_parallel == plan.microbatches * message
    assert wire_bytes(plan_of(planned_run()), 0).tensor_parallel == 0


def test_stages_send_hidden_states_on_and_gradients_back():
    plan = plan_of(planned_run(**PP2), world_size=2)
    student, teacher = TOKENS * 32 * 4, TEACHER_TOKENS * 64 * 4
    first, last = (wire_bytes(plan, stage) for stage in (0, 1))
    assert first.pipeline == plan.microbatches * (student + teacher)
    assert last.pipeline == plan.microbatches * student
    # The student's embedding is its head.
    assert first.tied_embedding == last.tied_embedding == 128 * 32 * 4


def test_columns_of_several_ranks_are_sent_for_every_chunk():
    plan = plan_of(planned_run(**TP2), world_size=2)
    crossing = dataclasses.replace(plan, pairs={"teacher": PairCost(crossing_columns=7)})
    statistics = plan.microbatches * 12 * (2 * TOKENS + TEACHER_TOKENS)
    assert wire_bytes(plan, 0).loss == statistics
    assert wire_bytes(crossing, 0).loss == statistics + plan.microbatches * 8 * TOKENS * 7


def test_operations_are_twice_the_weights_for_each_token():
    plan = plan_of(planned_run(**TP2), world_size=2)
    work = step_arithmetic(plan)
    rows, length = 8, 24
    # Query and output of 32, keys and values of 16; three matrices of 96.
    weights = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 96
    assert work.student_layers == 3 * rows * 2 * length * (2 * weights + 4 * length * 32)
    assert work.student_head == 3 * rows * 2 * length * 32 * 256
    assert work.teacher_heads == rows * 2 * 40 * 64 * 256
    assert step_arithmetic(plan_of(planned_run())).student_layers == work.student_layers


def test_more_replicas_take_less_time_and_send_more():
    model = dataclasses.replace(MODELS[0][0], hidden_size=1024, num_layers=8, seq_length=1024)
    few, many = (
        plan_of(planned_run(model, precision="bf16", global_batch_size=1024), world_size=size)
        for size in (8, 512)
    )
    assert step_seconds(many).total < step_seconds(few).total
    assert step_seconds(many).data_parallel > step_seconds(few).data_parallel
    assert sum(step_seconds(few).shares().values()) == pytest.approx(1)


def test_a_pipeline_waits_less_the_more_microbatches_it_has():
    few, many = (
        step_seconds(plan_of(planned_run(global_batch_size=rows, **PP2), world_size=2))
        for rows in (4, 32)
    )
    assert few.bubble == pytest.approx((few.student + few.teachers) / 2)
    assert many.bubble == pytest.approx((many.student + many.teachers) / 16)

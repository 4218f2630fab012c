"""Megatron-LM's loop learns what ours does, from the functions that its ``pretrain`` is given."""

import argparse
import dataclasses
import inspect
import os
from types import SimpleNamespace

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.megatron_lm.loop_arguments import (
    check_arguments,
    check_padded_vocab_size,
    loop_flags,
)
from megatron_ext.megatron_lm.pretrain import PretrainDistillation
from megatron_ext.training.configuration.config import LossConfig
from tests.process_group import run_ranks
from tests.training.pretrain_runs import (
    STEPS,
    TERMS,
    arguments_of,
    pretrain_config,
    train_and_resume,
)
from tests.training.release_parser import RELEASES, release_parser
from tests.training.tiny_run import PP2, STUDENT_VOCAB_SIZE, changed

LAYOUTS = {
    "dp2-sharded-optimizer": {"use_distributed_optimizer": True},
    "pp2": PP2,
    "pp2-vp2-bf16": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "precision": "bf16",
    },
}
if os.environ.get("MEGATRON_EXT_ALL_TEXT"):
    # Two processes more, which import everything.
    LAYOUTS["pp2-teacher-elsewhere"] = {**PP2, "placement": "process"}


@pytest.fixture(scope="module")
def found(folder):
    return run_ranks(2, train_and_resume, folder, LAYOUTS, timeout_s=240)


@pytest.fixture
def runs(found):
    return [runs for runs, _ in found]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_step_has_the_losses_and_the_gradient_of_our_own_loop(runs, layout):
    ours, lent = runs[-1][layout]
    assert len(ours) == STEPS
    for row, logged in zip(ours, lent, strict=False):
        # Megatron-LM scales the loss by the number of microbatches, and the gradient back.
        assert {name: logged[name] for name in TERMS} == pytest.approx(
            {name: row[name] for name in TERMS}, rel=1e-5
        )
    assert ours[0]["loss"] != pytest.approx(ours[1]["loss"], rel=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_held_out_text_is_measured_by_the_same_terms(runs, layout):
    held_out = runs[-1][layout][1][STEPS]
    assert set(held_out) == {"loss", "ce", "kd"}
    assert held_out["loss"] == pytest.approx(held_out["kd"] + held_out["ce"] / 2, rel=1e-5)


def test_a_stage_without_a_head_reports_nothing(runs):
    assert [set(row) for row in runs[0]["pp2"][1]] == [{"grad_norm"}, {"grad_norm"}, set()]


def test_the_text_goes_on_where_a_checkpoint_says_it_stood(found):
    for _, resumed in found:
        assert resumed.from_a_state == resumed.at_once
        assert resumed.by_reading_again == resumed.at_once
        # One for the tokens, and without a state the one before.
        assert resumed.reads == [1, 2]


def test_the_functions_take_what_every_release_passes():
    provide, forward = PretrainDistillation.model_provider, PretrainDistillation.forward_step
    me = object()
    # 0.16, and the main branch in August 2026.
    inspect.signature(provide).bind(me, pre_process=True, post_process=False)
    options = {"vp_stage": None, "config": None, "pg_collection": None}
    inspect.signature(provide).bind(me, pre_process=True, post_process=False, **options)
    datasets = PretrainDistillation.datasets_provider
    inspect.signature(datasets).bind(me, [1, 1, 1])
    inspect.signature(datasets).bind(me, [1, 1, 1], vp_stage=0)
    assert datasets.is_distributed
    inspect.signature(forward).bind(me, iter([]), object())


def test_the_folder_of_the_text_is_a_flag_where_a_release_has_none():
    for known in ((), ("--dataloader-save",)):
        parser = argparse.ArgumentParser()
        for flag in known:
            parser.add_argument(flag)
        PretrainDistillation.add_arguments(parser)
        assert parser.parse_args(["--dataloader-save", "text"]).dataloader_save == "text"


def switched_on(section, **values):
    """A section of a configuration with every switch on but those of experts."""
    names = [field.name for field in dataclasses.fields(section)]
    on = {
        name: True
        for name in names
        if isinstance(getattr(section, name), bool) and not name.startswith("moe_")
    }
    return dataclasses.replace(section, **{**on, **values})


@pytest.mark.parametrize("release", RELEASES)
def test_every_flag_of_a_run_is_one_that_the_release_has(tmp_path, release):
    plain = pretrain_config(tmp_path, "run")
    parts = ("tensor", "pipeline", "virtual_pipeline")
    full = changed(
        plain,
        # Text alone: a teacher would have to divide over the layout, too.
        teacher=None,
        loss=LossConfig(objective="next_token"),
        # These two go neither with norms behind layers nor with this loop.
        student=switched_on(
            plain.student, seq_length=40, add_bias_linear=False, parallel_residual=False
        ),
        training={"precision": "bf16"},
        parallel=switched_on(
            plain.parallel, **{f"{part}_model_parallel_size": 2 for part in parts}
        ),
    )
    for config in (plain, full):
        words = loop_flags(config, vocab_size=STUDENT_VOCAB_SIZE)
        _, unknown = release_parser(release).parse_known_args(words)
        assert unknown == []


@pytest.mark.parametrize("release", RELEASES)
def test_every_argument_that_is_checked_is_one_that_the_release_has(tmp_path, release):
    asked = set()

    class Asked:
        def __getattr__(self, name):
            asked.add(name)
            raise AttributeError(name)

    check_arguments(Asked(), pretrain_config(tmp_path, "run"))
    assert len(asked) > 20
    # What follows the parser computes this one.
    made = {action.dest for action in release_parser(release)._actions}
    assert asked - made == {"virtual_pipeline_model_parallel_size"}


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("tensor_model_parallel_size", 2),
        ("global_batch_size", 16),
        ("seq_length", 40),
        ("bf16", True),
        ("dataloader_type", "single"),
        ("num_layers", 8),
        ("num_query_groups", 4),
        ("context_parallel_size", 2),
        ("iterations_to_skip", [3]),
    ],
)
def test_arguments_of_another_run_are_refused(tmp_path, flag, value):
    config = pretrain_config(tmp_path, "run")
    check_arguments(SimpleNamespace(**arguments_of(config)), config)
    changed = {**arguments_of(config), flag: value}
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')}"):
        check_arguments(SimpleNamespace(**changed), config)


def test_evaluation_without_held_out_text_is_refused(tmp_path):
    config = pretrain_config(tmp_path, "run")
    config = changed(config, data={"validation": ()})
    arguments = arguments_of(config)
    assert arguments["eval_iters"] == 0
    check_arguments(SimpleNamespace(**arguments), config)
    with pytest.raises(ConfigError, match="--eval-iters"):
        check_arguments(SimpleNamespace(**{**arguments, "eval_iters": 10}), config)


def test_a_vocabulary_of_another_size_is_refused():
    check_padded_vocab_size(SimpleNamespace(padded_vocab_size=8064), 8064)
    with pytest.raises(ConfigError, match="--padded-vocab-size"):
        check_padded_vocab_size(SimpleNamespace(padded_vocab_size=8192), 8064)


def test_what_megatron_has_a_flag_for_is_passed(tmp_path):
    config = pretrain_config(tmp_path, "run")
    student = {"layernorm_zero_centered_gamma": True, "rotary_seq_len_interpolation_factor": 8.0}
    flags = " ".join(loop_flags(changed(config, student=student), vocab_size=100))
    assert "--apply-layernorm-1p " in flags
    assert "--rotary-seq-len-interpolation-factor 8 " in flags


def test_what_only_our_loop_has_is_refused(tmp_path):
    config = pretrain_config(tmp_path, "run")
    config = changed(config, training={"vocabulary_layout": "co_sharded"})
    with pytest.raises(ConfigError, match=r"training\.vocabulary_layout"):
        PretrainDistillation(config, SimpleNamespace)


def test_a_teacher_elsewhere_is_taken_but_not_on_ranks_of_the_launch(tmp_path):
    config = pretrain_config(tmp_path, "run")
    PretrainDistillation(changed(config, teacher={"placement": "process"}), SimpleNamespace)
    own = {"placement": "own_ranks", "serving": {"ranks": 1}}
    with pytest.raises(ConfigError, match=r"teacher\.placement"):
        PretrainDistillation(changed(config, teacher=own), SimpleNamespace)

"""A teacher that is the moving average of its student, the same under every layout."""

import os
from dataclasses import replace

import pytest
import torch

from megatron_ext.errors import ConfigError
from megatron_ext.tokenizers import TokenizerConfig
from megatron_ext.training.configuration.config import (
    DistillConfig,
    LossConfig,
    ParallelConfig,
    TeacherConfig,
)
from megatron_ext.training.configuration.lora import LoraConfig
from megatron_ext.training.configuration.yaml_file import with_huggingface_models
from megatron_ext.training.dry_run.dry_run import dry_run
from megatron_ext.training.dry_run.memory import rank_memory
from megatron_ext.training.dry_run.plan import Plan
from megatron_ext.training.inputs import read_inputs
from megatron_ext.training.metrics import read_metrics
from megatron_ext.training.run_folder import config_values
from megatron_ext.training.run_plan import RunPlan
from megatron_ext.typed_mapping import build_config
from tests.process_group import run_ranks
from tests.training.rank_functions import _trainer, go_back, save_start
from tests.training.run_results import (
    assert_identical,
    assert_same_numbers,
    assert_same_weights,
    weights_of,
)
from tests.training.tiny_run import (
    CP2,
    PP2,
    STUDENT_VOCAB_SIZE,
    TP2,
    changed,
    checkpoints,
    student_run,
)

DECAY, STEPS = 0.6, 2
PREFIX = "averages.teacher."
BF16 = {"precision": "bf16", "use_distributed_optimizer": True}
ADAPTED = BF16 | {"lora": LoraConfig(rank=2, targets=("linear_qkv", "linear_fc2"))}
SIZES = {"seq_length": 40}
EXPERTS = SIZES | {
    "num_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_router_score_function": "sigmoid",
    "moe_router_bias_update_rate": 0.01,
}
ALL = bool(os.environ.get("MEGATRON_EXT_ALL_TEXT"))
ALONE = {"alone": {}, "adapted": ADAPTED}
LAYOUTS = {"tp2": TP2}
AGAIN = {"adapted-again": ("adapted", ADAPTED)}
if ALL:
    ALONE |= {"bf16": BF16, "experts": {}}
    AGAIN |= {"bf16-again": ("bf16", BF16), "again": ("alone", {}), "from-tp2": ("tp2", {})}
    LAYOUTS |= {
        "pp2": PP2,
        "dp2": {"use_distributed_optimizer": True},
        "cp2": CP2,
        "sp2": TP2 | {"sequence_parallel": True, "use_distributed_optimizer": True},
        "experts-ep2": {"expert_model_parallel_size": 2},
    }


def averaged_run(folder, name, *, precision="fp32", lora=None, **parallel):
    """Some steps of a student by its own average, from the first weights in ``folder``."""
    has_experts = name.startswith("experts")
    config = changed(
        student_run(folder, name),
        student=EXPERTS if has_experts else SIZES,
        teacher=None,
        loss=LossConfig(objective="next_token"),
    )
    config = changed(
        config,
        loss=LossConfig(objective="vocab_kl", ce_weight=0.5),
        teacher=TeacherConfig(
            tokenizer=config.tokenizer, model=config.student, checkpoint="", ema_decay=DECAY
        ),
        training={
            "train_iters": STEPS,
            "save_interval": 1,
            "keep_checkpoints": STEPS,
            "precision": precision,
        },
        optimizer={"lr": 1e-2 if precision == "bf16" else 1e-3},
        initial_checkpoint=checkpoints(folder, _start_of(name)),
        lora=lora,
        data={"validation": ()},
    )
    return replace(config, parallel=ParallelConfig(**parallel))


def _start_of(name):
    return "experts-start" if name.startswith("experts") else "start"


def train(rank, folder, runs):
    for name, settings in runs.items():
        start = _start_of(name)
        if not (folder / start).exists():
            save_start(replace(averaged_run(folder, start), initial_checkpoint=None))
        trainer = _trainer(averaged_run(folder, name, **settings))
        assert not trainer.held_out_scores, "what an average says of the held-out text changes"
        trainer.train()


def go_on(rank, folder, runs):
    for name, (of, settings) in runs.items():
        go_back(rank, folder, name, STEPS - 1, of=of)
        _trainer(averaged_run(folder, name, **settings)).train()


@pytest.fixture(scope="module")
def runs(folder):
    run_ranks(1, train, folder, ALONE)
    run_ranks(2, train, folder, LAYOUTS)
    run_ranks(1, go_on, folder, AGAIN)
    return folder


def averages_of(run, step):
    """Averages of a checkpoint by the names of the weights that they are of."""
    weights = weights_of(run, step)
    return {
        name.removeprefix(PREFIX): tensor
        for name, tensor in weights.items()
        if name.startswith(PREFIX)
    }


@pytest.mark.parametrize("name", ALONE)
def test_the_average_is_that_of_the_weights_after_each_step(runs, name):
    first, means = weights_of(runs / _start_of(name), 0), {}
    for step in range(1, STEPS + 1):
        weights, averages = weights_of(runs / name, step), averages_of(runs / name, step)
        learning = {k for k in weights if not k.startswith(PREFIX) and "expert_bias" not in k}
        if name == "adapted":
            learning = {key for key in learning if ".lora." in key}
        assert averages.keys() == learning
        for key in learning:
            assert averages[key].dtype == torch.float32
            if step == 1 and key.endswith(".lora.a"):
                # It is drawn where the adapter is made.
                means[key] = averages[key].double()
                continue
            before = means[key] if step > 1 else _start(first.get(key), weights[key])
            means[key] = DECAY * before + (1 - DECAY) * weights[key].double()
            torch.testing.assert_close(averages[key].double(), means[key], rtol=1e-6, atol=1e-8)
        assert any(not torch.equal(averages[key], weights[key].float()) for key in learning)


def _start(first, weight):
    """First weights as the run has them, in its precision; of an adapter's second matrix 0."""
    return torch.zeros_like(weight).double() if first is None else first.to(weight.dtype).double()


@pytest.mark.parametrize("name", ALONE)
def test_a_student_agrees_with_its_average_until_it_moves(runs, name):
    first, *later = read_metrics(runs / name)
    assert first["kd"] == pytest.approx(0.0, abs=1e-6)
    assert all(row["kd"] > max(first["kd"], 0) for row in later)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_average_alike(runs, name):
    alone = runs / ("experts" if name.startswith("experts") else "alone")
    assert_same_numbers(read_metrics(runs / name), read_metrics(alone), ("loss", "ce"))
    assert_same_weights(runs / name, alone, STEPS)


@pytest.mark.parametrize("after", [name for name in AGAIN if name.endswith("again")])
def test_a_run_goes_on_bit_for_bit(runs, after):
    assert_identical(runs / after, runs / AGAIN[after][0], STEPS)


def built(folder, **teacher):
    """The configuration of a file with this section of the teacher."""
    values = config_values(averaged_run(folder, "file")) | {"teacher": teacher}
    return build_config(DistillConfig, with_huggingface_models(values), ".".join)


def test_an_average_has_the_student_s_model_and_tokenizer(folder):
    config = built(folder, ema_decay=0.99, model={"seq_length": 80})
    assert config.teacher.model == replace(config.student, seq_length=80)
    assert config.teacher.tokenizer == config.tokenizer
    # A template of the student's is not the teacher's, who may read a prompt that it leaves out.
    own = {"model": config.tokenizer.model, "prompt_format": "auto"}
    teacher = built(folder, ema_decay=0.99, tokenizer=own).teacher
    assert teacher.tokenizer == TokenizerConfig(**own)


@pytest.mark.parametrize(
    ("section", "error"),
    [
        ({"ema_decay": 1.0}, "ema_decay: an average of the student cannot decay so; got 1.0"),
        ({"checkpoint": "other"}, "begins as the student does; got other with ema_decay 0.9"),
        ({"model": {"num_layers": 4}}, "teacher.model.num_layers: .* got 4; expected 2"),
        ({"placement": "process"}, "teacher.ema_decay 0.9 with teacher.placement process"),
        ({"offload": True}, "teacher.ema_decay 0.9 with teacher.offload true"),
    ],
    ids=["decay", "checkpoint", "model", "placement", "offload"],
)
def test_what_an_average_cannot_have_is_refused(folder, section, error):
    with pytest.raises(ConfigError, match=error):
        built(folder, **{"ema_decay": 0.9} | section)


def test_an_average_of_another_vocabulary_is_refused(folder):
    config = averaged_run(folder, "other")
    other = student_run(folder, "other").teacher.tokenizer
    config = changed(config, teacher={"tokenizer": other}, loss={"objective": "projected_kl"})
    with pytest.raises(ConfigError, match="average of the student is a teacher with the student's"):
        read_inputs(config, world_size=1)


@pytest.mark.parametrize(
    ("name", "settings", "each"),
    [("alone", {}, 4), ("adapted", ADAPTED, 6)],
)
def test_a_dry_run_counts_what_is_averaged(runs, name, settings, each):
    config = averaged_run(runs, name, **settings)
    rows = {"teacher": config.student.head_rows(STUDENT_VOCAB_SIZE, tensor_ranks=1)}
    plan = Plan.of(
        RunPlan.of(config), world_size=1, vocab_size=STUDENT_VOCAB_SIZE, teacher_rows=rows
    )
    averaged = sum(tensor.numel() for tensor in averages_of(runs / name, STEPS).values())
    assert rank_memory(plan, 0).teacher_weights == each * averaged


def test_a_dry_run_says_that_the_teacher_is_an_average(runs):
    report = dry_run(replace(averaged_run(runs, "dry"), initial_checkpoint=None), world_size=1)
    assert "teacher     the average of the student, of which an update keeps 0.6" in report


@pytest.mark.skipif(not ALL, reason="runs are kept with MEGATRON_EXT_ALL_TEXT")
def test_a_run_goes_on_under_another_layout(runs):
    assert_same_weights(runs / "from-tp2", runs / "alone", STEPS)

"""A student learns hidden states of layers, the same under every layout."""

import os
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from megatron_ext.errors import ConfigError
from megatron_ext.losses import StateProjectors
from megatron_ext.losses.objective import LAST_LAYER
from megatron_ext.training.configuration.config import LossConfig, ParallelConfig
from megatron_ext.training.dry_run.memory import rank_memory
from megatron_ext.training.megatron_models.student_head import StudentHidden
from megatron_ext.training.metrics import read_metrics
from tests.process_group import run_ranks
from tests.training.dry_run.planned_runs import plan_of, planned_run
from tests.training.rank_functions import _train_teacher, _trainer
from tests.training.run_results import assert_same_numbers, assert_same_weights, weights_of
from tests.training.test_loss_configuration import check, config_of
from tests.training.tiny_run import CP2, PP2, TP2, changed, objective_run

PAIRS = [[-1, -1], [1, 1]]
CROSSED = [[-1, 1], [-1, -1]]
"""The student's last layer with both of the teacher's."""

MSE = LossConfig(objective="hidden_mse", options={"layers": PAIRS}, ce_weight=0.5)
PIPELINED = LossConfig(objective="hidden_cosine", options={"layers": CROSSED}, ce_weight=0.5)
ALONE = LossConfig(objective="hidden_mse", options={"layers": PAIRS}, ce_weight=0.0)
RUNS = {"mse": MSE}
LAYOUTS = {}
"""Other tests have layers under TP and CP, and a teacher's on another stage."""
if os.environ.get("MEGATRON_EXT_ALL_TEXT"):
    RUNS |= {"pipelined": PIPELINED, "states-alone": ALONE}
    LAYOUTS |= {"mse-dp2": {}, "mse-cp2": CP2, "mse-tp2": TP2}
    LAYOUTS |= {"mse-tp2-cut": TP2 | {"sequence_parallel": True}}
    LAYOUTS |= {"pipelined-pp2": PP2, "pipelined-cp2": CP2}
    # Waits for a gradient of every parameter, the head's too.
    LAYOUTS["states-alone-dp2"] = {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
    }


def train(rank, folder, runs):
    if not (folder / "teacher").exists():
        _train_teacher(folder)
    for name, (loss, parallel) in runs.items():
        _trainer(_run_of(folder, name, loss, parallel)).train()


def _run_of(folder, name, loss, parallel):
    """Two steps on rows whose lengths divide over two ranks."""
    config = changed(
        objective_run(folder, name, loss),
        student={"seq_length": 40},
        teacher={"model": {"seq_length": 52}},
    )
    return replace(config, parallel=ParallelConfig(**parallel))


@pytest.fixture(scope="module")
def runs(folder):
    run_ranks(1, train, folder, {name: (loss, {}) for name, loss in RUNS.items()})
    sharded = {name: (RUNS[_of(name)], parallel) for name, parallel in LAYOUTS.items()}
    if sharded:
        run_ranks(2, train, folder, sharded)
    return folder


def _of(name):
    return max((run for run in RUNS if name.startswith(run)), key=len)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_learn_the_same_states(runs, name):
    alone = read_metrics(runs / _of(name))
    terms = [term for term in alone[0] if term.startswith("kd/layers/")]
    assert len(terms) == len(PAIRS)
    assert all(0 < row["compared"] < row["chunks"] for row in alone)
    assert_same_numbers(
        read_metrics(runs / name), alone, ("loss", "kd", *terms), exact=("compared",)
    )
    assert_same_weights(runs / name, runs / _of(name))


@pytest.mark.parametrize("name", [name for name in RUNS if name != "pipelined"])
def test_projections_and_layers_learn(runs, name):
    start, end = weights_of(runs / "start", 0), weights_of(runs / name)
    # The head is that of the embeddings, which learn; all layers are below the last states.
    assert all(not torch.equal(weight, end[key]) for key, weight in start.items())
    first, last = read_metrics(runs / name)
    assert last["kd"] < first["kd"]
    seed = objective_run(runs, name, MSE).training.seed
    drawn = StateProjectors(
        student_hidden=32, teacher_hidden=48, layers=((-1, -1), (1, 1)), seed=seed
    )
    for key, weight in drawn.named_parameters():
        learned = end[f"distillation_projectors.{key}"]
        assert 0 < (learned - weight).abs().max() < 0.01


def states_of_layers(rank, folder):
    """The kept states, and the last ones that follow from those of the first layer; of both
    models, the teacher's being two teachers."""
    config = _run_of(folder, "looked-at", MSE, {})
    alm = replace(config.teacher, objective="alm", options={"debias": False})
    trainer = _trainer(
        replace(config, teacher=None, teachers={"likelihood": alm, "states": config.teacher})
    )
    student, teacher = trainer.student.chunks[0], trainer.teachers["states"]
    batches = trainer.microbatches()
    for microbatch in trainer.with_targets(batches):
        assert microbatch.targets["states"] is microbatch.targets["likelihood"]
    batch = batches[0]
    kept = StudentHidden(student, (1,))
    with torch.no_grad():
        _run(student, batch.student)
        found = [(kept.take(), student, batch.student)]
    (targets,) = teacher.targets([batch.teachers["states"]])
    of_teacher = {LAST_LAYER: targets.hidden, **targets.states}
    found.append((of_teacher, teacher.chunks[0], batch.teachers["states"]))
    results = []
    for states, model, inputs in found:
        with torch.no_grad(), _second_layer(model):
            final = []
            hook = model.output_layer.register_forward_pre_hook(lambda _, x, to=final: to.append(x))
            _run(model, inputs, decoder_input=states[1].transpose(0, 1).contiguous())
            hook.remove()
        results.append((set(states), states[LAST_LAYER], final[0][0].transpose(0, 1)))
    return results


def _run(model, inputs, **arguments):
    model(inputs.tokens, inputs.position_ids, inputs.attention_mask, **arguments)


@contextmanager
def _second_layer(model):
    layers = model.decoder.layers
    model.decoder.layers = layers[1:]
    try:
        yield
    finally:
        model.decoder.layers = layers


def test_states_are_those_of_the_layers_that_are_named(runs):
    (found,) = run_ranks(1, states_of_layers, runs)
    for layers, last, from_first in found:
        assert layers == {1, LAST_LAYER}
        torch.testing.assert_close(from_first, last, rtol=1e-5, atol=1e-6)


def _config(loss, **parallel):
    values = {"objective": "hidden_mse", "options": loss}
    return config_of(loss=values, parallel=parallel)


@pytest.mark.parametrize(
    ("options", "parallel", "error"),
    [
        ({"layers": [[1, -1]]}, PP2, r"loss\.options\.layers: states of the student are compared"),
        ({"layers": [[3, -1]]}, {}, r"loss\.options\.layers: student: the model has no such layer"),
        ({"layers": [[-1, 9]]}, {}, r"loss\.options\.layers: teacher: .*got 9"),
        ({"layers": [[-1]]}, {}, r"loss\.options\.layers: .*expected a list of 2 int"),
        ({"layers": [-1, -1]}, {}, r"loss\.options\.layers"),
        ({"projectors": "heads"}, {}, "no such start of projectors"),
    ],
    ids=["stage", "student", "teacher", "length", "flat", "heads"],
)
def test_layers_that_cannot_be_compared_are_refused(options, parallel, error):
    with pytest.raises(ConfigError, match=error):
        check(_config(options, **parallel))


def test_a_dry_run_counts_the_states_of_every_layer():
    last = planned_run(loss=LossConfig(objective="hidden_mse"))
    both = changed(last, loss={"options": {"layers": PAIRS}})
    targets = [rank_memory(plan_of(config), 0).teacher_targets for config in (last, both)]
    assert targets[1] == 2 * targets[0] > 0


def test_sections_of_one_checkpoint_have_one_model():
    alone = planned_run(loss=LossConfig(objective="hidden_mse", options={"layers": PAIRS}))
    its = alone.teacher
    two = {
        "likelihood": replace(its, objective="alm", weight=0.5),
        "states": its,
        "other": replace(its, checkpoint="other"),
    }
    plans = [plan_of(config) for config in (alone, replace(alone, teacher=None, teachers=two))]
    assert plans[1].models == ["likelihood", "other"]
    one, both = (rank_memory(plan, 0) for plan in plans)
    assert both.teacher_weights == 2 * one.teacher_weights
    # The states of both layers, which the second section reads of the first one's model.
    assert both.teacher_targets == 2 * one.teacher_targets

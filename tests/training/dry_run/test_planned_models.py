"""What a dry run counts is what megatron-core's models, autograd and optimizers really hold."""

import pytest

from megatron_ext.training.dry_run.memory import rank_memory, stage_activations
from megatron_ext.training.dry_run.plan import ModelShape
from tests.process_group import run_ranks
from tests.training.dry_run.planned_ranks import measure_models, measure_optimizer
from tests.training.dry_run.planned_runs import MODELS, PADDED_VOCABULARY, plan_of, planned_run

NAMES = ["rmsnorm-groups", "bf16", "gelu-untied", "layernorm-learned-positions"]
LAYOUTS = {
    "alone": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
}


@pytest.fixture(scope="module")
def measured():
    """Of each layout and rank, every model."""
    return {
        name: run_ranks(2 if layout else 1, measure_models, layout, MODELS)
        for name, layout in LAYOUTS.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", range(len(MODELS)), ids=NAMES)
def test_every_rank_has_the_parameters_that_are_planned(measured, layout, number):
    sizes = LAYOUTS[layout]
    shape = ModelShape(
        model=MODELS[number][0],
        padded_vocab_size=PADDED_VOCABULARY,
        tp=sizes.get("tensor_model_parallel_size", 1),
        pp=sizes.get("pipeline_model_parallel_size", 1),
    )
    for rank in measured[layout]:
        assert shape.parameters(rank[number].stage) == rank[number].parameters


@pytest.mark.parametrize("layout", ["alone", "tp2", "cp2"])
@pytest.mark.parametrize("number", range(len(MODELS)), ids=NAMES)
def test_the_forward_pass_keeps_the_activations_that_are_planned(measured, layout, number):
    model, precision = MODELS[number]
    plan = plan_of(planned_run(model, precision=precision, **LAYOUTS[layout]), world_size=2)
    expected = stage_activations(plan, plan.student, stage=0)
    for rank in measured[layout]:
        # Layers share a few tensors of the size of a row; the embedding keeps nothing.
        assert rank[number].activations == pytest.approx(expected, rel=0.03)


def test_weights_gradients_and_moments_take_what_is_planned():
    cases = [(p, is_sharded) for p in ("fp32", "bf16") for is_sharded in (False, True)]
    ranks = run_ranks(2, measure_optimizer, cases)
    for number, (precision, is_sharded) in enumerate(cases):
        config = planned_run(precision=precision, use_distributed_optimizer=is_sharded)
        plan = plan_of(config, world_size=2)
        memory = rank_memory(plan, 0)
        found = [rank[number] for rank in ranks]
        for rank in found:
            assert rank["weights"] == memory.student_weights
            # Buffers are filled up so that every replica has an equal part.
            assert rank["gradients"] == pytest.approx(memory.gradients, rel=0.02)
        mean = sum(rank["optimizer_state"] for rank in found) / len(found)
        assert mean == pytest.approx(memory.optimizer_state, rel=0.02)

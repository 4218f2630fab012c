"""What a dry run counts is what megatron-core's models, autograd and optimizers really hold."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from megatron_ext.distributed.layout import Layout
from megatron_ext.training.configuration.config import ParallelConfig, TrainingConfig
from megatron_ext.training.configuration.lora import LINEAR_LAYERS, LoraConfig
from megatron_ext.training.dry_run.memory import rank_memory, stage_activations
from megatron_ext.training.dry_run.plan import ModelShape
from megatron_ext.training.megatron_models.learning_parts import add_adapters, freeze_parts
from megatron_ext.training.megatron_models.models import build_model_chunks
from megatron_ext.training.run_plan import RunPlan
from megatron_ext.training.student import Student
from tests.process_group import run_ranks
from tests.training.dry_run.planned_runs import (
    BATCH,
    EXPERTS,
    HYBRID,
    LATENT,
    MODELS,
    OF_FAMILIES,
    PADDED_VOCABULARY,
    plan_of,
    planned_run,
)
from tests.training.rank_functions import fresh_groups
from tests.training.tiny_run import CP2, PP2, TP2, changed


class Kept(NamedTuple):
    """What a run keeps, and what of it learns."""

    precision: str = "fp32"
    use_distributed_optimizer: bool = False
    lora: LoraConfig | None = None
    parts: tuple[str, ...] | None = None
    has_experts: bool = False
    """Experts are over both ranks then."""


def _run_of(case):
    config = planned_run(
        EXPERTS[0][0] if case.has_experts else None,
        precision=case.precision,
        use_distributed_optimizer=case.use_distributed_optimizer,
        expert_model_parallel_size=1 + case.has_experts,
    )
    return changed(config, lora=case.lora, training={"trainable": case.parts})


class Measured(NamedTuple):
    """On one rank, for one model."""

    stage: int
    parameters: int
    activations: int | None
    """Bytes that one microbatch's forward pass saves, of a layout with one stage."""


def measure_models(rank, layout, models):
    """Every model, with its precision, under a layout."""
    groups = fresh_groups(Layout(**layout))
    return [_measured(model, precision, layout, groups) for model, precision in models]


def measure_optimizer(rank, cases):
    """Bytes of what a student's training keeps on this rank, after a step."""
    found = []
    for case in cases:
        config = _run_of(case)
        groups = fresh_groups(config.parallel.layout)
        chunks = build_model_chunks(
            config.student,
            padded_vocab_size=PADDED_VOCABULARY,
            parallel=config.parallel,
            training=config.training,
            groups=groups,
        )
        if config.lora:
            add_adapters(chunks, config.lora, seed=1)
        freeze_parts(chunks, config.training.trainable)
        student = Student(chunks, RunPlan.of(config))
        for weight in chunks[0].parameters():
            if weight.requires_grad:
                weight.main_grad.fill_(1e-3)
        student.update()
        buffers = [b for ddp in student.ddp for b in ddp.buffers + ddp.expert_parallel_buffers]
        found.append(
            {
                "filled": 256 * sum(weight.requires_grad for weight in chunks[0].parameters()),
                "weights": _bytes(chunks[0].parameters()),
                "gradients": sum(b.grad_data.nbytes for b in buffers),
                "optimizer_state": _optimizer_bytes(student.optimizer, case.precision),
            }
        )
    return found


def _measured(model, precision, layout, groups):
    (gpt,) = build_model_chunks(
        model,
        padded_vocab_size=PADDED_VOCABULARY,
        parallel=ParallelConfig(**layout),
        training=TrainingConfig(train_iters=1, precision=precision),
        groups=groups,
    )
    parameters = sum(weight.numel() for weight in gpt.parameters())
    is_whole = groups.is_first_stage and groups.is_last_stage
    return Measured(groups.pp_rank, parameters, _saved_bytes(gpt, model) if is_whole else None)


def _saved_bytes(gpt, model):
    """Bytes of all that autograd keeps of a forward pass to the last hidden states."""
    weights = {weight.untyped_storage().data_ptr() for weight in gpt.parameters()}
    length = model.seq_length // gpt.config.context_parallel_size
    tokens = torch.zeros(BATCH, length, dtype=torch.long)
    inputs = {tokens.untyped_storage().data_ptr()}
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights | inputs:
            saved[storage.data_ptr()] = storage
        return tensor

    gpt.post_process = False
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = gpt(tokens, torch.arange(length).expand(BATCH, -1), None)
    # What the head would keep of it.
    keep(hidden)
    return sum(storage.nbytes() for storage in saved.values())


def _optimizer_bytes(optimizer, precision):
    total = 0
    for one in optimizer.chained_optimizers:
        for state in one.optimizer.state.values():
            total += _bytes(value for name, value in state.items() if name.startswith("exp_avg"))
        if precision == "bf16":
            # The fp32 weights that AdamW moves.
            total += _bytes(w for group in one.optimizer.param_groups for w in group["params"])
    return total


def _bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


SEQUENCE_TP2 = TP2 | {"sequence_parallel": True}
EXPERT_LAYOUTS = {
    "ep2": {"expert_model_parallel_size": 2},
    "tp2": SEQUENCE_TP2,
    "ep2-of-tp2": SEQUENCE_TP2
    | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
}
NAMES = ["rmsnorm-groups", "bf16", "gelu-untied", "layernorm-learned-positions", "window"]
LAYOUTS = {"alone": {}, "tp2": TP2, "pp2": PP2, "cp2": CP2}


@pytest.fixture(scope="module")
def measured():
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


def measure_layouts(rank, layouts, models):
    """``measure_models`` of each layout."""
    return [measure_models(rank, layout, models) for layout in layouts]


def test_layers_of_families_have_the_parameters_that_are_planned():
    layouts, models = {"tp2": TP2, "pp2": PP2}, [(model, "fp32") for model in OF_FAMILIES.values()]
    ranks = run_ranks(2, measure_layouts, [*layouts.values()], models)
    for number, layout in enumerate(layouts):
        tp, pp = (2, 1) if layout == "tp2" else (1, 2)
        for index, (name, model) in enumerate(OF_FAMILIES.items()):
            shape = ModelShape(model=model, padded_vocab_size=PADDED_VOCABULARY, tp=tp, pp=pp)
            for rank in ranks:
                found = rank[number][index]
                assert shape.parameters(found.stage) == found.parameters, (name, layout)


@pytest.mark.parametrize("layout", ["alone", "tp2"])
def test_linear_attention_keeps_the_activations_that_are_planned(layout):
    # What norms of queries and keys keep is not planned.
    model = replace(HYBRID, qk_layernorm=False)
    models = [(model, precision) for precision in ("fp32", "bf16")]
    ranks = run_ranks(2 if layout == "tp2" else 1, measure_models, LAYOUTS[layout], models)
    for number, (model, precision) in enumerate(models):
        plan = plan_of(planned_run(model, precision=precision, **LAYOUTS[layout]), world_size=2)
        expected = stage_activations(plan, plan.student, stage=0)
        for rank in ranks:
            assert rank[number].activations == pytest.approx(expected, rel=0.03)


def test_dense_layers_and_those_of_experts_have_the_parameters_that_are_planned():
    sizes = [{"pp": 2}, {"tp": 2, "etp": 2}]
    ranks = run_ranks(2, measure_layouts, [PP2, SEQUENCE_TP2], [(LATENT, "fp32")])
    for number, split in enumerate(sizes):
        shape = ModelShape(
            model=LATENT, padded_vocab_size=PADDED_VOCABULARY, **{"tp": 1, "pp": 1, **split}
        )
        for rank in ranks:
            (found,) = rank[number]
            assert shape.parameters(found.stage) == found.parameters


@pytest.fixture(scope="module")
def measured_experts():
    ranks = run_ranks(2, measure_layouts, [*EXPERT_LAYOUTS.values()], EXPERTS)
    return dict(zip(EXPERT_LAYOUTS, zip(*ranks, strict=True), strict=True))


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
@pytest.mark.parametrize("number", range(len(EXPERTS)), ids=["fp32", "bf16", "sinks"])
def test_a_model_with_experts_has_the_parameters_and_activations_that_are_planned(
    measured_experts, layout, number
):
    model, precision = EXPERTS[number]
    config = planned_run(model, precision=precision, **EXPERT_LAYOUTS[layout])
    plan = plan_of(config, world_size=2)
    shape = replace(plan.student, padded_vocab_size=PADDED_VOCABULARY)
    ranks = [rank[number] for rank in measured_experts[layout]]
    for rank in ranks:
        assert shape.parameters(rank.stage) == rank.parameters
    # Which expert a token goes to is not known: the ranks have the planned number on average.
    mean = sum(rank.activations for rank in ranks) / len(ranks)
    assert mean == pytest.approx(stage_activations(plan, plan.student, stage=0), rel=0.03)


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
    lora = LoraConfig(rank=3, targets=("linear_qkv", "linear_fc2"))
    cases = [Kept(p, is_sharded) for p in ("fp32", "bf16") for is_sharded in (False, True)]
    cases += [Kept(lora=LoraConfig(rank=2)), Kept(parts=("embeddings", "head"))]
    cases.append(Kept("bf16", True, lora, ("norms",)))
    everywhere = LoraConfig(rank=3, targets=tuple(LINEAR_LAYERS))
    cases.append(Kept("bf16", True, everywhere, ("routers", "norms"), has_experts=True))
    cases.append(Kept(lora=LoraConfig(rank=2), parts=("experts",), has_experts=True))
    ranks = run_ranks(2, measure_optimizer, cases)
    for number, case in enumerate(cases):
        plan = plan_of(_run_of(case), world_size=2)
        memory = rank_memory(plan, 0)
        found = [rank[number] for rank in ranks]
        for rank in found:
            assert rank["weights"] == memory.student_weights
            # Buffers are filled up so that every replica has an equal part, of each parameter.
            assert rank["gradients"] == pytest.approx(
                memory.gradients, rel=0.02, abs=rank["filled"]
            )
        mean = sum(rank["optimizer_state"] for rank in found) / len(found)
        assert mean == pytest.approx(memory.optimizer_state, rel=0.02)

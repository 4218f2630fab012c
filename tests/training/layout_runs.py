"""Short runs of one student, which any parallel layout and any order of ids must agree on."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from megatron_ext.training.configuration.config import LossConfig
from megatron_ext.training.configuration.lora import LoraConfig
from tests.training.rank_functions import _trainer, go_back, save_start
from tests.training.tiny_run import (
    CP2,
    ITERATIONS,
    PP2,
    TP2,
    changed,
    checkpoints,
    same_tokenizer_teacher,
    student_run,
    teacher_run,
)

LAYERS = 4
"""A multiple of the stages of every layout."""

LAYOUTS = {
    "tp2-pp2": TP2 | PP2,
    "pp2-vp2": PP2 | {"virtual_pipeline_model_parallel_size": 2},
    "tp2-dp2": TP2,
    "pp4": {"pipeline_model_parallel_size": 4},
    "dp4": {},
    "cp2-tp2": CP2 | TP2,
    "cp2-pp2": CP2 | PP2,
}
"""Of four processes, where ``pp2-vp2`` has two replicas."""

FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}

EXPERTS = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 16,
    "moe_shared_expert_gate": True,
}
ROUTER_LOSSES = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What is trained; the same under every layout."""

    objective: str
    packing: bool = False
    iterations: int = 2
    held_out: bool = False
    teachers: int = 1
    """2: beside the other one a teacher of another width that has the student's tokenizer."""

    lora: LoraConfig | None = None
    trainable: tuple[str, ...] | None = None
    linear: bool = False
    experts: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Settings of experts of the student; the teacher has ``EXPERTS`` then."""

    @property
    def of_teacher(self):
        """Settings of experts of the teacher."""
        return EXPERTS if self.experts else {}

    @property
    def start(self):
        """Run whose first weights it starts from; sigmoid scores have biases, too."""
        scores = self.experts.get("moe_router_score_function")
        return f"start-{scores}" if scores else "start"

    def __str__(self):
        packed, taught = "-packed" * self.packing, "-two-teachers" * (self.teachers == 2)
        adapted = f"-lora-{self.lora.rank}" if self.lora else ""
        return f"{self.objective}{packed}{taught}{adapted}{'-'.join(('', *(self.trainable or ())))}"


@dataclass(frozen=True)
class AxisRun:
    """One run."""

    name: str
    variant: Variant
    parallel: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    goes_on_from: tuple[str, int] | None = None
    """A run, and its iteration whose checkpoint this one resumes."""

    def config(self, folder):
        """Its configuration; the first weights of both models are in ``folder``."""
        variant = self.variant
        saves = ("train_iters", "save_interval", "keep_checkpoints")
        config = changed(
            student_run(folder, self.name),
            student={"num_layers": LAYERS, "seq_length": 40, **variant.experts},
            teacher={"model": {"num_layers": LAYERS, "seq_length": 52, **variant.of_teacher}},
            data={"packing": variant.packing, **({} if variant.held_out else {"validation": ()})},
            loss=LossConfig(objective=variant.objective, ce_weight=0.5, linear=variant.linear),
            lora=variant.lora,
            parallel=dict(self.parallel),
            training={
                **dict.fromkeys(saves, variant.iterations),
                "trainable": variant.trainable,
                **self.training,
            },
            initial_checkpoint=checkpoints(folder, variant.start),
        )
        if variant.teachers == 1:
            return config
        two = {"other": config.teacher, "own": _own_teacher(folder)}
        return changed(config, teacher=None, teachers=two)


def train_runs(rank, folder, runs):
    for run in runs:
        if run.goes_on_from is not None:
            before, iteration = run.goes_on_from
            go_back(rank, folder, run.name, iteration, of=before)
        _trainer(run.config(folder)).train()


def start_and_train(rank, folder, runs):
    """The weights that every run starts from, as checkpoints, and runs of one process."""
    config = teacher_run(folder)
    save_start(changed(config, student={"num_layers": LAYERS, **runs[0].variant.of_teacher}))
    if any(run.variant.teachers == 2 for run in runs):
        own = _own_teacher(folder)
        run_dir = str(folder / "own")
        save_start(changed(config, run_dir=run_dir, tokenizer=own.tokenizer, student=own.model))
    for variant in {run.variant.start: run.variant for run in runs}.values():
        plain = replace(variant, teachers=1, lora=None, trainable=None)
        start = AxisRun(name=plain.start, variant=plain).config(folder)
        save_start(changed(start, initial_checkpoint=None))
    train_runs(rank, folder, runs)


def _own_teacher(folder):
    return same_tokenizer_teacher(folder, "own", num_layers=LAYERS, hidden_size=48, seq_length=40)


class Run(NamedTuple):
    """Two steps of a student with a vocabulary layout, named by a folder."""

    name: str
    vocabulary_layout: str = "co_sharded"
    untied: bool = False
    teacher: str = "teacher"
    objective: str = "projected_kl"
    parallel: Mapping[str, Any] = {}
    precision: Literal["fp32", "bf16"] = "fp32"
    linear: bool = False
    goes_on_from: str | None = None
    """A finished run of which this one does the last step again."""

    is_kept: bool = False
    """Whether the checkpoint of its first step is read, too."""

    only_saves: bool = False
    """Instead of that step, save at once what was loaded."""


def config_of(folder, run):
    """A run of the two tiny models; the teacher ``tied-teacher`` shares its embeddings."""
    return changed(
        student_run(folder, run.name, **run.parallel),
        student={"untie_embeddings_and_output_weights": run.untied},
        teacher={
            "model": {"untie_embeddings_and_output_weights": run.teacher != "tied-teacher"},
            "checkpoint": checkpoints(folder, run.teacher),
        },
        initial_checkpoint=checkpoints(folder, f"start-{run.untied}"),
        projection=str(folder / "start-False" / "projection.safetensors"),
        loss=LossConfig(
            objective=run.objective, ce_weight=0.5, linear=run.linear, linear_tile_rows=32
        ),
        training={
            "vocabulary_layout": run.vocabulary_layout,
            "precision": run.precision,
            "save_interval": 1 if run.is_kept else ITERATIONS,
        },
    )


def run_alone(rank, folder, runs, seen):
    """The teachers, the first weights, runs of one rank, and the heads of another."""
    config = teacher_run(folder)
    _trainer(config).train()
    tied = {"untie_embeddings_and_output_weights": False}
    _trainer(changed(config, run_dir=str(folder / "tied-teacher"), student=tied)).train()
    for untied in (False, True):
        start = config_of(folder, Run(f"start-{untied}", "original", untied=untied))
        save_start(changed(start, initial_checkpoint=None, projection=None))
    return run_layouts(rank, folder, runs, seen)


def run_layouts(rank, folder, runs, seen):
    """Runs one after the other; then this rank's rows of the heads of both models in another."""
    for run in runs:
        if run.goes_on_from is not None:
            go_back(rank, folder, run.name, 1, of=run.goes_on_from)
        trainer = _trainer(config_of(folder, run))
        if run.only_saves:
            saved = trainer._saved()
            saved.load()
            saved.save(2, is_last=True)
        else:
            trainer.train()
    trainer = _trainer(config_of(folder, seen))
    student, teacher = trainer.student.chunks[-1], trainer.teachers["teacher"].chunks[-1]
    weights = student.shared_embedding_or_output_weight(), teacher.output_layer.weight
    return [weight.detach().clone() for weight in weights]

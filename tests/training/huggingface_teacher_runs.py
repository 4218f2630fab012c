"""What spawned ranks run: students of one teacher, which different libraries run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch.distributed as dist
import yaml
from megatron.core import parallel_state

from megatron_ext.distributed import process_groups
from megatron_ext.distributed.layout import Layout
from megatron_ext.teachers.huggingface_teacher import HuggingFaceTeacher, StageWithoutTeacher
from megatron_ext.teachers.megatron_teacher import MegatronTeacher, OffloadedTeacher
from megatron_ext.teachers.target_form import TargetForm
from megatron_ext.training import cpu_megatron
from megatron_ext.training.arguments import config_from_arguments
from megatron_ext.training.inputs import read_inputs
from megatron_ext.training.metrics import read_metrics
from megatron_ext.training.saved_run import SavedRun
from megatron_ext.training.teachers.recording import Recording, record, recording_config
from tests.training.rank_functions import _tokenizer, _trainer

TEXT = "the theory of the other thing then there "


class Run(NamedTuple):
    """Two steps on packed rows."""

    name: str
    teacher: Mapping[str, Any]
    """What its section has beside checkpoint and length."""

    parallel: Mapping[str, Any]
    objective: str = "vocab_kl"


def write_texts(root):
    """Documents of several lengths; a row holds a few."""
    documents = [TEXT * (1 + i % 3) for i in range(20)]
    for name, part in (("train", documents[:16]), ("held-out", documents[16:])):
        lines = [json.dumps({"text": text}) + "\n" for text in part]
        (root / f"{name}.jsonl").write_text("".join(lines))


def config_of(root, run):
    """From ``root/student`` and ``root/teacher``, which are HuggingFace folders."""
    sizes = {"seq_length": 48, "make_vocab_size_divisible_by": 8}
    path = root / f"{run.name}.yaml"
    values = {
        "run_dir": str(root / "runs" / run.name),
        "initial_checkpoint": str(root / "student"),
        "student": dict(sizes),
        "teacher": {"checkpoint": str(root / "teacher"), "model": dict(sizes), **run.teacher},
        "data": {
            "train": [str(root / "train.jsonl")],
            "validation": [str(root / "held-out.jsonl")],
            "packing": True,
        },
        "loss": {"objective": run.objective},
        "optimizer": {"lr": 1e-3},
        "training": {"train_iters": 2, "global_batch_size": 2},
        "parallel": dict(run.parallel),
    }
    if dist.get_rank() == 0:
        path.write_text(yaml.safe_dump(values))
    dist.barrier()
    return config_from_arguments(argparse.Namespace(config=str(path)))


def train_runs(rank, root, runs):
    """Metrics by run; one whose teacher has a ``cache`` records it first, without offload."""
    metrics = {}
    for run in runs:
        if "cache" in run.teacher:
            _record(root, run)
        with patch.object(SavedRun, "save"):
            trainer = _trainer(config_of(root, run))
            assert isinstance(trainer.teacher, _class_of(run.teacher))
            trainer.train()
        dist.barrier()
        metrics[run.name] = read_metrics(Path(trainer.run_dir))
    return metrics


def _class_of(teacher):
    if "cache" in teacher:
        return type(None)
    if teacher.get("offload"):
        return OffloadedTeacher
    return HuggingFaceTeacher | StageWithoutTeacher if "library" in teacher else MegatronTeacher


def _record(root, run):
    """All hidden states in fp32, under tensor parallelism."""
    folder = Path(run.teacher["cache"])
    recorded = Run(
        f"record-{run.name}",
        {key: value for key, value in run.teacher.items() if key != "cache"},
        {"tensor_model_parallel_size": 2},
    )
    config = recording_config(config_of(root, recorded), folder, world_size=2)
    cpu_megatron.install()
    parallel_state.destroy_model_parallel()
    groups = process_groups.initialize(Layout(tensor_model_parallel_size=2))
    with patch("megatron_ext.training.run_tokenizer.build_tokenizer", _tokenizer):
        inputs = read_inputs(config, world_size=2)
    assert config.teacher is not None
    form = TargetForm.of(
        "hidden",
        precision="fp32",
        top_k=0,
        hidden_size=config.teacher.model.hidden_size,
        vocab_size=inputs.teachers["teacher"].tokenizer.vocab_size,
    )
    recording = Recording(teacher="teacher", form=form, folder=folder, file_bytes=1 << 20)
    record(config, groups, inputs, recording)

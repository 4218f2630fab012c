"""GOLD and projected KL beside NeMo RL's ``CrossTokenizerDistillationLossFn``, on a CPU.

    git clone https://github.com/NVIDIA-NeMo/RL
    python benchmarks/peer_nemo.py --nemo-rl RL --output benchmarks/results/peer_nemo.json

Forward and backward of one microbatch by one thread: the distillation term and the cross-entropy of
every label, at NeMo RL's options of either objective. Its file is imported as it is, with an empty
module for each package that is not installed and that the loss does not call (ray, hydra, loggers).
It gets student and teacher logits, chunk ids and the projection that ours get. "ours" is what a run
computes; "ours, its numerics" is ``numerics="nemo"``, whose value shows that both compute the same.
Seconds and memory are those of ``cpu_losses.py``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final
from unittest.mock import MagicMock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from cpu_losses import DTYPES, ROWS, turns
from loss_cost.cases import Loss
from loss_cost.machine import commit, machine, write_results
from loss_cost.microbatch import RankVocabulary
from loss_cost.pairs import SIZES, load_pair

from megatron_ext.losses import LOSS_REGISTRY, DistillationInputs, LossPart, LossPlan, NextTokenLoss
from megatron_ext.projection import SparseProjection

_MODULE: Final = "nemo_rl.algorithms.loss.loss_functions"

_NOT_CALLED: Final = ("nemo_rl.models.policy", "torch.utils.tensorboard")
"""Modules that the file imports on its way, and that want packages at versions of their own."""

_TOP: Final = 8192
"""``vocab_topk`` and ``uncommon_topk`` of its recipes."""

OBJECTIVES: Final[Mapping[str, tuple[bool, dict[str, Any], dict[str, Any]]]] = {
    "gold": (True, {"uncommon_topk": _TOP}, {"uncommon_topk": _TOP, "numerics": "nemo"}),
    "projected_kl": (False, {}, {"vocab_topk": _TOP, "numerics": "nemo"}),
}
"""By name: whether it is their ``gold_loss``; our options, with our numerics and with theirs."""


class _EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty module for every package in ``absent``."""

    def __init__(self) -> None:
        self.absent: set[str] = set()

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] in self.absent or name.startswith(_NOT_CALLED):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return MagicMock(name=spec.name, __path__=[], __spec__=spec, __name__=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing."""


def nemo_loss_module(folder: Path) -> tuple[Any, list[str]]:
    """NeMo RL's module of losses, and the packages that were left empty."""
    sys.path.insert(0, str(folder))
    empty = _EmptyModules()
    sys.meta_path.insert(0, empty)
    while True:
        try:
            return importlib.import_module(_MODULE), sorted(empty.absent)
        except ModuleNotFoundError as error:
            package = (error.name or "").split(".")[0]
            if package in empty.absent | {"", "nemo_rl"}:
                raise
            empty.absent.add(package)
            for name in [name for name in sys.modules if name.split(".")[0] == "nemo_rl"]:
                del sys.modules[name]


def nemo_loss(module: Any, projection: Path, shape: tuple[int, int], *, is_gold: bool) -> Loss:
    """Its loss of our inputs: distillation and cross-entropy, each a mean."""
    loss = module.CrossTokenizerDistillationLossFn(
        {
            "gold_loss": is_gold,
            "xtoken_loss": False,
            "temperature": 1.0,
            "vocab_topk": _TOP,
            "uncommon_topk": _TOP,
            "reverse_kl": False,
            "exact_token_match_only": False,
            "kl_loss_weight": 1.0,
            "ce_loss_scale": 1.0,
            "dynamic_loss_scaling": False,
            "kd_loss_mode": "sum",
            "normalize_teacher_by_vocab": False,
            "alpha": 1.0,
            "student_vocab_size": shape[0],
            "teacher_vocab_sizes": [shape[1]],
            "projection_matrix_paths": [str(projection)],
            "teacher_weights": [1.0],
            "teacher_gold_loss": [None],
            "teacher_xtoken_loss": [None],
        }
    )

    def evaluate(inputs: DistillationInputs) -> torch.Tensor:
        assert inputs.alignment is not None
        assert inputs.teacher is not None
        labels = inputs.labels.clamp(min=0)
        read = {
            "input_ids": torch.cat([labels[:, :1], labels[:, :-1]], dim=1),
            "token_mask": torch.ones_like(labels),
            "sample_mask": torch.ones(len(labels)),
        }
        pairs = torch.ones(1, inputs.alignment.chunk_count, dtype=torch.bool)
        aligned = SimpleNamespace(
            sample_mask=read["sample_mask"],
            student_chunk_id=inputs.alignment.student_chunk_id,
            teacher_chunk_id=inputs.alignment.teacher_chunk_id,
            pair_valid=pairs,
            pair_is_correct=pairs,
            student_input_ids=read["input_ids"],
            student_token_mask=read["token_mask"],
        )
        total, metrics = loss(
            read,
            torch.tensor(1.0),
            torch.tensor(float(labels.numel() - 1)),
            inputs.student_logits,
            inputs.student_logits,
            {0: inputs.teacher.logits},
            {0: aligned},
        )
        evaluate.distillation = metrics["kl_loss"]  # type: ignore[attr-defined]
        return total

    return evaluate


def our_loss(name: str, options: Mapping[str, Any]) -> Loss:
    """Our objective with the cross-entropy, as a run computes them."""
    objective, next_token = LOSS_REGISTRY[name](**options), NextTokenLoss()

    def evaluate(inputs: DistillationInputs) -> torch.Tensor:
        assert inputs.alignment is not None
        parts = {
            "kd": LossPart(objective=objective, inputs=inputs, term="kd", count_name="chunks"),
            "ce": LossPart(objective=next_token, inputs=inputs, term="ce", count_name="labels"),
        }
        counts = {"chunks": inputs.alignment.chunk_count, "labels": inputs.labels.numel()}
        loss = LossPlan(parts=parts, term_weights={"kd": 1.0, "ce": 1.0}).loss(counts)
        found = loss.outputs["kd"].loss_sum.item() / counts["chunks"]
        evaluate.distillation = found  # type: ignore[attr-defined]
        return loss.total

    return evaluate


def write_projection(projection: SparseProjection, path: Path) -> None:
    """The projection as NeMo RL reads it: [Vs, K] teacher ids and shares, -1 for none."""
    counts = torch.tensor(projection.indptr).diff().long()
    width = max(int(counts.max()), 2)
    indices = torch.full((len(counts), width), -1)
    shares = torch.zeros(len(counts), width)
    held = torch.arange(width) < counts[:, None]
    indices[held] = torch.tensor(projection.indices).long()
    shares[held] = torch.tensor(projection.values).float()
    torch.save({"indices": indices, "likelihoods": shares}, path)


def measured(args: argparse.Namespace, module: Any) -> tuple[str, list[dict[str, Any]]]:
    """Where the pair is from, and a row for each dtype and objective."""
    pair = load_pair(next(iter(SIZES)))
    vocabulary, rows = RankVocabulary.of(pair, 1, "original"), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "projection.pt"
        write_projection(pair.projection, path)
        for dtype in args.dtype:
            inputs = vocabulary.microbatch(args.rows, dtype=DTYPES[dtype])
            for name, (is_gold, options, nemo_options) in OBJECTIVES.items():
                losses = {
                    "ours": our_loss(name, options),
                    "ours, its numerics": our_loss(name, nemo_options),
                    "nemo_rl": nemo_loss(module, path, pair.projection.shape, is_gold=is_gold),
                }
                found = turns(losses, inputs, args.turns)
                for key, loss in losses.items():
                    found[key]["distillation"] = loss.distillation  # type: ignore[attr-defined]
                rows.append({"dtype": dtype, "objective": f"{name} + next_token", **found})
                print(rows[-1], flush=True)
    return vocabulary.pair.source, rows


def main() -> int:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nemo-rl", type=Path, required=True, help="a checkout of NeMo RL")
    parser.add_argument("--nemo-rl-commit", help="its commit, for the results")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["fp32"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    module, empty = nemo_loss_module(args.nemo_rl)
    source, rows = measured(args, module)
    if args.output:
        facts = {"nemo_rl": args.nemo_rl_commit, "empty_packages": empty, "inputs": source}
        shape = {"rows": args.rows, "threads": 1}
        about = {"commit": commit(), "machine": machine(), **facts, **shape}
        write_results(args.output, {**about, "results": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())

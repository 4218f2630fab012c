"""What a spawned rank runs: a teacher's own recording, and students of it and of imported ones."""

import yaml

from megatron_ext.teachers.target_form import TargetForm
from tests.training.cached_teacher_runs import _record, read_values
from tests.training.rank_functions import _trainer, train_unsaved

TOP_K = 24


def run_values(root, name, *, objective="partition_kl", cache=None, seq_length=64, **data):
    """From ``root/student`` and ``root/teacher``, which are HuggingFace folders."""
    sizes = {"seq_length": seq_length, "make_vocab_size_divisible_by": 8}
    tokenizer = {"prompt_format": "auto"} if data.get("conversations") else {}
    return {
        "run_dir": str(root / "runs" / name),
        "initial_checkpoint": str(root / "student"),
        "student": sizes,
        "tokenizer": tokenizer,
        "teacher": {
            "checkpoint": str(root / "teacher"),
            "model": sizes,
            "tokenizer": tokenizer,
            "cache": cache and str(root / cache),
        },
        "data": {"train": [str(root / "train.jsonl")], "packing": True, **data},
        "loss": {"objective": objective, "ce_weight": 0.5},
        "optimizer": {"lr": 1e-3},
        "training": {"train_iters": 2, "global_batch_size": 2},
    }


def write_run(root, name, **options):
    """The configuration of a run as a file."""
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(run_values(root, name, **options)))
    return path


def record_and_train(rank, root, runs):
    """Metrics of runs by name, each of an objective and a cache.

    The cache ``own`` is recorded first; then the weights of the teacher are removed, which a run of
    an imported cache does without.
    """
    config = read_values(root / "own.yaml", run_values(root, "own"))
    form = TargetForm.of("topk", precision="fp32", top_k=TOP_K, hidden_size=0, vocab_size=TOP_K)
    _record(config, form, root / "own", 1 << 20)
    metrics = {}
    for name, (objective, cache) in runs.items():
        if cache != "own":
            for file in (root / "teacher").glob("*.safetensors*"):
                file.unlink()
        values = run_values(root, name, objective=objective, cache=cache)
        metrics[name] = train_unsaved(_trainer(read_values(root / f"{name}.yaml", values)))
    return metrics

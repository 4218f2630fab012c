"""Every layout of four processes against one process: objectives, teachers, packed and not.

Run by hand, since it takes long; docs/evidence.md records its largest numbers:

    python -m tests.training.layout_matrix --iterations 10

The last two columns are the largest relative difference of a loss of any iteration and the largest
difference of a weight at the end, to the run of one process.
"""

import argparse
import tempfile
from pathlib import Path

from megatron_ext.training.metrics import read_metrics
from tests.process_group import run_ranks
from tests.training.layout_runs import LAYOUTS, AxisRun, Variant, start_and_train, train_runs
from tests.training.run_results import weights_of
from tests.training.tiny_run import write_corpus, write_rank_list

OBJECTIVES = ("projected_kl", "partition_kl", "alm")
TIMEOUT_S = 3600


def main():
    """Train all of them and print a row of the table for each as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--objectives", nargs="+", default=OBJECTIVES, choices=OBJECTIVES)
    parser.add_argument("--teachers", nargs="+", type=int, default=(1, 2), choices=(1, 2))
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    arguments = parser.parse_args()
    variants = [
        Variant(
            objective=objective, packing=packing, iterations=arguments.iterations, teachers=teachers
        )
        for teachers in arguments.teachers
        for packing in (True, False)
        for objective in arguments.objectives
    ]
    print("| objective | layout | loss | weights |\n|---|---|--:|--:|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder)
        write_rank_list(folder)
        alone = [_run(str(variant), variant, {}) for variant in variants]
        run_ranks(1, start_and_train, folder, alone, timeout_s=TIMEOUT_S)
        for variant in variants:
            runs = [
                _run(f"{variant}-{layout}", variant, LAYOUTS[layout])
                for layout in arguments.layouts
            ]
            run_ranks(4, train_runs, folder, runs, timeout_s=TIMEOUT_S)
            for layout, run in zip(arguments.layouts, runs, strict=True):
                loss, weights = _differences(folder, run)
                print(f"| {variant} | {layout} | {loss:.1e} | {weights:.1e} |", flush=True)


def _run(name, variant, parallel):
    # Of the four rows of a global batch, so that there is one for every replica.
    rows = {"micro_batch_size": 1}
    return AxisRun(name=name, variant=variant, parallel=parallel, training=rows)


def _differences(folder, run):
    alone, sharded = (read_metrics(folder / name) for name in (str(run.variant), run.name))
    assert len(alone) == len(sharded) == run.variant.iterations
    losses = [(row["loss"], its["loss"]) for row, its in zip(alone, sharded, strict=True)]
    weights, its_weights = (
        weights_of(folder / name, run.variant.iterations) for name in (str(run.variant), run.name)
    )
    assert weights.keys() == its_weights.keys()
    # The vocabulary is padded by the number of tensor-parallel ranks.
    rows = {name: min(len(weight), len(its_weights[name])) for name, weight in weights.items()}
    return (
        max(abs(loss - other) / abs(loss) for loss, other in losses),
        max(
            (weights[name][:count] - its_weights[name][:count]).abs().max().item()
            for name, count in rows.items()
        ),
    )


if __name__ == "__main__":
    main()

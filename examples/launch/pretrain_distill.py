"""Distil under Megatron-LM's own loop: its optimizer, schedule, logging and checkpoints.

    PYTHONPATH=Megatron-LM torchrun --nproc-per-node 8 examples/launch/pretrain_distill.py \\
        --config examples/launch/megatron_lm.yaml --save checkpoints --log-interval 10

The configuration is that of ``megatron-ext distill``. It says the student, the teachers, the text
and the loss; every other flag is Megatron-LM's.
"""

from __future__ import annotations

import argparse
import sys

from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain, training

from megatron_ext.megatron_lm.pretrain import PretrainDistillation


def main() -> None:
    """Parse what is ours and leave the rest to Megatron-LM."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, add_help=False)
    parser.add_argument("--config", required=True, help="YAML file of a run")
    own, rest = parser.parse_known_args()
    distillation = PretrainDistillation.from_file(own.config, get_args)
    distillation.take_schedule(training)
    # Theirs come last: they take the place of what the configuration proposes.
    sys.argv[1:] = [*distillation.flags(), *rest]
    try:
        pretrain(
            distillation.datasets_provider,
            distillation.model_provider,
            ModelType.encoder_or_decoder,
            distillation.forward_step,
            extra_args_provider=distillation.add_arguments,
        )
    finally:
        distillation.close()


if __name__ == "__main__":
    main()

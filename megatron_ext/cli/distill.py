"""Train a student from a teacher with another tokenizer, on megatron-core.

    torchrun --nproc-per-node 4 -m megatron_ext distill --config run.yaml --lr 3e-4

The file holds the configuration; every key also has a flag, which wins. A run whose folder exists
is resumed from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings

import yaml

from megatron_ext.distributed.layout import launched_processes
from megatron_ext.training.arguments import add_config_arguments, config_from_arguments
from megatron_ext.training.inputs import read_inputs
from megatron_ext.training.run_folder import config_values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Print the resolved configuration and train."""
    config = config_from_arguments(arguments)
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(yaml.safe_dump(config_values(config), sort_keys=False) + "\n")
        sys.stdout.flush()
    inputs = read_inputs(config, world_size=launched_processes())
    if not sys.warnoptions:
        # torch and megatron-core warn their own developers, on every rank; -W brings it back.
        warnings.simplefilter("ignore")
    # After every check that does without them: megatron-core and torch take seconds to load.
    from megatron_ext.training.distill import distill

    distill(config, inputs)

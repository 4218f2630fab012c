"""Make a checkpoint of ours out of a HuggingFace folder, bit for bit.

    megatron-ext import-hf Qwen3-0.6B imported/qwen3

A run can read the folder itself (initial_checkpoint, or a teacher's checkpoint), so this is for
those who keep checkpoints in one format. The checkpoint has the tokenizer, the chat template and
the generation config with it, and megatron-ext export-hf turns it back.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    parser.add_argument("folder", type=Path, help="config.json, safetensors files and tokenizer")
    parser.add_argument("output", type=Path, help="new folder for the checkpoint")


def run(arguments: argparse.Namespace) -> None:
    """Import and say what can be done with the checkpoint."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    from megatron_ext.training.import_checkpoint import import_huggingface

    checkpoint = import_huggingface(arguments.folder, arguments.output)
    sys.stdout.write(f"{checkpoint}\n")

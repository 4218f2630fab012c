"""Import a HuggingFace folder as a megatron-core checkpoint, bit for bit.

    megatron-ext import-hf Qwen3-0.6B imported/qwen3

A run can also read the folder directly (initial_checkpoint, or a teacher's checkpoint). The
checkpoint includes the tokenizer, the chat template and the generation config, and megatron-ext
export-hf converts it back.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_ext.cli.output import quiet_libraries
from megatron_ext.huggingface.hub import hub_model
from megatron_ext.imports import large_imports


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the verb."""
    parser.add_argument(
        "folder",
        help="folder with config.json, safetensors files and tokenizer, or a name on the hub",
    )
    parser.add_argument("output", type=Path, help="new folder for the checkpoint")


def run(arguments: argparse.Namespace) -> None:
    """Import, and print the folder of the checkpoint."""
    folder = hub_model(arguments.folder, where="FOLDER") or Path(arguments.folder)
    quiet_libraries()
    with large_imports():
        from megatron_ext.training.checkpoints.huggingface_import import import_huggingface

    checkpoint = import_huggingface(folder, arguments.output)
    sys.stdout.write(f"{checkpoint}\n")

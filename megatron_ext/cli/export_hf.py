"""Export a run or a checkpoint to a HuggingFace folder.

    megatron-ext export-hf runs/student exported/student --dtype bf16

The newest checkpoint of a run is exported, whatever layout it was saved under. Weights are written
as safetensors files with an index; config.json, generation config, tokenizer and chat template are
those that the model came with, or else are made from the run's configuration. Adapters are merged,
or with --adapter written alone, for peft.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_ext.cli.output import quiet_libraries
from megatron_ext.errors import ConfigError
from megatron_ext.imports import large_imports


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the verb."""
    parser.add_argument(
        "checkpoint", type=Path, help="run, its folder of checkpoints, or one of these"
    )
    parser.add_argument("output", type=Path, help="new folder")
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="dtype of the weights; that of the checkpoint when not given",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write the adapters alone, as a folder that peft loads",
    )
    parser.add_argument(
        "--max-shard-size",
        type=float,
        default=5.0,
        metavar="GB",
        help="largest size of a file, in 10^9 bytes (5)",
    )
    parser.add_argument(
        "--no-verify",
        dest="verify",
        action="store_false",
        help="do not check the files against the checkpoint's manifest",
    )


def run(arguments: argparse.Namespace) -> None:
    """Export, and print the folder."""
    if not arguments.max_shard_size > 0:
        raise ConfigError(
            "no file is so small", where="--max-shard-size", got=arguments.max_shard_size
        )
    quiet_libraries()
    with large_imports():
        from megatron_ext.training.checkpoints.adapter_export import export_adapter
        from megatron_ext.training.checkpoints.huggingface_export import DTYPES, export_huggingface

    dtype = DTYPES[arguments.dtype] if arguments.dtype else None
    source, output, verify = arguments.checkpoint, arguments.output, arguments.verify
    if arguments.adapter:
        export_adapter(source, output, dtype=dtype, verify=verify)
    else:
        size = int(arguments.max_shard_size * 1e9)
        export_huggingface(source, output, dtype=dtype, max_shard_bytes=size, verify=verify)
    sys.stdout.write(f"{arguments.output}\n")

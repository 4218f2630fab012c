"""Run a script of Megatron-LM's, unedited, with our flags and tokenizers.

    megatron-ext run pretrain_gpt.py --tokenizer-model tokenizer.json --num-layers 2 ...
    megatron-ext run tools/preprocess_data.py --tokenizer-library sentencepiece ...
    torchrun --nproc-per-node 8 -m megatron_ext run pretrain_gpt.py ...

What follows the script is the script's: its --help lists our flags among its own.
"""

from __future__ import annotations

import argparse

from megatron_ext.megatron_lm.script import run_script


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    parser.add_argument("script", help="a Python file of a Megatron-LM checkout")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments"
    )


def run(arguments: argparse.Namespace) -> None:
    """Run the script as this process's program."""
    run_script(arguments.script, arguments.arguments)

"""Run an unmodified script of Megatron-LM with megatron-ext's flags and tokenizers.

    megatron-ext run pretrain_gpt.py --tokenizer-model tokenizer.json --num-layers 2 ...
    megatron-ext run tools/preprocess_data.py --tokenizer-library sentencepiece ...
    torchrun --nproc-per-node 8 -m megatron_ext run pretrain_gpt.py ...

The arguments after the script are passed to it; its --help lists megatron-ext's flags too.
"""

from __future__ import annotations

import argparse

from megatron_ext.megatron_lm.script import run_script


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the verb."""
    parser.add_argument("script", help="a Python file of a Megatron-LM checkout")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments"
    )


def run(arguments: argparse.Namespace) -> None:
    """Run the script as the main program of this process."""
    run_script(arguments.script, arguments.arguments)

"""Build, inspect and convert the projection between two vocabularies.

    megatron-ext projection build --student llama3_2/ --teacher qwen3/ -o pair.safetensors
    megatron-ext projection inspect map.pt --student llama3_2/ --teacher qwen3/
    megatron-ext projection convert map.pt -o pair.safetensors --student DIR --teacher DIR
    megatron-ext projection embed models/Qwen3-0.6B models/with-llama --tokenizer llama3_2/

A .pt file is one of the x-token tools of NeMo RL, read without running any code in it; any other is
a safetensors file of megatron-ext. The tools are available under their names and with their flags:
minimal-projection-via-multitoken, reapply-exact-map, sort-and-cut-projection-matrix,
minimal-projection-generator and build-projection-matrix.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Final

from megatron_ext.cli.actions import Action, add_actions
from megatron_ext.cli.projection import build, convert, nemo_tools

ACTIONS: Final = {
    "build": Action(build.add_build_flags, build.build),
    "inspect": Action(convert.add_inspect_flags, convert.inspect),
    "convert": Action(convert.add_convert_flags, convert.convert),
    "embed": Action(build.add_embed_flags, build.embed),
    **{
        name: Action(partial(nemo_tools.add_flags, name), tool)
        for name, tool in nemo_tools.TOOLS.items()
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a subparser for each action."""
    add_actions(parser, ACTIONS)


def run(arguments: argparse.Namespace) -> None:
    """Run the action."""
    ACTIONS[arguments.action].run(arguments)

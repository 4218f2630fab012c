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

from megatron_ext.cli.projection.verb import add_arguments, run

__all__ = ["add_arguments", "run"]

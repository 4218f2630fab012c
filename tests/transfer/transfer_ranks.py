"""What spawned ranks run: a transferred model over tensor-parallel ranks."""

from megatron_ext.cli.main import main
from megatron_ext.evaluation.megatron_language_model import ModelOptions, load_language_model


def vocabulary_shards(rank, folder):
    """This rank's rows of embedding and head."""
    options = ModelOptions(tensor_model_parallel_size=2)
    (chunk,) = load_language_model(folder, options).scorer.models.chunks
    return chunk.embedding.word_embeddings.weight.data, chunk.output_layer.weight.data


def run_verbs(rank, commands):
    """Commands, one after the other."""
    for words in commands:
        main(words)

"""Indexed datasets for tests: made by ``megatron-ext tokenize``, and by hand."""

from unittest.mock import patch

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_ext.preprocessing.config import PreprocessConfig
from megatron_ext.preprocessing.preprocess import preprocess
from megatron_ext.tokenizers import TokenizerConfig


def tokenize(source, prefix, tokenizer, **options):
    """What the verb makes of ``source``, with a report beside it; the prefix of the dataset."""
    config = PreprocessConfig(
        inputs=(str(source),),
        output_prefix=str(prefix),
        tokenizer=TokenizerConfig(model=str(tokenizer.path)),
        append_eod=True,
        workers=1,
        **options,
    )
    with patch("megatron_ext.preprocessing.preprocess.build_tokenizer", lambda _: tokenizer):
        preprocess(config)
    return f"{prefix}_text_document"


def write_ids(prefix, documents, dtype=np.int32):
    """Documents of sequences of ids, without a report; the prefix."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sequences in documents:
        ids = np.array([token for sequence in sequences for token in sequence], dtype)
        builder.add_document(ids, [len(sequence) for sequence in sequences])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)

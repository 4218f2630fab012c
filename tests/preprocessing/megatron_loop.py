"""Megatron's way to write an indexed dataset: one record and one document after the other."""

from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder


def write_one_by_one(records, tokenizer, prefix, *, keys=("text",), append_eod=False):
    """What Megatron's preprocess_data.py does with each record, in this process."""
    builders = {
        key: IndexedDatasetBuilder(
            f"{prefix}_{key}_document.bin", dtype=DType.optimal_dtype(tokenizer.vocab_size)
        )
        for key in keys
    }
    for record in records:
        for key in keys:
            value = record[key]
            ids = []
            lengths = []
            for sentence in value if isinstance(value, list) else [value]:
                sentence_ids = tokenizer.tokenize(sentence)
                if sentence_ids:
                    ids += sentence_ids
                    lengths.append(len(sentence_ids))
            if ids and append_eod:
                ids.append(tokenizer.eod)
                lengths[-1] += 1
            builders[key].add_document(ids, lengths)
    for key in keys:
        builders[key].finalize(f"{prefix}_{key}_document.idx")

"""Documents as flat arrays, parts on the disk, and what a tokenizer is told apart by."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import DType

from megatron_ext.documents.id_tokenizers import loss_mask_prefix
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.preprocessing.encoded_documents import EncodedDocuments, PartWriter, token_dtype
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.tokenizers.identity import tokenizer_identity
from tests.tokenizers import tokenizer_files

DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 99), max_size=3), max_size=3), max_size=5)
EOD = 100


def flat(documents):
    """Documents of sentences of ids."""
    sentences = [sentence for document in documents for sentence in document]
    return EncodedDocuments.from_sequences(
        np.array([token for sentence in sentences for token in sentence], np.int32),
        np.array([len(sentence) for sentence in sentences], np.int64),
        np.array([len(document) for document in documents], np.int64),
    )


def nested(documents):
    """The same as lists."""
    ids, lengths = iter(documents.ids.tolist()), iter(documents.sequence_lengths.tolist())
    return [
        [[next(ids) for _ in range(next(lengths))] for _ in range(count)]
        for count in documents.sequence_counts.tolist()
    ]


@given(DOCUMENTS)
def test_sentences_without_tokens_are_no_sequences(documents):
    filled = [[sentence for sentence in document if sentence] for document in documents]
    assert nested(flat(documents)) == filled
    assert flat(documents).document_lengths.tolist() == [
        sum(map(len, document)) for document in documents
    ]


@given(DOCUMENTS)
def test_an_eod_ends_every_document_that_has_tokens(documents):
    before = flat(documents)
    ids = before.ids.copy()
    expected = nested(before)
    for document in expected:
        if document:
            document[-1].append(EOD)
    assert nested(before.with_eod(EOD)) == expected
    assert np.array_equal(before.ids, ids)


@pytest.mark.parametrize("vocab_size", [1, 65499, 65500, 65501, 1 << 17])
def test_a_token_is_stored_as_megatron_core_stores_it(vocab_size):
    assert token_dtype(vocab_size) == np.dtype(DType.optimal_dtype(vocab_size))


@pytest.mark.parametrize("token", [-1, 1 << 16])
def test_an_id_that_does_not_fit_is_refused(tmp_path, token):
    documents = flat([[[token]]])
    with (
        PartWriter(tmp_path / "a", token_dtype(300)) as writer,
        pytest.raises(DataError, match=f"beyond its vocabulary; got ids {token} to {token}"),
    ):
        writer.add(documents.ids, documents)


def test_a_loss_mask_lies_beside_its_tokens():
    assert loss_mask_prefix("out/a_messages_document") == "out/a_messages_loss_mask"
    with pytest.raises(ConfigError, match="expected a prefix that ends in _document"):
        loss_mask_prefix("out/a")


def test_a_tokenizer_that_moves_is_the_same_and_one_with_other_merges_is_not(tmp_path):
    def identity(folder):
        return tokenizer_identity(build_tokenizer(TokenizerConfig(model=str(folder))))

    here, there, other = (tmp_path / name for name in ("here", "there", "other"))
    here.mkdir()
    tokenizer_files.byte_level(here)
    shutil.copytree(here, there)
    shutil.copytree(here, other)
    document = json.loads((other / "tokenizer.json").read_text())
    document["model"]["merges"].reverse()
    (other / "tokenizer.json").write_text(json.dumps(document))
    assert identity(there) == identity(here)
    assert identity(other)["fingerprint"] == identity(here)["fingerprint"]
    assert identity(other) != identity(here)


def test_what_reads_a_vocabulary_how_fast_does_not_tell_it_apart(tmp_path):
    path = str(tokenizer_files.byte_level(tmp_path))
    reference = build_tokenizer(TokenizerConfig(model=path, engine="reference"))
    assert tokenizer_identity(reference) == tokenizer_identity(
        build_tokenizer(TokenizerConfig(model=path))
    )

"""Published ``tokenizer.json`` files on all of the published text."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer

from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from tests.tokenizers.published import corpora, folders_with, needs_published_files

pytestmark = needs_published_files
LOSSY = {"bert_uncased", "t5_small"}
"""They change text before they cut it."""


@pytest.fixture(params=folders_with("tokenizer.json"), ids=lambda folder: folder.name)
def folder(request):
    return request.param


def test_ids_and_spans_are_right_on_all_of_the_text(folder):
    ours = build_tokenizer(TokenizerConfig(model=str(folder)))
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs.no_truncation()
    theirs.no_padding()
    # Special tokens that are written in the text are text to us.
    names = [token.content for token in theirs.get_added_tokens_decoder().values()]
    plain = [text for text in corpora() if not any(name in text for name in names if name.strip())]
    assert len(plain) > len(corpora()) / 2
    expected = theirs.encode_batch_fast(plain, add_special_tokens=False)
    for ids, want in zip(ours.text_to_ids_batch(plain), expected, strict=True):
        assert ids.tolist() == want.ids
    for text in plain[::7]:
        ids, ends = ours.encode_with_byte_ends(text)
        raw = text.encode()
        assert (np.diff(ends, prepend=0) >= 0).all()
        assert ends[-1] == len(raw)
        if folder.name not in LOSSY and text.isascii():
            joined = b"".join(ours.token_bytes(i) or b"" for i in ids.tolist())
            assert joined.removeprefix(b" " * (len(joined) - len(raw))) == raw

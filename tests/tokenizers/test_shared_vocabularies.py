"""Published vocabularies on real text, where they are at hand."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from megatron_ext.tokenizers import MegatronTokenizerText, TokenizerConfig, build_tokenizer
from tests.tokenizers.published import (
    SHARED,
    corpora,
    folders_with,
    needs_published_files,
    taken,
)

pytestmark = pytest.mark.skipif(
    not (SHARED / "tokenizers").is_dir(),
    reason="published vocabularies are absent: set MEGATRON_EXT_SHARED to a folder that has them",
)
SPELLS_EVERY_TEXT = (
    *("gpt2", "llama3_2", "mistral_nemo", "phi4_mini"),
    *("cl100k_base.tiktoken", "o200k_base.tiktoken", "p50k_base.tiktoken", "r50k_base.tiktoken"),
)
SPELLS_AFTER_A_PREFIX = ("llama2_sp", "mistral_7b_v1", "tokenizer.model", "gemma3")
LOSSY = {"bert_uncased", "t5_small"}
"""They change text before they cut it."""
CORPORA = (
    "django_po/ja.admin.po",
    "django_po/hi.admin.po",
    "django_po/vi.conf.po",
    "python_code/dataclasses.py.txt",
    "fastchat/dummy_conversation.json",
)


def vocabularies() -> list[Path]:
    """Tokenizer directories, and single files in directories that hold several."""
    if not (SHARED / "tokenizers").is_dir():
        return []
    found = []
    for folder in sorted((SHARED / "tokenizers").iterdir()):
        if (folder / "tokenizer.json").is_file():
            found.append(folder)
        found += sorted([*folder.glob("*.model"), *folder.glob("*.tiktoken")])
    return taken(found)


# The last few, for the tests that take one up again: to hold all of them, millions of objects,
# would slow every garbage collection of the run.
@lru_cache(maxsize=12)
def built(path: Path) -> MegatronTokenizerText:
    return build_tokenizer(TokenizerConfig(model=str(path)))


def texts() -> list[str]:
    return [(SHARED / "corpora" / name).read_text(encoding="utf-8")[1000:5000] for name in CORPORA]


@needs_published_files
@pytest.mark.parametrize("path", folders_with("tokenizer.json"), ids=lambda path: path.name)
def test_ids_and_spans_are_right_on_all_of_the_text(path):
    ours = built(path)
    theirs = Tokenizer.from_file(str(path / "tokenizer.json"))
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
        if path.name not in LOSSY and text.isascii():
            joined = b"".join(ours.token_bytes(i) or b"" for i in ids.tolist())
            assert joined.removeprefix(b" " * (len(joined) - len(raw))) == raw


@pytest.mark.parametrize("path", vocabularies(), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_byte_ends_of_a_published_vocabulary_are_right_on_real_text(path):
    ours = built(path)
    for text in [*texts(), "caf\u0065\u0301 \u212b 🤷\u200d♀️ ▁ \n\n"]:
        ids, ends = ours.encode_with_byte_ends(text)
        raw = text.encode()
        assert ids.tolist() == ours.tokenize(text)
        assert (np.diff(ends, prepend=0) >= 0).all()
        assert ends[-1] == len(raw)
        spans = [raw[a:b] for a, b in pairwise([0, *ends])]
        if path.name in SPELLS_EVERY_TEXT:
            assert spans == [ours.token_bytes(i) for i in ids]
        elif path.name in SPELLS_AFTER_A_PREFIX and "▁" not in text:
            assert spans[1:] == [ours.token_bytes(i) for i in ids[1:]]
            assert spans[0] == (ours.token_bytes(ids[0]) or b"")[-len(spans[0]) or 99 :]
            assert ours.byte_ends(ids).tolist() == ends.tolist()


@pytest.mark.parametrize(
    ("one", "other"), [("llama2_sp", "llama2_sp/tokenizer.model")], ids=["llama2"]
)
def test_one_vocabulary_in_two_formats_has_one_fingerprint_and_one_tokenization(one, other):
    left, right = (built(SHARED / "tokenizers" / name) for name in (one, other))
    assert left.fingerprint() == right.fingerprint()
    for text in [*texts(), "<s>hello</s> there<s>"]:
        for parse_special in (False, True):
            ours, theirs = (
                side.encode_with_byte_ends(text, parse_special=parse_special)
                for side in (left, right)
            )
            assert ours[0].tolist() == theirs[0].tolist()
            assert ours[1].tolist() == theirs[1].tolist()


def test_no_added_token_of_qwen3_comes_out_of_text():
    path = SHARED / "tokenizers" / "qwen3"
    ours = built(path)
    added = [piece for piece in ours.vocab[151643:] if piece]
    assert "<think>" in added
    assert max(ours.tokenize(" x ".join(added))) < 151643
    ids, _ = ours.encode_with_byte_ends("".join(added), parse_special=True)
    assert ids.tolist() == [ours.token_to_id(name) for name in added]

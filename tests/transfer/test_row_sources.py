"""What each new token is made of: bytes first, control tokens by name and role, none twice."""

import os
from itertools import permutations

import numpy as np
import pytest

from megatron_ext.transfer.row_sources import NO_SOURCE, row_sources, turn_markers
from tests.alignment.shared_text import needs_shared, published

pytestmark = needs_shared

NAMES = (
    *("gemma3", "gpt2", "llama2_sp", "llama3_2", "mistral_7b_v1"),
    *("mistral_nemo", "phi4_mini", "qwen2_5", "qwen3"),
)
PAIRS = list(permutations(NAMES, 2))
SOME = [("gpt2", "llama2_sp")]


@pytest.mark.parametrize(("new", "old"), PAIRS if os.environ.get("MEGATRON_EXT_ALL_TEXT") else SOME)
def test_published_vocabularies_copy_by_bytes_and_no_control_token_twice(new, old):
    new, old = published(new), published(old)
    sources = row_sources(new, old)
    olds = [old.token_bytes(i) for i in range(old.vocab_size)]
    emitted = _emitted(old, olds)
    controls = []
    for token_id, source in enumerate(sources.copied.tolist()):
        token = new.token_bytes(token_id)
        if source == NO_SOURCE:
            pieces = sources.pieces[token_id]
            assert not pieces or b"".join(olds[piece] for piece in pieces) == token
        elif token:
            assert olds[source] == token
            assert source in emitted or new.id_to_token(token_id) == old.id_to_token(source)
        else:
            assert not olds[source]
            controls.append(source)
    assert len(set(controls)) == len(controls)
    common = {token for token in olds if token}
    copied = np.flatnonzero(sources.copied >= 0)
    assert {new.token_bytes(i) for i in copied.tolist()} >= {
        token for token in map(new.token_bytes, range(new.vocab_size)) if token in common
    }


@pytest.mark.parametrize("name", ["llama2_sp", "qwen3"])
def test_a_vocabulary_is_made_of_itself(name):
    tokenizer = published(name)
    sources = row_sources(tokenizer, tokenizer)
    assert sources.is_identity
    assert sources.copied.tolist() == list(range(tokenizer.vocab_size))


def test_tokens_of_turns_meet_by_what_templates_write_with_them():
    new, old = published("llama3_2"), published("qwen3")
    markers = {role: new.id_to_token(i) for role, i in turn_markers(new).items()}
    assert markers == {
        "end": "<|eot_id|>",
        "open": "<|start_header_id|>",
        "header": "<|end_header_id|>",
    }
    copied = row_sources(new, old).copied.tolist()
    expected = {"<|start_header_id|>": "<|im_start|>", "<|eot_id|>": "<|im_end|>"}
    for name, source in expected.items():
        assert old.id_to_token(copied[new.token_to_id(name)]) == source
    # No token of Qwen's closes a header.
    assert copied[new.token_to_id("<|end_header_id|>")] == NO_SOURCE
    assert turn_markers(published("gpt2")) == {}


def _emitted(tokenizer, tokens):
    """Ids that stand alone for their bytes; of several the one that the tokenizer emits."""
    of_bytes = {}
    for token_id, token in enumerate(tokens):
        if token:
            of_bytes.setdefault(token, []).append(token_id)
    found = set()
    for token, ids in of_bytes.items():
        if len(ids) > 1:
            try:
                spelled = tokenizer.text_to_ids("\n" + token.decode())[-1]
            except UnicodeDecodeError:
                spelled = ids[0]
            ids = [spelled] if spelled in ids else ids[:1]
        found.update(ids)
    return found

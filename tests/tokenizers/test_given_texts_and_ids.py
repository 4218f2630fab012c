"""What a tokenizer is given that is no text or no id is one clear error, with every library."""

import copy
import multiprocessing
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from megatron_ext import CrossTokenizerCollator, SparseProjection, TeacherCTSpec, TokenAligner
from megatron_ext.conversation import (
    PROMPT_FORMAT_REGISTRY,
    apply_chat_template,
    encode_conversation,
    tokenize_conversation,
)
from megatron_ext.errors import ConversationError, TokenizerError
from megatron_ext.tokenizers import MegatronTokenizer, MegatronTokenizerText
from megatron_ext.tokenizers.token_ids import checked_ids, integers

NAMES = ("sentencepiece-v1", "json-rank-list", "huggingface-metaspace", "byte-level", "null")
NUMBERS = "5 7  9"
WORDS = "the parser  é🙂"


@pytest.fixture(scope="module", params=NAMES)
def given(request, opened) -> tuple[MegatronTokenizerText, str]:
    """A tokenizer of each library and a text for it."""
    return opened(request.param), NUMBERS if request.param == "null" else WORDS


@pytest.mark.parametrize("text", [None, b"12", 3, 1.5], ids=repr)
def test_what_is_no_text_is_named_by_its_type(given, text):
    tokenizer, _ = given
    kind = type(text).__name__
    for call in (
        tokenizer.tokenize,
        tokenizer.text_to_ids,
        tokenizer.encode_with_byte_ends,
        lambda text: tokenizer.text_to_ids_batch(["1", text]),
        lambda text: tokenizer.text_to_flat_ids([text]),
        lambda text: tokenizer._tokenizer.text_to_ids_batch([text], parse_special=True),
        lambda text: tokenizer.offsets([1], text),
    ):
        with pytest.raises(TokenizerError, match=f"got {kind}") as raised:
            call(text)
        assert "\n" not in str(raised.value)


def test_bytes_are_told_to_be_decoded_and_a_batch_names_the_text(given):
    tokenizer, _ = given
    with pytest.raises(TokenizerError, match=r'text\.decode\("utf-8"\)'):
        tokenizer.text_to_ids(b"12")
    with pytest.raises(TokenizerError, match=r"text 1 of the batch: .*got int"):
        tokenizer.text_to_ids_batch(["1", 2])


def test_one_text_is_no_batch_of_its_characters(given):
    tokenizer, text = given
    with pytest.raises(TokenizerError, match=r"several texts.*got str; .*put it into a list"):
        tokenizer.text_to_ids_batch(text)


def test_a_batch_may_be_any_iterable_of_texts(given):
    # Read twice, a generator would be empty the second time.
    tokenizer, text = given
    expected = [tokenizer.tokenize(text)] * 3
    for batch in (iter([text] * 3), (text,) * 3, np.array([text] * 3)):
        assert [row.tolist() for row in tokenizer.text_to_ids_batch(batch)] == expected


def test_a_list_of_texts_is_no_conversation(given):
    with pytest.raises(ConversationError, match=r"conversation\[0\]: .*got str"):
        given[0].tokenize(["a", "b"])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (None, "not a sequence; got NoneType"),
        (5, "not a sequence; got int"),
        ("12", "not a sequence; got str"),
        ((i for i in (1, 2)), "not a sequence; got generator"),
        ([None], "got NoneType, None"),
        ([1.5], r"got float, 1\.5"),
        (["1"], "got str, '1'"),
        ([True], "got bool, True"),
        ([[1, 2]], r"got list of shape \[1, 2\]; .*one row at a time"),
        ([[1], [1, 2]], "cannot be read"),
        ([-1], "outside the vocabulary; got -1"),
        ([10**6], "outside the vocabulary; got 1000000"),
        ([2**70], f"outside any vocabulary; got {2**70}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_are_no_ids_is_named(given, ids, message):
    tokenizer, text = given
    for call in (
        tokenizer.detokenize,
        tokenizer.byte_ends,
        lambda ids: tokenizer.offsets(ids, text),
    ):
        with pytest.raises(TokenizerError, match=message) as raised:
            call(ids)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("token_id", [None, "a", 1.5, -1, 10**6], ids=repr)
def test_what_is_no_id_is_named(given, token_id):
    tokenizer, _ = given
    if isinstance(token_id, int):
        for call in (tokenizer.token_bytes, tokenizer.id_to_token):
            with pytest.raises(TokenizerError, match=f"got {token_id}"):
                call(token_id)
        return
    for call in (tokenizer.token_bytes, tokenizer.id_to_token, tokenizer.is_control):
        with pytest.raises(TokenizerError, match="the token id is not an integer"):
            call(token_id)


@pytest.mark.parametrize("name", [None, 3, ""], ids=repr)
def test_what_is_no_token_is_a_key_error(given, name):
    with pytest.raises(KeyError):
        given[0].token_to_id(name)


def test_ids_may_be_arrays_and_tensors(given):
    torch = pytest.importorskip("torch")
    tokenizer, text = given
    ids = tokenizer.tokenize(text)
    for array in (
        np.array(ids, np.int32),
        np.array(ids, np.uint16),
        torch.tensor(ids),
        [np.int64(token_id) for token_id in ids],
        [torch.tensor(token_id) for token_id in ids],
        tuple(ids),
    ):
        assert tokenizer.detokenize(array) == tokenizer.detokenize(ids)
        assert tokenizer.byte_ends(array).tolist() == tokenizer.byte_ends(ids).tolist()
        assert tokenizer.offsets(array, text) == tokenizer.offsets(ids, text)
    last = tokenizer.vocab_size - 1
    for one in (np.int64(last), torch.tensor(last)):
        assert tokenizer.id_to_token(one) == tokenizer.id_to_token(last)
        assert tokenizer.token_bytes(one) == tokenizer.token_bytes(last)
        assert tokenizer.is_control(one) is tokenizer.is_control(last)


def test_no_ids_are_no_text(given):
    for nothing in ([], (), np.zeros(0), np.zeros(0, np.int32)):
        assert given[0].detokenize(nothing) == ""
        assert given[0].byte_ends(nothing).tolist() == []


def test_arrays_of_ids_are_not_changed():
    ids = np.array([3, 1, 2], np.int64)
    checked = checked_ids(ids, 4)
    checked[0] = 0
    integers(ids)[0] = 0
    assert ids.tolist() == [3, 1, 2]


def test_white_space_too_long_for_tiktoken_is_an_error_and_no_panic(tokenizer_path):
    # The library's panic is no Exception: a worker would die of it without a word.
    tokenizer = MegatronTokenizer.from_pretrained(
        tokenizer_path("json-rank-list"), engine="reference"
    )
    text = " " * 1_000_001
    assert len(tokenizer.tokenize(text[:999_000])) > 0
    for call in (tokenizer.tokenize, lambda text: tokenizer.text_to_ids_batch([text])):
        with pytest.raises(TokenizerError, match="tiktoken cannot cut the text"):
            call(text)


def test_a_long_text_is_encoded_whole(given):
    tokenizer, text = given
    long = f"{text} " * 5_000
    ids = tokenizer.tokenize(long)
    assert tokenizer.text_to_ids_batch([long])[0].tolist() == ids
    assert tokenizer.encode_with_byte_ends(long)[1][-1] == len(long.encode())
    assert tokenizer.detokenize(ids).split() == long.split()


# In other threads and processes.


def answers(tokenizer: MegatronTokenizerText, text: str) -> Any:
    ids = tokenizer.tokenize(text)
    batch = [row.tolist() for row in tokenizer.text_to_ids_batch([text, "", text])]
    offsets = tokenizer.offsets(ids, text)
    return ids, batch, tokenizer.detokenize(ids), offsets, dict(tokenizer.unique_identifiers)


def _answer(queue: Any, tokenizer: MegatronTokenizerText, text: str) -> None:
    queue.put(answers(tokenizer, text))


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))]
)
def test_a_copy_answers_as_its_original(given, copied):
    tokenizer, text = given
    expected = answers(tokenizer, text)
    twin = copied(tokenizer)
    assert answers(twin, text) == expected
    assert (twin.vocab, twin.fingerprint()) == (tokenizer.vocab, tokenizer.fingerprint())


def test_a_forked_process_answers_as_its_parent(given):
    tokenizer, text = given
    expected = answers(tokenizer, text)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    worker = context.Process(target=_answer, args=(queue, tokenizer, text))
    worker.start()
    assert queue.get(timeout=60) == expected
    worker.join(timeout=60)


def test_threads_share_a_tokenizer(tokenizer_path, given):
    # A new one, so that what is made on first use is made by all threads at once.
    tokenizer, text = given
    expected = answers(tokenizer, text)
    fresh = pickle.loads(pickle.dumps(tokenizer))
    with ThreadPoolExecutor(8) as threads:
        rows = list(threads.map(lambda _: answers(fresh, text), range(16)))
    assert rows == [expected] * 16


TAKERS = {
    "aligner": lambda tokenizer: TokenAligner(tokenizer, tokenizer),
    "collator": lambda tokenizer: CrossTokenizerCollator(tokenizer, 8),
    "teacher": lambda tokenizer: TeacherCTSpec(name="t", tokenizer=tokenizer),
    "projection": lambda tokenizer: SparseProjection.from_tokenizers(tokenizer, tokenizer),
    "prompt format": lambda tokenizer: PROMPT_FORMAT_REGISTRY["qwen2p5"](tokenizer),
    "ids": lambda tokenizer: tokenize_conversation(tokenizer, [], None, True, False),
    "mask": lambda tokenizer: encode_conversation(tokenizer, [], None),
    "template": lambda tokenizer: apply_chat_template(tokenizer, [], ""),
}


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("kind", ["transformers", "tokenizers", "path"])
def test_a_tokenizer_of_another_package_is_told_what_to_call(kind, taker, tokenizer_path):
    folder = tokenizer_path("huggingface-byte-level")
    named = str(folder)
    if kind == "path":
        given, got = named, "builtins.str"
    elif kind == "tokenizers":
        given = pytest.importorskip("tokenizers").Tokenizer.from_file(f"{folder}/tokenizer.json")
        got = "tokenizers.Tokenizer"
    else:
        given = pytest.importorskip("transformers").PreTrainedTokenizerFast.from_pretrained(named)
        got = "transformers"
    with pytest.raises(TokenizerError, match=rf"not a tokenizer of .*; got {got}") as raised:
        TAKERS[taker](given)
    told = {
        "path": f"pass MegatronTokenizer.from_pretrained({named!r})",
        "tokenizers": "call MegatronTokenizer.from_pretrained with the folder of its files",
        "transformers": "pass megatron_ext.from_huggingface(tokenizer)",
    }
    assert str(raised.value).endswith(f"; {told[kind]}")


def test_a_tokenizer_and_a_projection_are_shown_in_a_line(tokenizer_path):
    path = tokenizer_path("huggingface-byte-level")
    tokenizer = MegatronTokenizer.from_pretrained(path)
    size = tokenizer.vocab_size
    for word in ("MegatronTokenizerText('huggingface'", str(path), f"vocab_size={size}"):
        assert word in repr(tokenizer)
    projection = SparseProjection.from_tokenizers(tokenizer, tokenizer)
    entries = projection.entry_count
    assert repr(projection) == f"SparseProjection({size:,} x {size:,}, {entries:,} entries)"

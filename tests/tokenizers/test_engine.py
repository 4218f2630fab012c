"""The fast engine gives the library's ids on every text."""

import multiprocessing
import os
import pickle
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ext.tokenizers.engine import FastEncoder
from megatron_ext.tokenizers.engine import gigatoken_engine as engine_module
from megatron_ext.tokenizers.engine.probe_texts import compared_characters, probe_texts
from megatron_ext.tokenizers.engine.proof import prove
from megatron_ext.tokenizers.libraries.table_tokenizer import TableTokenizer
from tests.tokenizers.engine_cases import FAST, FILLER, adapter_of, assert_same_ids, encoder_of
from tests.tokenizers.published import EVERY_STRETCH
from tests.tokenizers.tokenizer_files import SENTENCES

FUZZ = settings(
    max_examples=40 if EVERY_STRETCH else 6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
NAMES = (
    *("<s>", "</s>", "<unk>", "<pad>", "[INST]", "[/INST]", "<0x0A>", "<|end|>", "<tool>"),
    *("<SPECIAL_9>", "[REF]", "[REFERENCE_DOC_1]", "▁", "  ", "\r\n", "\t", "'LL", "'ſ", "3.14"),
)
MARKS = [chr(point) for point in range(0x300, 0x3000) if unicodedata.category(chr(point))[0] == "M"]
TEXT = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.text(st.sampled_from(" \n\t\r'-_.aAbZ09éñ中の한"), max_size=12),
        st.text(st.sampled_from(MARKS), max_size=4),
        st.text(st.sampled_from(compared_characters()), max_size=3),
        st.sampled_from(NAMES),
        st.sampled_from(SENTENCES),
    ),
    max_size=6,
).map("".join)


@pytest.fixture(scope="session")
def case(tokenizer_path):
    """Name in ``MAKERS`` -> the adapter and its encoder, which uses the engine."""

    @cache
    def made(name: str) -> tuple[TableTokenizer, FastEncoder]:
        adapter = adapter_of(tokenizer_path(name), engine="gigatoken")
        assert adapter.prepare_engine() is None
        return adapter, adapter._fast

    return made


@pytest.mark.parametrize("name", FAST if EVERY_STRETCH else FAST[1::2])
@FUZZ
@given(texts=st.lists(TEXT, max_size=6))
def test_ids_are_those_of_the_library_for_any_text(case, name, texts):
    adapter, encoder = case(name)
    assert_same_ids(encoder, adapter, texts)


@pytest.mark.parametrize("name", FAST if EVERY_STRETCH else FAST[1:2] + FAST[3:])
def test_a_text_of_a_batch_has_the_ids_that_it_has_alone(case, name):
    adapter, encoder = case(name)
    texts = [FILLER, "", "The <s> of\n\n  it's", "é中 123456", "a</s>b<|end|>c [INST] d", ""]
    for parse_special in (True, False):
        rows = adapter.text_to_ids_batch(texts, parse_special=parse_special)
        assert [row.tolist() for row in rows] == [
            adapter.text_to_ids(text, parse_special=parse_special) for text in texts
        ]
    assert encoder.is_fast
    for batch in (texts, []):
        ids, offsets = encoder.encode_batch(batch)
        assert (ids.dtype, offsets.dtype) == (np.int32, np.int64)
        assert offsets.tolist() == [0, *np.cumsum([len(row) for row in rows[: len(batch)]])]


@pytest.mark.parametrize("name", ["sentencepiece-v3", "huggingface-metaspace"])
@FUZZ
@given(texts=st.lists(TEXT, min_size=1, max_size=6))
def test_a_call_for_many_texts_gives_what_a_call_for_each_does(case, name, texts):
    _, encoder = case(name)
    documents = [text.encode() for text in texts]
    each = encoder._engine.encode(documents)
    many = engine_module._call(encoder._engine._tokenizer, documents, False)
    for got, want in zip(many, each, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["sentencepiece-v3", "rank-file"])
def test_threads_of_the_caller_do_not_get_into_each_others_way(case, name, monkeypatch):
    adapter, encoder = case(name)
    monkeypatch.setattr(engine_module, "_LEAST_SHARE", 1 << 16)
    batches = [[FILLER * 30, *SENTENCES], ["small", FILLER], [FILLER * 40], ["a", FILLER]] * 4
    expected = [adapter.text_to_flat_ids(batch)[0] for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        for (got, _), want in zip(pool.map(encoder.encode_batch, batches), expected, strict=True):
            np.testing.assert_array_equal(got, want)


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1),
    threads=st.integers(1, 5),
    least=st.integers(1, 9),
)
def test_shares_are_the_documents_in_order(sizes, threads, least):
    documents = [bytes(size) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "_LEAST_SHARE", least)
        shares = engine_module._shares(documents, threads)
    assert list(chain(*shares)) == documents
    assert len(shares) <= threads
    assert all(shares)


def test_a_text_longer_than_the_engine_cuts_at_is_encoded_whole(case):
    adapter, encoder = case("rank-file")
    long = "\n".join(SENTENCES) * 43 + "  tail"
    assert len(long.encode()) > engine_module._LONG
    assert_same_ids(encoder, adapter, ["short", long, "", "also short"])


def test_a_batch_on_several_threads_keeps_its_order(case, monkeypatch):
    adapter, encoder = case("sentencepiece-v3")
    monkeypatch.setattr(engine_module, "_LEAST_SHARE", 1 << 11)
    monkeypatch.setattr(engine_module, "_threads", lambda: 3)
    texts = ["", *SENTENCES, "", FILLER, ""]
    documents = [text.encode() for text in texts]
    shares = engine_module._shares(documents, 3)
    assert len(shares) == 3
    assert list(chain(*shares)) == documents
    assert_same_ids(encoder, adapter, texts)


@pytest.mark.parametrize("name", ["rank-file", "huggingface-nfc"])
def test_characters_that_python_does_not_know_go_to_the_library(case, name):
    adapter, encoder = case(name)
    unknown = next(chr(i) for i in range(0x378, 0x10000) if unicodedata.category(chr(i)) == "Cn")
    texts = [FILLER, f"  {unknown}'sx", "plain", f"é{unknown}"]
    assert encoder.unproven.texts_with(texts) == [1, 3]
    assert_same_ids(encoder, adapter, texts)


@pytest.mark.parametrize("name", ["rank-file", "huggingface-nfc"])
def test_common_scripts_and_emoji_do_not_go_to_the_library(case, name):
    _, encoder = case(name)
    text = "The é ñ ß ж λ א ع ह বা ไ த 中 の カ 한 🙂 👩‍👩‍👧 🤷🏽‍♀️ € → ½ １２ \u00a0\u3000\t"
    assert encoder.unproven.texts_with([text, unicodedata.normalize("NFD", text)]) == []


def test_a_mark_that_one_normaliser_does_not_know_is_found(case):
    adapter, encoder = case("huggingface-nfc")
    # Unicode 10 gave U+1DF6 a combining class; the tokenizers library normalises by Unicode 9.
    text = "a\u1df6\u0301b"
    assert encoder.unproven.covers("\u1df6")
    alone, _ = encoder._engine.encode([text.encode()])
    assert alone.tolist() != adapter.text_to_ids(text)
    assert_same_ids(encoder, adapter, [text])


@pytest.mark.parametrize("young", [range(0x1F900, 0x1F904), range(0x2A700, 0x2B735)])
def test_every_character_that_one_library_reads_otherwise_is_found(case, young):
    adapter, encoder = case("rank-file")

    class Forgetful:
        """The engine without some characters, as an older Unicode would have it."""

        reads_classes, composes, names = True, False, ()

        def encode(self, documents):
            hidden = str.maketrans(dict.fromkeys(young, "a"))
            return encoder._engine.encode(
                [raw.decode().translate(hidden).encode() for raw in documents]
            )

    unproven = prove(Forgetful(), adapter._encode_batch, adapter._table, adapter.vocab, "here")
    assert all(unproven.covers(chr(point)) for point in young)
    for neighbour in (young.start - 300, young.stop + 300):
        assert unproven.covers(chr(neighbour)) == (unicodedata.category(chr(neighbour)) == "Cn")


def test_user_defined_pieces_are_read_as_the_library_reads_them(case):
    adapter, encoder = case("sentencepiece-v3")
    texts = ["a [REFERENCE_DOC_1] b", "[REFERENCE_DOC_12]", "[REFERENCE_DOC_x]", "[INST] c"]
    assert encoder.unproven.texts_with(texts) == [0, 1]
    assert_same_ids(encoder, adapter, texts)


def test_a_worn_engine_is_built_anew(case, monkeypatch):
    adapter, _ = case("rank-file")
    built = []
    encoder = encoder_of(adapter)
    build = encoder._build
    encoder._build = lambda: built.append(1) or build()
    encoder.prepare()
    monkeypatch.setattr(
        engine_module, "_CACHED_PER_THREAD", len(FILLER) // engine_module._threads()
    )
    for _ in range(4):
        assert_same_ids(encoder, adapter, ["abc"])
    assert len(built) > 1


@pytest.mark.parametrize("name", ["huggingface-nfc", "sentencepiece-v3"][: 1 + EVERY_STRETCH])
def test_a_copy_in_another_process_needs_no_new_proof(case, name):
    adapter, _ = case(name)
    copied = pickle.loads(pickle.dumps(adapter))
    assert not copied._fast.is_fast
    assert copied._fast.unproven is not None
    assert copied.prepare_engine() is None
    assert_same_ids(copied._fast, adapter, ["a <s> é 中\u1df6\u0301"])


def test_what_a_library_adds_around_a_text_stays_around_it(tokenizer_path):
    path = tokenizer_path("huggingface-metaspace")
    adapter = adapter_of(path, engine="gigatoken", include_special_tokens=True)
    texts = [FILLER, "", "é中"]
    ids, offsets = adapter.text_to_flat_ids(texts)
    for text, begin, end in zip(texts, offsets, offsets[1:], strict=False):
        assert ids[begin:end].tolist() == adapter.text_to_ids(text)
        assert (ids[begin], ids[end - 1]) == (adapter.bos_id, adapter.eos_id)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
@pytest.mark.parametrize("name", ["rank-file", "sentencepiece-v3"][: 1 + EVERY_STRETCH])
def test_a_forked_process_uses_the_engine_of_its_parent(case, name, monkeypatch):
    # Several threads have a share of the first text's batch.
    monkeypatch.setattr(engine_module, "_LEAST_SHARE", 1 << 16)
    _, encoder = case(name)
    texts = [FILLER * 20, "é中 <s>", FILLER * 10]
    expected = [ids.tolist() for ids in encoder.encode_batch(texts)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for got in pool.map_async(_encoded, [(encoder, texts)] * 2, chunksize=1).get(timeout=60):
            assert got == (True, expected)
    # And without a copy: the child goes on with what it inherited.
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        same = [ids.tolist() for ids in encoder.encode_batch(texts)] == expected
        os.write(writer, b"same" if same and encoder.is_fast else b"else")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 4) == b"same"


def _encoded(job: tuple[FastEncoder, list[str]]) -> tuple[bool, list[list[int]]]:
    encoder, texts = job
    encoder.prepare()
    return encoder.is_fast, [ids.tolist() for ids in encoder.encode_batch(texts)]


def test_the_probes_hold_what_tokenizers_tell_apart():
    text = "".join(probe_texts())
    assert "" in probe_texts()
    kinds = {unicodedata.category(character) for character in text}
    assert kinds >= {"Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No"}
    assert kinds >= {"Zs", "Zl", "Zp", "Cc", "Cf", "Co", "Po", "Sm", "Sc", "So", "Sk", "Pd"}
    assert set(map(chr, range(0x80))) <= set(text)
    assert text != unicodedata.normalize("NFC", text) != unicodedata.normalize("NFD", text)

"""``.bin`` and ``.idx`` as a run's data: exact texts, the student's own ids, what is refused."""

import dataclasses
import json
import os
import pickle
import shutil
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.data.global_batches import Replica
from megatron_ext.documents.id_tokenizers import IdTokenizers, settings_of
from megatron_ext.documents.indexed_file import IndexedFile, indexed_prefixes
from megatron_ext.documents.indexed_texts import IndexedTexts
from megatron_ext.errors import ConfigError, DataError, MegatronExtError, TokenizerError
from megatron_ext.training.configuration.config import DataConfig
from megatron_ext.training.run_data import RunData
from tests.data.readers import TEXTS, student_ids, student_tokenizer, teacher_tokenizer
from tests.documents.indexed_files import tokenize, write_ids
from tests.training.tiny_run import student_run

WHOLE = Replica(0, 1, 2)
TOKENIZERS = {"student": student_tokenizer, "teacher": teacher_tokenizer}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """``TEXTS`` as JSON lines, and as ids of both tokenizers."""
    folder = tmp_path_factory.mktemp("made")
    lines = folder / "corpus.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["", *TEXTS]))
    for name, tokenizer in TOKENIZERS.items():
        tokenize(lines, folder / name, tokenizer())
    return folder


def ids_of(text):
    return student_tokenizer().text_to_ids(text)


def texts_at(prefix, tokenizer, folder):
    return IndexedTexts(prefix, tokenizer, are_the_students=True, cache_dir=folder / "index")


def run_data(folder, *train, **data):
    config = dataclasses.replace(
        student_run(folder, "run", global_batch_size=8),
        data=DataConfig(train=train, index_cache=str(folder / "index"), **data),
    )
    return RunData.read(config, student_tokenizer(), {"teacher": (teacher_tokenizer(), 60)})


def samples(data, iterations=3):
    batches = data.batches(WHOLE)
    taken = [batches.take() for _ in range(iterations)]
    batches.close()
    return list(chain.from_iterable(chain.from_iterable(taken)))


def ids_by_model(data):
    """Of each piece of three global batches: the student's ids, and the teacher's."""
    pieces = chain.from_iterable(sample.pieces for sample in samples(data))
    return [[piece.student_ids.tolist(), piece.teachers[0].ids.tolist()] for piece in pieces]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_are_decoded_to_the_very_texts(made, tmp_path, name):
    texts = texts_at(f"{made}/{name}_text_document", TOKENIZERS[name](), tmp_path)
    assert [texts.content(number) for number in range(len(texts))] == TEXTS
    assert texts.sizes.tolist() == [len(text.encode()) for text in TEXTS]
    assert texts.report.empty_rows == 1
    assert texts.report.bytes == sum(len(text.encode()) for text in TEXTS)
    # The first document has no tokens, and counts.
    assert texts.place(0) == f"{made}/{name}_text_document.bin:2"
    for number, text in enumerate(TEXTS):
        kept = texts.student_ids(number)
        assert kept.tolist() == TOKENIZERS[name]().text_to_ids(text)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_run_reads_the_same_from_ids_as_from_text(made, tmp_path, name, packing):
    from_text = run_data(tmp_path, f"{made}/corpus.jsonl", packing=packing)
    from_ids = run_data(tmp_path, f"{made}/{name}_text_document.idx", packing=packing)
    assert ids_by_model(from_ids) == ids_by_model(from_text)
    assert from_ids.has_student_ids == (name == "student")


def test_workers_read_the_same_and_a_run_goes_on_where_it_was(made, tmp_path):
    prefix = f"{made}/student_text_document"
    whole = [student_ids(sample) for sample in samples(run_data(tmp_path, prefix), 4)]
    reader = run_data(tmp_path, prefix, num_workers=1).batches(WHOLE)
    taken = [reader.take(), reader.take()]
    state = json.loads(json.dumps(reader.state([reader.positions()])))
    reader.close()
    later = run_data(tmp_path, prefix).batches(WHOLE)
    later.load_state(state)
    taken += [later.take(), later.take()]
    found = chain.from_iterable(chain.from_iterable(taken))
    assert [student_ids(sample) for sample in found] == whole


def test_a_blend_and_a_list_mix_ids_with_text(made, tmp_path):
    lines, prefix = f"{made}/corpus.jsonl", f"{made}/teacher_text_document"
    blended = run_data(tmp_path, "0.25", prefix, "0.75", lines)
    assert [source.weight for source in blended.sources] == [0.25, 0.75]
    batches = blended.batches(WHOLE)
    for _ in range(4):
        batches.take()
    assert batches.state([batches.positions()])["counts"] == [8, 24]
    (source,) = run_data(tmp_path, lines, f"{prefix}.bin", lines.replace("corpus", "c*s")).sources
    documents = source.dataset.documents
    assert len(documents) == 3 * len(TEXTS) == len(documents.sizes)
    contents = [documents.content(number) for number in range(len(documents))]
    assert contents == TEXTS * 3
    assert documents.report.documents == len(documents)
    places = [documents.place(number).rpartition("/")[2] for number in (0, 24, len(documents) - 1)]
    assert places == ["corpus.jsonl:2", "teacher_text_document.bin:3", "corpus.jsonl:24"]


def test_documents_of_several_sequences_and_an_eod_and_a_bos(tmp_path):
    tokenizer = student_tokenizer()
    bos, eod = tokenizer.bos_id, tokenizer.eod
    sequences = [ids_of("One. "), ids_of("Two."), [eod]]
    prefix = write_ids(tmp_path / "by_hand", [sequences, [], [[bos, *ids_of("x"), eod]], [[eod]]])
    texts = texts_at(prefix, tokenizer, tmp_path)
    assert [texts.content(number) for number in range(len(texts))] == ["One. Two.", "x"]
    assert texts.sizes.tolist() == [9, 1]
    assert texts.report.empty_rows == 2
    assert texts.place(1) == f"{prefix}.bin:3"


def bad_documents(folder):
    """Among good documents one with half a character, and one with a control token inside."""
    tokenizer = student_tokenizer()
    half = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xe6")
    good = [[ids_of(f"Good {number}.")] for number in range(20)]
    spoilt = [
        [[*ids_of("half"), half]],
        [[*ids_of("a"), tokenizer.eod, *ids_of("b"), tokenizer.eod]],
    ]
    return write_ids(folder / "bad", [*good[:10], *spoilt, *good[10:]])


REASONS = {
    11: "the ids of the document spell no UTF-8; got 0xe6 at byte 4 of 5",
    12: "the document holds a control token; got '</s>', id 2, as its token 2",
}


def test_documents_that_spell_no_text_are_left_out_with_their_places(tmp_path):
    prefix = bad_documents(tmp_path)
    data = run_data(tmp_path, prefix, indexed_tokenizer="student", bad_documents="skip")
    (source,) = data.sources
    blocks = [source.dataset[0, block] for block in range(source.dataset.block_count(0))]
    refused = {document.place: document.reason for block in blocks for document in block.refused}
    assert refused.keys() == {f"{prefix}.bin:{number}" for number in REASONS}
    for number, reason in REASONS.items():
        assert refused[f"{prefix}.bin:{number}"].startswith(reason)
    assert sum(len(block.samples) for block in blocks) == 20
    # Of the second, what it would have spelled.
    assert sum(block.dropped_bytes for block in blocks) == len(b"half\xe6") + len(b"ab")
    assert sum(block.retokenized for block in blocks) == 0


def test_a_document_that_spells_no_text_ends_a_run_that_is_to_stop(tmp_path):
    prefix = bad_documents(tmp_path)
    (source,) = run_data(tmp_path, prefix, indexed_tokenizer="student").sources
    with pytest.raises(TokenizerError, match=r"bad\.bin:1[12]: the (ids|document)"):
        [source.dataset[0, block] for block in range(source.dataset.block_count(0))]


def test_held_out_documents_that_spell_no_text_are_said(tmp_path, made):
    prefix = bad_documents(tmp_path)
    options = {"validation": (prefix,), "indexed_tokenizer": "student"}
    with pytest.raises(TokenizerError, match=r"bad\.bin:11: "):
        run_data(tmp_path, f"{made}/corpus.jsonl", **options)
    data = run_data(tmp_path, f"{made}/corpus.jsonl", bad_documents="skip", **options)
    said = data.summary()["validation"]["refused"]
    assert [document["place"] for document in said] == [f"{prefix}.bin:{n}" for n in REASONS]


def test_ids_that_the_tokenizer_does_not_give_are_counted_once(tmp_path):
    letters = [i for word in ("D", "r", "o", "p", "o", "u", "t") for i in ids_of(word)]
    assert letters != ids_of("Dropout")
    documents = [[ids_of(f"Text {number}.")] for number in range(31)]
    prefix = write_ids(tmp_path / "dropped", [*documents[:7], [letters], *documents[7:]])
    data = run_data(tmp_path, prefix, indexed_tokenizer="student")
    (source,) = data.sources
    blocks = [source.dataset[0, block] for block in range(source.dataset.block_count(0))]
    assert sum(block.retokenized for block in blocks) == 1
    trained = [student_ids(sample) for block in blocks for sample in block.samples]
    assert sorted(trained) == sorted([*(document[0] for document in documents), ids_of("Dropout")])
    # An epoch is 32 rows.
    assert [counted(data, size, 4) for size in (1, 2, 4)] == [1, 1, 1]
    # Fewer streams than rows: replicas pass over one another's.
    few = write_ids(tmp_path / "few", [[letters], *documents[:5]])
    data = run_data(tmp_path, few, indexed_tokenizer="student")
    assert [counted(data, size, 4) for size in (1, 2, 4)] == [counted(data, 1, 4)] * 3
    assert counted(data, 1, 4) > 3


def test_a_run_that_goes_on_within_a_block_counts_its_documents_once(tmp_path):
    letters = [i for letter in "dropout" for i in ids_of(letter)] * 4
    prefix = write_ids(tmp_path / "long", [[letters] for _ in range(80)])
    data = run_data(tmp_path, prefix, indexed_tokenizer="student", packing=True)
    (source,) = data.sources
    assert source.dataset.block_count(0) == 1
    whole = data.batches(WHOLE)
    before = data.batches(WHOLE)
    before.take()
    after = data.batches(WHOLE)
    after.load_state(before.state([before.positions()]))
    for reader in (whole, whole, after):
        reader.take()
    parts = before.faults_since_asked().retokenized + after.faults_since_asked().retokenized
    assert parts == whole.faults_since_asked().retokenized == 80


def counted(data, size, iterations):
    """Documents with other ids, of all replicas."""
    readers = [data.batches(Replica(rank, size, 2)) for rank in range(size)]
    for reader in readers:
        for _ in range(iterations):
            reader.take()
    found = sum(reader.faults_since_asked().retokenized for reader in readers)
    assert not any(reader.faults_since_asked().retokenized for reader in readers)
    return found


def test_the_report_beside_a_dataset_says_what_made_it(made):
    for name, tokenizer in TOKENIZERS.items():
        prefix = f"{made}/{name}_text_document"
        assert settings_of(prefix)["tokenizer_fingerprint"] == tokenizer().fingerprint()
        # Whatever the configuration says of datasets without a report.
        known = IdTokenizers(student_tokenizer(), {"big": teacher_tokenizer()}, "student")
        assert known.of(prefix) is tokenizer()


def test_a_dataset_of_another_tokenizer_is_refused_until_it_is_named(made, tmp_path):
    prefix = f"{made}/teacher_text_document"
    with pytest.raises(ConfigError, match="by a tokenizer that the run does not know") as raised:
        IdTokenizers(student_tokenizer(), {}).of(prefix)
    assert "set data.indexed_tokenizer" in str(raised.value)
    named = IdTokenizers(student_tokenizer(), {}, str(teacher_tokenizer().path)).of(prefix)
    assert named.fingerprint() == teacher_tokenizer().fingerprint()
    unknown = write_ids(tmp_path / "unknown", [[ids_of("x")]])
    with pytest.raises(ConfigError, match="nothing says which tokenizer made the ids"):
        IdTokenizers(student_tokenizer(), {}).of(unknown)
    with pytest.raises(ConfigError, match="no tokenizer goes by this name; got bgi"):
        IdTokenizers(student_tokenizer(), {"big": teacher_tokenizer()}, "bgi").of(unknown)


def test_conversations_are_refused(made, tmp_path):
    prefix = f"{made}/student_text_document"
    with pytest.raises(ConfigError, match="asks for conversations"):
        run_data(tmp_path, prefix, conversations=True)
    report = {"settings": {"mode": "sft", "json_keys": ["messages"]}}
    (tmp_path / "chat_report.json").write_text(json.dumps(report))
    for name in ("chat_messages_document", "chat_messages_loss_mask"):
        with pytest.raises(ConfigError, match="holds conversations"):
            IdTokenizers(student_tokenizer(), {}, "student").of(f"{tmp_path}/{name}")


def test_a_name_is_a_prefix_either_file_or_a_pattern(made):
    prefix = f"{made}/student_text_document"
    for name in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
        assert indexed_prefixes(name) == [prefix]
    both = [prefix, f"{made}/teacher_text_document"]
    assert indexed_prefixes(f"{made}/*_text_document.bin") == both
    assert indexed_prefixes(f"{made}/corpus.jsonl") == []
    assert indexed_prefixes(f"{made}") == []
    with pytest.raises(DataError, match="matches no indexed dataset"):
        indexed_prefixes(f"{made}/nothing*.idx")


def truncate(path, size):
    with path.open("r+b") as file:
        file.truncate(size)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda p: p.with_suffix(".idx").unlink(), r"copy\.idx: an indexed dataset is a \.bin"),
        (lambda p: p.with_suffix(".bin").unlink(), r"copy\.bin: an indexed dataset is a \.bin"),
        (lambda p: truncate(p.with_suffix(".idx"), 60), r"copy\.idx: the file is not an index"),
        (lambda p: truncate(p.with_suffix(".idx"), 0), r"copy\.idx: the file is not an index"),
        (lambda p: truncate(p.with_suffix(".bin"), 40), r"copy\.bin: the \.bin does not fit"),
        (lambda p: truncate(p.with_suffix(".bin"), 0), r"copy\.bin: the dataset holds no ids"),
        (lambda p: p.with_suffix(".idx").write_bytes(b"\0" * 200), "not an index of an indexed"),
    ],
    ids=["no index", "no bin", "short index", "empty index", "short bin", "empty bin", "zeros"],
)
def test_damaged_files_are_refused_at_the_start(made, tmp_path, spoil, words):
    for end in (".bin", ".idx"):
        shutil.copy(f"{made}/student_text_document{end}", tmp_path / f"copy{end}")
    spoil(tmp_path / "copy")
    with pytest.raises(DataError, match=words):
        IndexedFile(str(tmp_path / "copy"))


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (-8, 1, "the documents of the index are not its sequences"),
        (-32, 1, "the documents of the index are not its sequences"),
        (-16, 9, "the index is not in the order of the ids"),
        (34 + 3 * 4 + 8, 0, "the index is not in the order of the ids"),
    ],
    ids=["last document", "first document", "a document behind the next", "a sequence elsewhere"],
)
def test_an_index_that_is_spoilt_is_refused(tmp_path, place, value, words):
    prefix = write_ids(tmp_path / "spoilt", [[ids_of(word)] for word in ("one", "two", "three")])
    index = bytearray(Path(f"{prefix}.idx").read_bytes())
    place %= len(index)
    index[place : place + 8] = value.to_bytes(8, "little")
    Path(f"{prefix}.idx").write_bytes(index)
    with pytest.raises(DataError, match=rf"spoilt\.(idx|bin): {words}"):
        texts_at(prefix, student_tokenizer(), tmp_path)


def test_what_is_read_together_does_not_matter(made, tmp_path, monkeypatch):
    prefix = f"{made}/student_text_document"
    whole = texts_at(prefix, student_tokenizer(), tmp_path / "whole")
    monkeypatch.setattr("megatron_ext.documents.indexed_file._BLOCK_IDS", 60)
    parts = texts_at(prefix, student_tokenizer(), tmp_path / "parts")
    assert len(list(IndexedFile(prefix).blocks())) > 5
    assert parts.sizes.tolist() == whole.sizes.tolist()
    assert (parts.sha256, parts.report) == (whole.sha256, whole.report)
    assert [parts.content(number) for number in range(len(parts))] == TEXTS


def test_an_id_outside_the_vocabulary_is_said_with_its_document(tmp_path):
    size = student_tokenizer().vocab_size
    prefix = write_ids(tmp_path / "wide", [[ids_of("x")], [], [[5, size]], [[1]]], np.int64)
    with pytest.raises(DataError, match=rf"wide\.bin:3: an id is outside .* got {size}; "):
        texts_at(prefix, student_tokenizer(), tmp_path)


def test_files_that_change_are_not_read_on(tmp_path):
    prefix = write_ids(tmp_path / "changing", [[ids_of("x")]])
    texts = texts_at(prefix, student_tokenizer(), tmp_path)
    sent = pickle.dumps(texts)
    assert pickle.loads(sent).content(0) == "x"
    os.utime(f"{prefix}.bin", ns=(1, 1))
    with pytest.raises(MegatronExtError, match="the file has changed since the run was started"):
        pickle.loads(sent).content(0)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_the_size_of_an_id_does_not_matter(tmp_path, dtype):
    """Two bytes an id are what Megatron takes for vocabularies below 65,500."""
    ids = teacher_tokenizer().text_to_ids("  Ten €, ½ naïve.")
    texts = texts_at(write_ids(tmp_path / "d", [[ids]], dtype), teacher_tokenizer(), tmp_path)
    assert texts.content(0) == "  Ten €, ½ naïve."
    assert texts.sha256 == _sha256_of_int32(tmp_path, ids)


def _sha256_of_int32(folder, ids):
    return texts_at(write_ids(folder / "wide", [[ids]]), teacher_tokenizer(), folder).sha256

"""The original .pt files: read as they are, written so that the original readers read them."""

import os
import pickle
import warnings

import numpy as np
import pytest
import torch

from megatron_ext.errors import ProjectionError
from megatron_ext.projection import SparseProjection
from megatron_ext.projection.nemo.legacy_file import read_legacy_file, write_legacy_file
from megatron_ext.projection.projection_matrix import ARRAYS
from tests.projection.greedy_tokenizer import GreedyTokenizer

STUDENT = GreedyTokenizer(["<s>", b"aa", b"ab", b"b", "<mine>"], bos="<s>")
TEACHER = GreedyTokenizer([b"a", b"b", "<bos>"], bos="<bos>")
TABLE = {
    "indices": torch.tensor([[3, -1, -1], [1, 4, 2], [0, 0, -1]]),
    "likelihoods": torch.tensor([[1.0, 0.0, 0.0], [0.75, 0.25, 0.0], [0.5, 0.5, 0.0]]),
    "student_model_id": "student",
    "teacher_model_id": "teacher",
    "enable_scale_trick": False,
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "map.pt"


def read(path, content):
    torch.save(content, path)
    return read_legacy_file(path)


def triples(entries):
    columns = (entries.rows, entries.columns, entries.weights)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_table_is_read_entry_by_entry(path):
    entries = read(path, TABLE)
    assert triples(entries) == [(0, 3, 1.0), (1, 1, 0.75), (1, 4, 0.25), (2, 0, 0.5), (2, 0, 0.5)]
    assert entries.slots.tolist() == [0, 0, 1, 0, 1]
    assert (entries.height, entries.width, entries.slot_count) == (3, None, 3)
    assert entries.strict_rows.tolist() == [True, False, False]
    assert entries.metadata == {
        "student_model_id": "student",
        "teacher_model_id": "teacher",
        "enable_scale_trick": "False",
    }


def test_the_older_names_of_the_models_are_known(path):
    content = {"indices": TABLE["indices"], "likelihoods": TABLE["likelihoods"]}
    entries = read(path, {**content, "model_A_id": "one", "model_B_id": "two"})
    assert entries.metadata == {"student_model_id": "one", "teacher_model_id": "two"}


@pytest.mark.parametrize(
    ("dtype", "rounding"), [("float32", 2**-24), ("bfloat16", 2**-8), ("float16", 2**-11)]
)
def test_the_type_of_the_likelihoods_says_how_far_they_are_rounded(path, dtype, rounding):
    likelihoods = TABLE["likelihoods"].to(getattr(torch, dtype))
    entries = read(path, {**TABLE, "likelihoods": likelihoods})
    assert entries.rounding == rounding
    assert triples(entries) == triples(read(path, TABLE))


PAIRS = {(1, 4): 0.25, (0, 3): 1.0, (1, 1): 0.75, (1, -1): 0.5, (2, 2): 0.0}
DENSE = torch.zeros(3, 5)
CSR = object()
DENSE[0, 3], DENSE[1, 1], DENSE[1, 4] = 1.0, 0.75, 0.25


@pytest.mark.parametrize(
    ("content", "size"),
    [
        pytest.param(PAIRS, (3, None), id="pairs"),
        pytest.param(DENSE, (3, 5), id="dense"),
        pytest.param(DENSE.to_sparse_coo(), (3, 5), id="coo"),
        pytest.param(CSR, (3, 5), id="csr"),
        pytest.param({"projection": DENSE, "model_A_id": "one"}, (3, 5), id="in a dict"),
    ],
)
def test_other_forms_are_the_same_entries(path, content, size):
    # torch warns of this layout when it is first made.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        entries = read(path, DENSE.to_sparse_csr() if content is CSR else content)
    assert sorted(triples(entries)) == [(0, 3, 1.0), (1, 1, 0.75), (1, 4, 0.25)]
    assert (entries.height, entries.width) == size
    assert (entries.slot_count, entries.strict_rows) == (0, None)


def test_a_pair_that_a_sparse_matrix_repeats_stays_repeated(path):
    matrix = torch.sparse_coo_tensor([[0, 0], [1, 1]], [0.5, 0.5], (2, 2), check_invariants=True)
    assert triples(read(path, matrix)) == [(0, 1, 0.5), (0, 1, 0.5)]


PROJECTION = SparseProjection.from_entries(
    [0, 1, 1, 3],
    [3, 1, 4, 2],
    [1.0, 0.25, 0.75, 1.0],
    (5, 6),
    {"student_model_id": "student", "note": "kept"},
    vocab_sizes=(4, 5),
    is_exact_row=np.array([True, False, False, False, False]),
)


def test_what_is_written_is_the_original_schema(path):
    write_legacy_file(PROJECTION, path)
    content = torch.load(path, weights_only=True)
    assert content["indices"].tolist() == [[3, -1], [4, 1], [-1, -1], [2, -1], [-1, -1]]
    assert content["indices"].dtype == torch.int64
    assert content["likelihoods"].tolist() == [[1, 0], [0.75, 0.25], [0, 0], [1, 0], [0, 0]]
    assert content["likelihoods"].dtype == torch.float32
    assert (content["student_model_id"], content["teacher_model_id"]) == ("student", "")
    assert content["enable_scale_trick"] is False


def test_what_is_written_is_read_again(path):
    write_legacy_file(PROJECTION, path)
    entries = read_legacy_file(path)
    again = entries.projection(
        (entries.height, entries.width),
        vocab_sizes=entries.vocab_sizes,
        is_exact_row=entries.is_exact_row,
    )
    for name in ("indptr", "indices", "values", "is_exact_row"):
        assert getattr(again, name).tolist() == getattr(PROJECTION, name).tolist()
    assert (again.shape, again.vocab_sizes) == ((5, 6), (4, 5))
    assert again.metadata["note"] == "kept"


def test_a_row_of_one_entry_has_an_empty_slot_behind_it(path):
    write_legacy_file(SparseProjection.from_entries([0], [0], [1.0], (1, 1)), path)
    assert torch.load(path, weights_only=True)["indices"].tolist() == [[0, -1]]
    assert read_legacy_file(path).strict_rows.tolist() == [True]


def test_bfloat16_is_written_where_asked_for(path):
    write_legacy_file(PROJECTION, path, dtype="bfloat16", slot_count=3)
    content = torch.load(path, weights_only=True)
    assert content["likelihoods"].dtype == torch.bfloat16
    assert content["indices"].shape == (5, 3)


def test_a_row_longer_than_the_table_is_refused(path):
    with pytest.raises(ProjectionError, match="got 2 entries in row 1; expected at most 1"):
        write_legacy_file(PROJECTION, path, slot_count=1)
    assert not path.exists()


def test_a_missing_folder_is_not_made(tmp_path):
    with pytest.raises(ProjectionError, match="create the folder first"):
        write_legacy_file(PROJECTION, tmp_path / "none" / "map.pt")


# Bad files.


class Malicious:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "bare pickle"])
def test_a_pickle_with_code_is_refused_and_not_run(path, tmp_path, zipped):
    target = tmp_path / "executed"
    content = {**TABLE, "student_model_id": Malicious(target)}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ProjectionError, match="more than tensors, numbers and names") as refusal:
        read_legacy_file(path)
    assert not target.exists()
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert "got posix.mkdir;" in str(refusal.value)
    assert "weights_only" not in str(refusal.value)
    pickle.loads(pickle.dumps(Malicious(target)))
    assert target.exists(), "the pickle of this test does nothing"


@pytest.mark.parametrize("kept", [0, 1, 100, 0.5, -1])
def test_a_part_of_a_file_is_refused(path, kept):
    torch.save(TABLE, path)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    with pytest.raises(ProjectionError, match=r"map\.pt: the file"):
        read_legacy_file(path)


def test_a_file_with_one_wrong_bit_is_refused(path):
    indices = torch.arange(4096)[:, None]
    torch.save({**TABLE, "indices": indices, "likelihoods": torch.ones(4096, 1)}, path)
    content = bytearray(path.read_bytes())
    content[content.index(indices.numpy().tobytes()) + 8 * 1000] ^= 1
    path.write_bytes(bytes(content))
    assert torch.load(path, weights_only=True)["indices"][1000].item() == 1001, "torch reads it"
    with pytest.raises(ProjectionError, match=r"complete torch file; got .* by its checksum"):
        read_legacy_file(path)


@pytest.mark.parametrize("content", [b"PK\x03\x04" * 20, b"\x80\x02damaged"], ids=repr)
def test_damage_is_told_in_a_few_words(path, content):
    path.write_bytes(content)
    with pytest.raises(ProjectionError, match=r"map\.pt: the file is .*; got \D") as refusal:
        read_legacy_file(path)
    assert len(str(refusal.value)) < 350 + len(str(path))


@pytest.mark.parametrize("content", [b"{}", b"\xff" * 64, b"PK\x03\x04" * 20], ids=repr)
def test_a_file_that_is_not_torchs_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(ProjectionError, match=r"map\.pt: the file"):
        read_legacy_file(path)


def test_a_missing_file_and_a_folder_are_refused(path, tmp_path):
    with pytest.raises(ProjectionError, match="there is no projection file"):
        read_legacy_file(path)
    with pytest.raises(ProjectionError, match="not a complete torch file"):
        read_legacy_file(tmp_path)


def changed(name, value):
    return {**TABLE, name: value}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param({"weight": torch.ones(2)}, "got a dict with 'weight'", id="model"),
        pytest.param({}, "nothing in it", id="empty dict"),
        pytest.param([1, 2], "got list", id="list"),
        pytest.param({"indices": TABLE["indices"]}, "whole numbers|not a projection", id="half"),
        pytest.param(changed("indices", [[1]]), "indices are not a dense tensor", id="no tensor"),
        pytest.param(
            changed("indices", TABLE["indices"][:, :2]), r"shapes \[3, 2\] and \[3, 3\]", id="shape"
        ),
        pytest.param(changed("indices", TABLE["indices"].float()), "whole numbers", id="float ids"),
        pytest.param(
            changed("likelihoods", TABLE["indices"]), "not real numbers", id="integer weights"
        ),
        pytest.param(changed("indices", TABLE["indices"] - 1), "not an id; got -2", id="below -1"),
        pytest.param(
            changed("indices", TABLE["indices"] + 2**40), "row 0 .* not an id; got", id="too large"
        ),
        pytest.param(
            changed("likelihoods", TABLE["likelihoods"] * float("nan")), "got nan", id="nan"
        ),
        pytest.param(changed("likelihoods", TABLE["likelihoods"] / 0), "got inf", id="inf"),
        pytest.param(changed("likelihoods", -TABLE["likelihoods"]), "got -1.0", id="negative"),
        pytest.param(torch.ones(3), r"got shape \[3\]", id="vector"),
        pytest.param({(0, 1): "much"}, "not ids and weights", id="text weight"),
        pytest.param({(0, 1): 1.0, (0, 1, 2): 1.0}, "no projection", id="triple"),
        pytest.param({(-5, 1): 1.0}, "not an id; got -5; expected 0 or more", id="negative row"),
        pytest.param({(10**12, 1): 1.0}, "more rows than a vocabulary", id="row of no vocabulary"),
        pytest.param(changed("shape", [3, 10**15]), "more columns than", id="boundless width"),
        pytest.param(
            changed("indices", TABLE["indices"].to("meta")), "not a dense tensor", id="no numbers"
        ),
        pytest.param(DENSE.to("meta"), "not a projection", id="matrix without numbers"),
        pytest.param(DENSE.to_sparse(1), "not a projection", id="sparse dense rows"),
    ],
)
def test_content_that_is_no_projection_is_refused(path, content, message):
    torch.save(content, path)
    with pytest.raises(ProjectionError, match=message) as refusal:
        read_legacy_file(path)
    assert str(path) in str(refusal.value)


def test_a_file_of_ours_is_loaded_as_what_was_written(path):
    projection = SparseProjection.from_tokenizers(STUDENT, TEACHER)
    write_legacy_file(projection, path)
    told = []
    loaded = SparseProjection.load(path, STUDENT, TEACHER, tell=told.append)
    assert told == []
    for name in ARRAYS:
        assert getattr(loaded, name).tolist() == getattr(projection, name).tolist()
    assert (loaded.shape, loaded.vocab_sizes) == (projection.shape, projection.vocab_sizes)
    assert loaded.metadata == projection.metadata
    with pytest.raises(ProjectionError, match="built for another student"):
        SparseProjection.load(path, TEACHER, STUDENT)
    # The name of a file says nothing.
    path.rename(path.with_suffix(".safetensors"))
    assert SparseProjection.load(path.with_suffix(".safetensors")).metadata == projection.metadata


def dense_of(projection):
    dense = torch.zeros(projection.shape)
    rows = np.repeat(np.arange(projection.shape[0]), np.diff(projection.indptr))
    dense[rows, projection.indices.astype(np.int64)] = torch.from_numpy(projection.values.copy())
    return dense


@pytest.mark.parametrize("kind", ["dense", "sparse", "pairs", "dict of one matrix"])
def test_a_file_that_names_no_vocabulary_is_judged_by_the_tokens(path, kind):
    projection = SparseProjection.from_tokenizers(STUDENT, TEACHER)
    dense = dense_of(projection)
    pairs = {(int(s), int(t)): float(dense[s, t]) for s, t in dense.nonzero()}
    contents = {
        "dense": dense,
        "sparse": dense.to_sparse(),
        "pairs": pairs,
        "dict of one matrix": {"weights": dense, "model_A_id": "one"},
    }
    torch.save(contents[kind], path)
    told = []
    loaded = SparseProjection.load(path, STUDENT, TEACHER, tell=told.append)
    assert told == [
        f"{path}: no fingerprint of the student and of the teacher: "
        "that it is for this pair is checked by sizes and the bytes of tokens alone"
    ]
    for name in ARRAYS:
        assert getattr(loaded, name).tolist() == getattr(projection, name).tolist()
    # It is of this pair from here on.
    loaded.save(path.with_name("again.safetensors"))
    SparseProjection.load(path.with_name("again.safetensors"), STUDENT, TEACHER)
    with pytest.warns(UserWarning, match="of the student: that it is .* checked by nothing"):
        SparseProjection.load(path, STUDENT)


def test_a_file_for_other_tokens_or_with_mass_in_wrong_places_is_told_or_refused(path):
    dense = dense_of(SparseProjection.from_tokenizers(STUDENT, TEACHER))
    torch.save(dense.flip(1), path)
    told = []
    SparseProjection.load(path, STUDENT, TEACHER, tell=told.append)
    assert "mass on tokens that neither hold the row's token nor are in it" in "\n".join(told)
    torch.save(2 * dense, path)
    with pytest.raises(ProjectionError, match="no sound projection; got rows do not sum to 1"):
        SparseProjection.load(path, STUDENT, TEACHER, tell=told.append)


@pytest.mark.parametrize(
    "added",
    [
        pytest.param({"is_exact_row": torch.tensor(True)}, id="one flag"),
        pytest.param({"is_exact_row": torch.ones(3, 2, dtype=torch.bool)}, id="table of flags"),
        pytest.param({"is_exact_row": torch.ones(2, dtype=torch.bool)}, id="too few flags"),
        pytest.param({"vocab_sizes": [3, 10**15], "shape": [3, 5]}, id="tokens without columns"),
        pytest.param(
            {"vocab_sizes": [True, True], "shape": [3, 5]}, id="sizes that are no numbers"
        ),
    ],
)
def test_what_we_add_to_a_file_is_passed_over_where_it_is_not_of_the_table(path, added):
    entries = read(path, {**TABLE, **added})
    assert (entries.is_exact_row, entries.vocab_sizes) == (None, None)

"""Rows by nearest embeddings."""

import json
import tracemalloc

import numpy as np
import pytest
from safetensors.numpy import save_file

from megatron_ext.errors import ProjectionError
from megatron_ext.projection import build_embedding_projection, embedding_builder
from tests.projection.greedy_tokenizer import GreedyTokenizer
from tests.projection.projection_rows import rows_of

STUDENT = GreedyTokenizer(["<s>", b"big", b"cat", b"", "<mine>"], bos="<s>")
TEACHER = GreedyTokenizer([b"large", b"huge", b"cat", b"dog", "<bos>"], bos="<bos>")


def vectors(*rows):
    return np.array(rows, np.float32)


STUDENT_ROWS = vectors([9, 9], [4, 3], [0, -1], [1, 1], [1, 0])
TEACHER_ROWS = vectors([2, 0], [3, 4], [-1, 0], [-4, -3], [4, 3])


def numbered(count, prefix):
    return GreedyTokenizer([f"{prefix}{i:05}".encode() for i in range(count)])


def test_shares_are_cosines_to_a_power_of_the_largest_one():
    projection = build_embedding_projection(STUDENT, TEACHER, STUDENT_ROWS, TEACHER_ROWS)
    # Cosines of "big": 0.8 to "large", 0.96 to "huge", -0.8 to "cat", -1 to "dog".
    power = 10 * 0.96
    total = 0.8**power + 0.96**power
    expected = {0: 0.8**power / total, 1: 0.96**power / total}
    assert rows_of(projection)[1] == pytest.approx(expected, rel=1e-5)
    assert rows_of(projection)[0] == {4: 1.0}
    assert rows_of(projection)[2:] == [{2: 1.0}, {}, {}]
    assert projection.is_exact_row.tolist() == [True, False, True, False, False]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({"sharpness": 0}, {0: 0.5, 1: 0.5}, id="all alike"),
        pytest.param({"top_k": 1}, {1: 1.0}, id="the nearest"),
        pytest.param({"min_cosine": 0.9}, {1: 1.0}, id="near ones"),
        pytest.param({"min_cosine": 0.97}, {}, id="none near enough"),
    ],
)
def test_options_say_which_neighbours_count(options, expected):
    projection = build_embedding_projection(STUDENT, TEACHER, STUDENT_ROWS, TEACHER_ROWS, **options)
    assert rows_of(projection)[1] == pytest.approx(expected, rel=1e-6)


def test_files_and_padded_matrices_give_the_same(tmp_path):
    plain = build_embedding_projection(STUDENT, TEACHER, STUDENT_ROWS, TEACHER_ROWS)
    padding = np.full((3, 2), np.nan, np.float32)
    save_file({"e": np.concatenate([STUDENT_ROWS, padding])}, tmp_path / "s")
    save_file({"e": np.concatenate([TEACHER_ROWS, padding])}, tmp_path / "t")
    assert build_embedding_projection(STUDENT, TEACHER, tmp_path / "s", tmp_path / "t") == plain


def test_metadata_says_pair_and_options():
    metadata = build_embedding_projection(STUDENT, TEACHER, STUDENT_ROWS, TEACHER_ROWS).metadata
    assert metadata["method"] == "embedding"
    assert metadata["student_fingerprint"] == STUDENT.fingerprint()
    assert json.loads(metadata["options"]) == {
        "space": "shared",
        "top_k": 4,
        "sharpness": 10.0,
        "min_cosine": 0.0,
    }


def test_blocks_find_the_neighbours_of_the_whole(monkeypatch):
    generator = np.random.default_rng(0)
    student, teacher = numbered(40, "s"), numbered(90, "t")
    student_rows = generator.normal(size=(40, 8)).astype(np.float32)
    teacher_rows = generator.normal(size=(90, 8)).astype(np.float32)
    monkeypatch.setattr(embedding_builder, "ROWS_AT_ONCE", 7)
    monkeypatch.setattr(embedding_builder, "COLUMNS_AT_ONCE", 11)
    projection = build_embedding_projection(student, teacher, student_rows, teacher_rows)
    lengths = np.linalg.norm(student_rows, axis=1)[:, None] * np.linalg.norm(teacher_rows, axis=1)
    cosines = student_rows @ teacher_rows.T / lengths
    nearest = np.sort(np.argsort(-cosines, axis=1)[:, :4], axis=1)
    assert [sorted(row) for row in rows_of(projection)] == nearest.tolist()
    largest = [max(row, key=row.__getitem__) for row in rows_of(projection)]
    assert largest == cosines.argmax(axis=1).tolist()


def test_anchors_relate_the_spaces_of_two_models():
    generator = np.random.default_rng(1)
    common = [f"c{i:03}".encode() for i in range(200)]
    own, foreign = ([f"{side}{i:02}".encode() for i in range(20)] for side in "sf")
    meanings = generator.normal(size=(220, 6))
    rotation, _ = np.linalg.qr(generator.normal(size=(8, 8)))
    # The teacher's space is the student's: turned, in more dimensions, at another scale, elsewhere.
    student_rows = np.pad(meanings, ((0, 0), (0, 1)), constant_values=20)
    teacher_rows = 3.0 * (meanings[::-1] @ rotation[:6] + 40 * rotation[7])
    projection = build_embedding_projection(
        GreedyTokenizer([*common, *own]),
        GreedyTokenizer([*reversed(foreign), *reversed(common)]),
        student_rows,
        teacher_rows,
        space="anchored",
        top_k=1,
    )
    found = [next(iter(row)) for row in rows_of(projection)[200:]]
    assert sum(i == 19 - at for at, i in enumerate(found)) >= 18
    assert json.loads(projection.metadata["options"])["space"] == "anchored"


def test_control_tokens_are_no_neighbours_and_no_anchors():
    projection = build_embedding_projection(STUDENT, TEACHER, STUDENT_ROWS, TEACHER_ROWS, top_k=9)
    assert 4 not in rows_of(projection)[1]
    with pytest.raises(ProjectionError, match=r"too few tokens are common .* got 1; expected 2"):
        build_embedding_projection(STUDENT, TEACHER, STUDENT_ROWS, TEACHER_ROWS, space="anchored")


def test_a_vector_of_zeros_has_no_neighbour():
    rows = STUDENT_ROWS.copy()
    rows[1] = 0
    projection = build_embedding_projection(STUDENT, TEACHER, rows, TEACHER_ROWS)
    assert rows_of(projection)[1] == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"s": STUDENT_ROWS[:4]}, "student's .* got 4 rows; expected 5", id="student"),
        pytest.param({"t": TEACHER_ROWS[:1]}, "teacher's .* got 1 rows; expected 5", id="teacher"),
        pytest.param({"t": TEACHER_ROWS[:, :1]}, "got 2 and 1 numbers a token", id="widths"),
        pytest.param({"s": STUDENT_ROWS * np.nan}, "id 1 is not finite", id="nan"),
        pytest.param({"space": "other"}, "unknown space of embeddings; got 'other'", id="space"),
        pytest.param({"top_k": 0}, "top_k leaves no entry", id="top_k"),
        pytest.param({"sharpness": -1}, "sharpness: .* got -1", id="sharpness"),
        pytest.param({"sharpness": np.inf}, "sharpness: .* got inf", id="infinite"),
        pytest.param({"min_cosine": 1}, "min_cosine: .* got 1", id="cosine"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, message):
    arrays = {"s": STUDENT_ROWS, "t": TEACHER_ROWS, **changes}
    with pytest.raises(ProjectionError, match=message):
        build_embedding_projection(STUDENT, TEACHER, arrays.pop("s"), arrays.pop("t"), **arrays)


def test_memory_is_bounded_by_blocks_and_not_by_the_vocabularies():
    student, teacher = numbered(2500, "s"), numbered(20_000, "t")
    generator = np.random.default_rng(2)
    student_rows = generator.normal(size=(2500, 4)).astype(np.float32)
    teacher_rows = generator.normal(size=(20_000, 4)).astype(np.float32)
    tracemalloc.start()
    projection = build_embedding_projection(student, teacher, student_rows, teacher_rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert projection.entry_count == 4 * 2500
    # Vs x Vt of float32 would be 191 MiB; cosines of a block and their order are 64 MiB.
    assert peak < 100 * 2**20

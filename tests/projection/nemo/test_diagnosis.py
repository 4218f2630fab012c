"""What is wrong with a file, which rows it is in, and how much mass it concerns."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_ext.projection import SparseProjection
from megatron_ext.projection.nemo.diagnosis import diagnose
from megatron_ext.projection.nemo.legacy_file import read_legacy_file
from megatron_ext.projection.nemo.legacy_schema import legacy_entries
from megatron_ext.projection.nemo.loose_entries import LooseEntries
from megatron_ext.projection.nemo.tokenizer_pair import TokenizerPair
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from tests.projection.greedy_tokenizer import GreedyTokenizer
from tests.projection.original_recipe import (
    default_file,
    leaked_share,
    prepared_table,
    sorted_and_cut,
)
from tests.projection.trained_pair import trained_pair

STUDENT = GreedyTokenizer([b"a", b"ab", b"abc", b"c", "<s>"], bos="<s>")
TEACHER = GreedyTokenizer([b"a", b"b", b"c", b"x", "<bos>"], bos="<bos>")
PAIR = TokenizerPair(STUDENT, TEACHER)
OWN_SHARES = {0: 0.9 / 0.999, 1: 0.09 / 0.999, 2: 0.009 / 0.999}
SOUND = [{0: 1.0}, {0: 0.9, 1: 0.1}, {0: 0.9, 1: 0.09, 2: 0.01}, {2: 1.0}, {4: 1.0}]


def entries_of(rows, slots=4, dtype=torch.float32):
    """A table of lists of (column, weight), read from the tensors of a file."""
    indices = torch.full((len(rows), slots), -1)
    likelihoods = torch.zeros((len(rows), slots), dtype=dtype)
    for row, pairs in enumerate(rows):
        for slot, (column, weight) in enumerate(pairs.items() if type(pairs) is dict else pairs):
            indices[row, slot], likelihoods[row, slot] = column, weight
    return legacy_entries({"indices": indices, "likelihoods": likelihoods})


def found(rows, pair=PAIR, **options):
    return {defect.kind: defect for defect in diagnose(entries_of(rows, **options), pair)}


def changed(row, pairs):
    return [*SOUND[:row], pairs, *SOUND[row + 1 :]]


@pytest.mark.parametrize("pair", [None, PAIR], ids=["alone", "with tokenizers"])
def test_a_sound_table_has_no_defect(pair):
    assert found(SOUND, pair) == {}


def test_a_projection_of_ours_has_no_defect():
    projection = SparseProjection.from_tokenizers(STUDENT, TEACHER)
    assert diagnose(LooseEntries.of(projection), PAIR) == []


def test_bfloat16_rounds_sums_and_that_is_no_defect():
    rows = changed(1, {0: 10 / 11, 1: 1 / 11})
    assert float(entries_of(rows, dtype=torch.bfloat16).row_sums[1]) != 1
    assert found(rows, dtype=torch.bfloat16) == {}
    assert set(found(changed(1, {0: 0.9, 1: 0.08}), dtype=torch.bfloat16)) == {"row_sums"}


def test_a_repeated_column_is_found_with_its_mass():
    defects = found(changed(1, [(0, 0.4), (1, 0.2), (0, 0.4)]))
    assert set(defects) == {"duplicate_columns"}
    assert defects["duplicate_columns"].rows.tolist() == [1]
    assert defects["duplicate_columns"].mass == pytest.approx(0.8)


def test_a_row_that_does_not_sum_to_one_is_found():
    defect = found(changed(2, {0: 0.5, 1: 0.2}))["row_sums"]
    assert defect.rows.tolist() == [2]
    assert defect.mass == pytest.approx(0.3)
    assert "from 0.7 to 0.7" in str(defect)


def test_columns_of_the_padding_are_found():
    defect = found(changed(1, {0: 0.8, 5: 0.2}))["padding_columns"]
    assert defect.rows.tolist() == [1]
    assert defect.mass == pytest.approx(0.2)
    assert "up to 5, 5 teacher tokens" in str(defect)


def test_empty_rows_of_the_padding_are_no_defect_and_filled_ones_are():
    assert found([*SOUND, {}, {}]) == {}
    defect = found([*SOUND, {}, {0: 1.0}])["padding_rows"]
    assert (defect.rows.tolist(), defect.mass) == ([6], 1.0)


def test_missing_rows_are_found():
    defect = found(SOUND[:3])["missing_rows"]
    assert defect.rows.tolist() == [3, 4]
    assert "3 rows, 5 student tokens" in str(defect)


def test_exact_rows_that_are_lost_are_found():
    defect = found(changed(3, {2: 0.75, 1: 0.25}))["lost_exact_rows"]
    assert (defect.rows.tolist(), defect.mass) == ([3], 0.25)
    assert "of 2 tokens with equal bytes" in str(defect)


def test_any_id_with_the_bytes_of_a_token_is_that_token():
    teacher = GreedyTokenizer([b"c", b"c", b"x"])
    pair = TokenizerPair(GreedyTokenizer([b"c"]), teacher)
    assert found([{0: 1.0}], pair) == found([{1: 1.0}], pair) == {}
    assert "lost_exact_rows" in found([{2: 1.0}], pair)


def test_entries_off_support_are_found():
    defects = found(changed(2, {0: 0.75, 3: 0.25}))
    assert set(defects) == {"off_support"}
    assert (defects["off_support"].rows.tolist(), defects["off_support"].mass) == ([2], 0.25)


@pytest.mark.parametrize(
    ("student", "teacher", "is_on"),
    [
        pytest.param(b"the", b"th", True, id="piece"),
        pytest.param(b"th", b"the", True, id="word of the piece"),
        pytest.param(b"The", b" the", True, id="another case"),
        pytest.param("\ufb01".encode(), b"fi", True, id="compatible character"),
        pytest.param(b"the", b"ing", False, id="unrelated"),
        pytest.param(b"\xe5\xad", "\ufffd".encode(), False, id="replacement character"),
        pytest.param("<pad>", "<|fill|>", True, id="control tokens"),
        pytest.param("<pad>", b"pad", False, id="control token and text"),
        pytest.param(b"<br>", b"<hr>", True, id="names in brackets"),
        pytest.param(b" ", b"x", False, id="space"),
    ],
)
def test_support_is_bytes_within_bytes_or_marks(student, teacher, is_on):
    pair = TokenizerPair(GreedyTokenizer([student]), GreedyTokenizer([b"q", teacher]))
    entries = entries_of([{1: 1.0}])
    assert pair.is_on_support(entries).tolist() == [is_on]


def test_rows_that_the_teacher_could_spell_are_found_empty():
    defect = found(changed(1, {}))["lost_rows"]
    assert (defect.rows.tolist(), defect.mass) == ([1], 1.0)


def test_a_table_without_an_empty_slot_has_no_strict_rows():
    full = [[(c, w) for c, w in row.items()] for row in SOUND]
    for row in full:
        row.extend((4, 0.0) for _ in range(4 - len(row)))
    defects = found(full)
    assert set(defects) == {"no_strict_rows"}
    assert defects["no_strict_rows"].rows.tolist() == [0, 3, 4]


# Files of the original default recipe.


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The tokenizers, the pair as we read it, and the content of the default file."""
    (student, student_path), (teacher, teacher_path) = trained_pair(tmp_path_factory.mktemp("pair"))
    config = (TokenizerConfig(model=str(path)) for path in (student_path, teacher_path))
    pair = TokenizerPair(*map(build_tokenizer, config))
    return student, teacher, pair, default_file(student, teacher)


@pytest.fixture(scope="module")
def entries(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "default.pt"
    torch.save(trained[3], path)
    return read_legacy_file(path)


def test_the_recipe_gives_the_known_row(trained):
    student, teacher, _, content = trained
    row = student.token_to_id("201")
    shares = content["likelihoods"][row].tolist()
    assert [round(share, 3) for share in shares] == [0.648, 0.144, 0.065, 0.144]
    names = [teacher.id_to_token(i) for i in content["indices"][row].tolist()]
    assert (names[0], names[2]) == ("2", "0")
    assert names[1] == names[3] not in ("1", None)


@pytest.mark.parametrize("with_tokenizers", [False, True], ids=["alone", "with tokenizers"])
def test_the_leaked_share_of_the_default_recipe_is_found(trained, entries, with_tokenizers):
    leaked, rows = leaked_share(trained[3])
    assert leaked == pytest.approx(0.287, abs=2e-3)
    pair = trained[2] if with_tokenizers else None
    defect = {d.kind: d for d in diagnose(entries, pair)}["filler_column"]
    assert defect.rows.tolist() == rows
    assert defect.share == pytest.approx(leaked, rel=1e-12)
    indices = trained[3]["indices"][:, -1]
    column = int(indices[indices != -1].mode().values)
    count = int((indices == column).sum())
    name = f" {trained[1].id_to_token(column)!r}" if with_tokenizers else ""
    assert f"column {column}{name} in {count} rows" in str(defect)


def test_the_filler_is_found_before_the_exact_map_and_the_cut(trained):
    indices, likelihoods = prepared_table(trained[0], trained[1])
    entries = legacy_entries({"indices": indices, "likelihoods": likelihoods})
    defects = {d.kind: d for d in diagnose(entries, trained[2])}
    assert len(defects["filler_column"].rows) == len(indices)
    assert defects["filler_column"].share == pytest.approx(1 / 6, abs=2e-3)
    exact = trained[2].retokenized.is_exact_row & trained[2].is_ordinary
    assert defects["lost_exact_rows"].rows.tolist() == np.flatnonzero(exact).tolist()


def test_a_filler_that_was_sorted_among_the_pieces_is_found_by_its_constant_share(trained):
    table = prepared_table(trained[0], trained[1])
    indices, likelihoods = sorted_and_cut(*table, slots=4, preserve_last=False)
    entries = legacy_entries({"indices": indices, "likelihoods": likelihoods})
    defect = {d.kind: d for d in diagnose(entries)}["filler_column"]
    assert len(defect.rows) > 0.8 * len(indices)
    assert defect.share == pytest.approx(1 / 6, abs=2e-2)


def test_a_table_without_the_scale_trick_has_no_filler(trained):
    projection = LooseEntries.of(trained[2].retokenized).merged()
    rows = [[] for _ in range(projection.height)]
    for row, column, weight in zip(
        projection.rows, projection.columns, projection.weights, strict=True
    ):
        rows[row].append((int(column), float(weight)))
    assert found(rows, trained[2]) == {}


def test_what_a_file_says_of_its_own_padding_is_held_against_it():
    """Without the tokenizers, too: our files say how many tokens the vocabularies have."""
    entries = replace(entries_of([{0: 1.0}, {4: 1.0}, {1: 1.0}]), vocab_sizes=(2, 3))
    assert [(defect.kind, defect.rows.tolist(), defect.mass) for defect in diagnose(entries)] == [
        ("padding_rows", [2], 1.0),
        ("padding_columns", [1], 1.0),
    ]

"""Mended files are the projection that they should have been."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from megatron_ext.projection import SparseProjection
from megatron_ext.projection.known_files.diagnosis import diagnose
from megatron_ext.projection.known_files.legacy_schema import legacy_entries
from megatron_ext.projection.known_files.loose_entries import LooseEntries
from megatron_ext.projection.known_files.repair import repair
from megatron_ext.projection.known_files.tokenizer_pair import TokenizerPair
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from tests.conversation.shared_files import SHARED, needs_shared
from tests.projection.greedy_tokenizer import GreedyTokenizer
from tests.projection.known_files.test_diagnosis import PAIR, SOUND, changed, entries_of
from tests.projection.original_recipe import default_file, leaked_share
from tests.projection.trained_pair import trained_pair


def row(projection, student_id):
    entries = slice(*projection.indptr[student_id : student_id + 2])
    return dict(
        zip(projection.indices[entries].tolist(), projection.values[entries].tolist(), strict=True)
    )


def rows(projection):
    return [row(projection, student_id) for student_id in range(projection.shape[0])]


def approximately(expected):
    return [pytest.approx(r, rel=1e-6) for r in expected]


def test_a_sound_table_stays_as_it_is():
    mended = repair(entries_of(SOUND), PAIR)
    assert rows(mended.projection) == approximately(SOUND)
    assert (mended.defects, mended.moved.sum(), len(mended.restored_rows)) == ([], 0, 0)
    assert mended.projection.is_exact_row.tolist() == [True, False, False, True, True]


@pytest.mark.parametrize("pair", [None, PAIR], ids=["alone", "with tokenizers"])
def test_repeated_columns_are_added_up_and_move_no_mass(pair):
    mended = repair(entries_of(changed(1, [(0, 0.45), (1, 0.1), (0, 0.45)])), pair)
    assert rows(mended.projection) == approximately(SOUND)
    assert mended.moved.tolist() == pytest.approx([0] * 5, abs=1e-7)


@pytest.mark.parametrize("pair", [None, PAIR], ids=["alone", "with tokenizers"])
def test_rows_are_made_to_sum_to_one(pair):
    mended = repair(entries_of(changed(1, {0: 1.8, 1: 0.2})), pair)
    assert rows(mended.projection) == approximately(SOUND)


def test_an_exact_row_is_restored():
    mended = repair(entries_of(changed(3, {2: 0.75, 1: 0.25})), PAIR)
    assert rows(mended.projection) == approximately(SOUND)
    assert mended.moved[3] == 0.25
    assert mended.projection.is_exact_row[3]


OWN = {0: 0.9 / 0.99, 1: 0.09 / 0.99}


def test_what_is_off_support_goes_and_the_pieces_come_back():
    mended = repair(entries_of(changed(1, {0: 0.5, 3: 0.5})), PAIR)
    assert row(mended.projection, 1) == pytest.approx(OWN, rel=1e-6)
    assert mended.restored_rows.tolist() == [1]


def test_what_else_a_row_holds_keeps_its_share():
    student = GreedyTokenizer([b"ab"])
    pair = TokenizerPair(student, GreedyTokenizer([b"a", b"b", b"abd", b"x"]))
    mended = repair(entries_of([{0: 0.4, 2: 0.4, 3: 0.2}]), pair)
    expected = {0: 0.5 * OWN[0], 1: 0.5 * OWN[1], 2: 0.5}
    assert row(mended.projection, 0) == pytest.approx(expected, rel=1e-6)
    assert mended.moved[0] == pytest.approx(0.2, rel=1e-6)


def test_off_support_entries_of_an_embedding_map_can_be_kept():
    mended = repair(entries_of(changed(1, {0: 0.5, 3: 0.5})), PAIR, off_support="keep")
    assert row(mended.projection, 1) == {0: 0.5, 3: 0.5}
    assert mended.defects == []


def test_padding_goes_and_lost_rows_come_back():
    mended = repair(entries_of([*changed(1, {5: 0.5, 0: 0.5}), {}, {0: 1.0}]), PAIR)
    assert row(mended.projection, 1) == pytest.approx(OWN, rel=1e-6)
    assert (mended.projection.shape, mended.projection.vocab_sizes) == ((7, 5), (5, 5))
    assert row(mended.projection, 6) == {}
    mended = repair(entries_of(changed(1, {})), PAIR)
    assert row(mended.projection, 1) == pytest.approx(OWN, rel=1e-6)
    assert mended.moved[1] == 1
    mended = repair(entries_of(SOUND[:1]), PAIR)
    assert rows(mended.projection) == approximately(rows(PAIR.retokenized))


def test_a_repaired_projection_says_so_and_is_for_its_pair(tmp_path):
    mended = repair(entries_of(changed(1, {0: 0.5, 3: 0.5})), PAIR)
    assert mended.projection.metadata["history"] == '[{"step": "repair"}]'
    mended.projection.save(tmp_path / "map.safetensors")
    loaded = SparseProjection.load(tmp_path / "map.safetensors", PAIR.student, PAIR.teacher)
    assert loaded == mended.projection


slots = st.tuples(st.integers(-1, 7), st.floats(0, 4, width=16))
tables = st.lists(st.lists(slots, min_size=4, max_size=4), min_size=1, max_size=8)


@given(tables, st.sampled_from([None, PAIR]))
@settings(deadline=None)
def test_whatever_a_table_holds_its_repair_has_no_defect_and_repairs_to_itself(table, pair):
    indices = torch.tensor([[column for column, _ in pairs] for pairs in table])
    likelihoods = torch.tensor([[weight for _, weight in pairs] for pairs in table])
    entries = legacy_entries({"indices": indices, "likelihoods": likelihoods})
    mended = repair(entries, pair).projection
    again = LooseEntries.of(mended)
    assert diagnose(again, pair) == []
    assert repair(again, pair).projection.values.tolist() == mended.values.tolist()


# Files of the original default recipe.


@pytest.fixture(scope="module")
def default(tmp_path_factory):
    (student, student_path), (teacher, teacher_path) = trained_pair(tmp_path_factory.mktemp("pair"))
    config = (TokenizerConfig(model=str(path)) for path in (student_path, teacher_path))
    pair = TokenizerPair(*map(build_tokenizer, config))
    return pair, legacy_entries(default_file(student, teacher)), student.token_to_id("201")


def test_a_file_of_the_default_recipe_is_repaired(default):
    pair, entries, number = default
    mended = repair(entries, pair)
    assert diagnose(LooseEntries.of(mended.projection), pair) == []
    own = pair.retokenized
    assert row(mended.projection, number) == row(own, number)
    digits = {pair.teacher.id_to_token(i): round(p, 4) for i, p in row(own, number).items()}
    assert digits == {"2": 0.9009, "0": 0.0901, "1": 0.0090}
    # The recipe also pairs words of the teacher with pieces of the student, and bracketed names.
    repaired = rows(mended.projection)
    unequal = [i for i, shares in enumerate(rows(own)) if repaired[i] != shares]
    assert len(unequal) < 10
    assert all(set(repaired[i]) - set(row(own, i)) for i in unequal)
    assert mended.projection.is_exact_row[pair.is_ordinary].tolist() == (
        own.is_exact_row[pair.is_ordinary].tolist()
    )


def test_without_tokenizers_the_filler_goes_and_the_rest_keeps_its_proportions(default):
    pair, entries, number = default
    mended = repair(entries)
    names = {pair.teacher.id_to_token(i): p for i, p in row(mended.projection, number).items()}
    assert names == pytest.approx({"2": 10 / 11, "0": 1 / 11}, rel=5e-3)
    filler = next(d for d in mended.defects if d.kind == "filler_column")
    assert mended.moved[filler.rows].sum() == pytest.approx(filler.mass, rel=1e-6)
    assert not mended.projection.is_exact_row[filler.rows].any()


def test_every_exact_row_of_the_default_recipe_stays_exact(default):
    _, entries, _ = default
    exact = np.flatnonzero(entries.strict_rows)
    mended = repair(entries).projection
    assert mended.is_exact_row[exact].all()
    table = torch.tensor([[1.0, 0.0]]).repeat(3, 1)
    kept = legacy_entries({"indices": torch.tensor([[1, -1]] * 3), "likelihoods": table})
    assert repair(kept).projection.is_exact_row.tolist() == [True] * 3


@needs_shared
@pytest.mark.skipif(
    os.environ.get("MEGATRON_EXT_ALL_TEXT") != "1",
    reason="takes minutes: set MEGATRON_EXT_ALL_TEXT=1",
)
def test_the_default_file_of_llama_and_qwen_is_diagnosed_and_repaired():
    folders = [SHARED / "tokenizers" / name for name in ("llama3_2", "qwen3")]
    student, teacher = (Tokenizer.from_file(str(path / "tokenizer.json")) for path in folders)
    content = default_file(student, teacher, width=151_936)
    pair = TokenizerPair(*(build_tokenizer(TokenizerConfig(model=str(path))) for path in folders))
    entries = legacy_entries(content)
    leaked, filled = leaked_share(content)
    mended = repair(entries, pair)
    filler = next(d for d in mended.defects if d.kind == "filler_column")
    assert filler.rows.tolist() == filled
    assert filler.share == pytest.approx(leaked, rel=1e-12)
    assert 0.25 < leaked < 0.35
    assert diagnose(LooseEntries.of(mended.projection), pair) == []
    number = student.token_to_id("201")
    assert row(mended.projection, number) == row(pair.retokenized, number)
    exact = pair.retokenized.is_exact_row & pair.is_ordinary
    assert int((mended.projection.is_exact_row & pair.is_ordinary).sum()) == int(exact.sum())
    assert int(exact.sum()) == 109_566

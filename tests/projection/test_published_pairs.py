"""Facts of published pairs: Llama 3.2 to Qwen3, and vocabularies with byte fallback."""

import os
import runpy
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.projection import SparseProjection
from megatron_ext.projection.layout import LayoutStatistics
from tests.alignment.shared_text import needs_shared, published
from tests.fork_server import run_python
from tests.tokenizers.tokenizer_files import byte_level, metaspace

pytestmark = needs_shared

SCRIPT = Path(__file__).parents[2] / "docs" / "generate_layout_figures.py"


@pytest.fixture(scope="module")
def student():
    return published("llama3_2")


@pytest.fixture(scope="module")
def teacher():
    return published("qwen3")


@pytest.fixture(scope="module")
def projection(student, teacher):
    return SparseProjection.from_tokenizers(student, teacher)


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


def shares_of(projection, student, teacher, token):
    student_id = student.token_to_id(token)
    entries = slice(*projection.indptr[student_id : student_id + 2])
    return {
        teacher.id_to_token(i): round(share, 4)
        for i, share in zip(
            projection.indices[entries].tolist(), projection.values[entries].tolist(), strict=True
        )
    }


def test_every_byte_identical_token_is_exact_and_no_other_is(student, teacher, projection):
    exact = np.flatnonzero(projection.is_exact_row)
    columns = projection.indices[projection.indptr[exact]]
    pairs = [
        (student.token_bytes(i), teacher.token_bytes(j))
        for i, j in zip(exact.tolist(), columns.tolist(), strict=True)
    ]
    ordinary = {left for left, right in pairs if left is not None and left == right}
    assert len(ordinary) == 109_566
    assert len(pairs) == 109_567
    known = {teacher.token_bytes(i) for i in range(teacher.vocab_size)} - {None}
    assert ordinary == known & {student.token_bytes(i) for i in range(student.vocab_size)}


def test_201_is_spelled_by_its_digits(student, teacher, projection):
    expected = {"2": 0.9009, "0": 0.0901, "1": 0.0090}
    assert shares_of(projection, student, teacher, "201") == expected


def test_every_numeral_of_several_digits_is_uncommon(student, projection):
    numerals = [f"{n:0{width}}" for width in (2, 3) for n in range(10**width)]
    uncommon = set(projection.partition().uncommon_student.tolist())
    assert len(numerals) == 1100
    assert all(student.token_to_id(numeral) in uncommon for numeral in numerals)
    assert not any(student.token_to_id(str(digit)) in uncommon for digit in range(10))


def test_only_control_tokens_have_empty_rows(student, projection):
    assert all(student.token_bytes(i) is None for i in projection.empty_rows.tolist())
    assert len(projection.empty_rows) == 255


def test_parts_of_characters_are_spelled_by_their_bytes(student, teacher, projection):
    partial = [
        (i, token)
        for i in projection.partition().uncommon_student.tolist()
        if (token := student.token_bytes(i)) and token.decode(errors="ignore").encode() != token
    ]
    assert len(partial) > 100
    for student_id, token in partial:
        entries = slice(*projection.indptr[student_id : student_id + 2])
        pieces = [teacher.token_bytes(i) for i in projection.indices[entries].tolist()]
        first = pieces[int(np.argmax(projection.values[entries]))]
        assert token.startswith(first)
        assert all(piece in token for piece in pieces)


def test_a_teacher_of_padded_width_takes_no_mass_on_padding(projection):
    padded = projection.padded(128_256, 151_936)
    assert padded.shape == (128_256, 151_936)
    assert padded.vocab_sizes == projection.shape == (128_256, 151_669)
    assert not padded.reachable_columns[151_669:].any()
    assert padded.partition().uncommon_teacher.max() < 151_669


def test_letters_and_not_byte_pieces_are_common_with_a_byte_fallback_student(student):
    llama2 = published("llama2_sp")
    partition = SparseProjection.from_tokenizers(llama2, student).partition()
    common = set(partition.common_student.tolist())
    assert llama2.token_to_id("A") in common
    assert llama2.token_to_id("<0x41>") not in common
    assert llama2.token_to_id("<0xE4>") in common


def test_a_pivot_relates_a_pair_as_the_pair_itself_does(student, teacher, projection):
    pivot = published("gpt2")
    first = SparseProjection.from_tokenizers(student, pivot, method="exact")
    through = first @ SparseProjection.from_tokenizers(pivot, teacher, method="exact")
    both = through.is_exact_row & projection.is_exact_row
    assert np.array_equal(
        through.indices[through.indptr[:-1][both]], projection.indices[projection.indptr[:-1][both]]
    )
    assert both.sum() > 40_000


def test_the_page_shows_what_a_layout_keeps_together(script, projection):
    page = script["PAGE"].read_text(encoding="utf-8")
    assert script["rows_of"]("qwen3", projection, (8,))[0] in page.splitlines()


@pytest.mark.skipif(
    not os.environ.get("MEGATRON_EXT_ALL_TEXT"),
    reason="several large pairs: set MEGATRON_EXT_ALL_TEXT=1",
)
def test_the_page_shows_what_every_layout_keeps_together(script):
    assert script["PAGE"].read_text(encoding="utf-8") == script["layout_page"](), (
        "run: python docs/generate_layout_figures.py"
    )


def test_every_rank_has_its_share_and_a_layout_takes_no_time(script, projection):
    started = time.process_time()
    layout = script["layout_of"](projection, 8)
    assert time.process_time() - started < 2
    found = LayoutStatistics.of(projection, layout)
    assert found.common_within == found.common == 109_567
    assert found.crossing_columns < 500
    assert max(found.common_balance, found.residual_balance) < 1.02


def test_building_and_loading_import_neither_torch_nor_transformers(tmp_path):
    for make in (byte_level, metaspace):
        (tmp_path / make.__name__).mkdir()
        make(tmp_path / make.__name__)
    script = f"""
import sys
from megatron_ext.projection import SparseProjection
from megatron_ext.projection.layout import LayoutStatistics
from megatron_ext.tokenizers import MegatronTokenizer
student, teacher = (
    MegatronTokenizer.from_pretrained(path, metadata_path={{"library": "huggingface"}})
    for path in ({str(tmp_path / "byte_level")!r}, {str(tmp_path / "metaspace")!r})
)
SparseProjection.from_tokenizers(student, teacher).save({str(tmp_path / "p")!r})
SparseProjection.load({str(tmp_path / "p")!r}, student, teacher)
print(sorted({{"torch", "transformers", "megatron", "triton"}} & set(sys.modules)))
"""
    assert run_python(script).stdout.strip() == "[]"

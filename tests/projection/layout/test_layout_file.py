"""Layouts on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ext.errors import ProjectionError
from megatron_ext.projection.layout import VocabularyLayout
from tests.projection.layout.random_pairs import random_pair


class Named:
    """As much of a tokenizer as a file is checked against."""

    def __init__(self, name: str) -> None:
        self._name = name

    def fingerprint(self) -> str:
        return self._name


@pytest.fixture
def layout() -> VocabularyLayout:
    return VocabularyLayout.of(random_pair(7), rank_count=2, student_size=96, teacher_size=128)


def test_a_layout_is_read_as_it_was_written(layout: VocabularyLayout, tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    layout.save(path)
    student, teacher = Named("s7"), Named("t7")
    loaded = VocabularyLayout.load(path, student, teacher)  # type: ignore[arg-type]
    assert loaded == layout
    assert loaded.metadata == {"student_fingerprint": "s7", "teacher_fingerprint": "t7"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["layout.json"]


@pytest.mark.parametrize(("student", "teacher"), [("s8", "t7"), ("s7", "s7")])
def test_a_layout_of_another_pair_is_not_loaded(
    layout: VocabularyLayout, tmp_path: Path, student: str, teacher: str
) -> None:
    layout.save(tmp_path / "layout.json")
    with pytest.raises(ProjectionError, match="made for another"):
        VocabularyLayout.load(tmp_path / "layout.json", Named(student), Named(teacher))  # type: ignore[arg-type]


def test_broken_files_are_refused(layout: VocabularyLayout, tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    layout.save(path)
    content = json.loads(path.read_text())
    ids = content["student"]["ids"]
    for text, message in (
        (path.read_text()[:-40], "cannot be read"),
        ("[]", "no vocabulary layout that this version reads"),
        (json.dumps({**content, "format_version": 2}), "that this version reads"),
        (json.dumps({key: content[key] for key in content if key != "teacher"}), "no whole"),
        (
            json.dumps({**content, "student": {"vocab_size": 90, "ids": [*ids[:-1], ids[0]]}}),
            "no permutation",
        ),
    ):
        path.write_text(text)
        with pytest.raises(ProjectionError, match=message):
            VocabularyLayout.load(path)
    with pytest.raises(ProjectionError, match="cannot be read"):
        VocabularyLayout.load(tmp_path / "none.json")
    with pytest.raises(ProjectionError, match="cannot be written"):
        layout.save(tmp_path / "none" / "layout.json")

"""``megatron-ext projection``: its own actions on files of either kind."""

import json

import numpy as np
import pytest
import torch

from megatron_ext.cli.main import main
from megatron_ext.projection import SparseProjection
from tests.cli.run_files import refusal
from tests.projection.original_recipe import default_file, leaked_share
from tests.projection.trained_pair import trained_pair


class Files:
    """A pair of tokenizers, and the file that the original recipe makes of them."""

    def __init__(self, folder):
        (student, self.student), (teacher, self.teacher) = trained_pair(folder)
        self.names = ("--student", str(self.student), "--teacher", str(self.teacher))
        self.content = default_file(student, teacher)
        self.path = folder / "default.pt"
        torch.save(self.content, self.path)
        self.number = student.token_to_id("201")
        self.tokenizer = student


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return Files(tmp_path_factory.mktemp("pair"))


def projection(*words):
    main(["projection", *map(str, words)])


def refused(capsys, *words):
    return refusal(capsys, "projection", *words)


def test_what_is_built_is_the_projection_of_the_pair(files, tmp_path):
    path = tmp_path / "pair.safetensors"
    projection("build", *files.names, "-o", path, "--top-k", 3, "--decay", 0.2)
    built = SparseProjection.load(path)
    assert json.loads(built.metadata["options"])["top_k"] == 3
    assert json.loads(built.metadata["options"])["decay"] == 0.2
    assert built.metadata["student_model_id"] == str(files.student)
    projection("build", *files.names, "-o", tmp_path / "pair.pt")
    content = torch.load(tmp_path / "pair.pt", weights_only=True)
    shares = content["likelihoods"][files.number].tolist()
    assert [round(share, 4) for share in shares[:3]] == [0.9009, 0.0901, 0.0090]


def test_an_inspection_tells_the_leaked_share(files, capsys):
    leaked, rows = leaked_share(files.content)
    projection("inspect", files.path)
    out = capsys.readouterr().out
    assert f"{len(rows):,} rows, {leaked:.1%} of their mass (column" in out
    assert "give --student and --teacher" in out
    assert f"({len(rows):,} rows uncommon)" in out
    projection("inspect", files.path, *files.names, "--json")
    found = json.loads(capsys.readouterr().out)
    filler = next(d for d in found["defects"] if d["kind"] == "filler_column")
    assert filler["rows"] == len(rows)
    assert filler["share"] == pytest.approx(leaked, rel=1e-12)
    assert found["shape"][0] == len(files.content["indices"])
    assert found["slots"] == 4
    assert found["judged_by_tokenizers"]
    assert found["exact_rows"] == int((files.content["indices"][:, 1] == -1).sum())
    assert sum(found["row_sizes"].values()) == found["shape"][0]


def test_tokens_without_a_counterpart_are_counted_with_examples(files, tmp_path, capsys):
    path = tmp_path / "pair.safetensors"
    empty = [3, 5, 8, 1000]
    rows = np.delete(np.arange(1391), empty)
    pair = SparseProjection.from_entries(rows, rows % 424, np.ones(len(rows)), (1391, 424))
    pair.save(path)
    projection("convert", path, "-o", tmp_path / "copy.pt")
    assert ", 4 empty (3, 5, 8, ...)\n" in capsys.readouterr().err
    projection("inspect", path)
    assert "\nempty rows       4: 3, 5, 8, ...\n" in capsys.readouterr().out
    projection("inspect", tmp_path / "copy.pt", *files.names)
    name = files.tokenizer.id_to_token(3)
    assert f"\nempty rows       4: 3 {name!r}, " in capsys.readouterr().out
    projection("inspect", path, "--json")
    assert json.loads(capsys.readouterr().out)["first_empty_rows"] == empty


def test_a_sound_file_goes_to_the_other_format_and_back(files, tmp_path, capsys):
    paths = [tmp_path / name for name in ("one.safetensors", "two.pt", "three.safetensors")]
    projection("build", *files.names, "-o", paths[0])
    projection("convert", paths[0], "-o", paths[1])
    projection("convert", paths[1], "-o", paths[2], *files.names)
    first, last = (SparseProjection.load(path) for path in (paths[0], paths[2]))
    for name in ("indptr", "indices", "values", "is_exact_row"):
        assert getattr(first, name).tolist() == getattr(last, name).tolist()
    assert last.metadata["student_fingerprint"] == first.metadata["student_fingerprint"]
    assert last.metadata["teacher_fingerprint"] == first.metadata["teacher_fingerprint"]


def test_a_file_with_mass_in_wrong_places_is_not_converted(files, tmp_path, capsys):
    path = tmp_path / "out.safetensors"
    error = refused(capsys, "convert", files.path, "-o", path)
    assert "mass on a filler column" in error
    assert "build one from the two tokenizers" in error
    assert not path.exists()


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_file_for_another_pair_is_refused(files, tmp_path, capsys, suffix):
    path = tmp_path / f"pair{suffix}"
    projection("build", *files.names, "-o", path)
    swapped = ("--student", files.teacher, "--teacher", files.student)
    output = tmp_path / "out.safetensors"
    for words in (
        ("inspect", path),
        ("convert", path, "-o", output),
        ("reapply-exact-map", "--initial-projection-path", path),
        ("minimal-projection-via-multitoken", "--initial-projection-path", path),
    ):
        assert "built for another student" in refused(capsys, *words, *swapped)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_folder_is_no_output(files, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = refused(capsys, "build", *files.names, "-o", ".")
    assert "cannot be written; got Is a directory" in error
    assert list(tmp_path.iterdir()) == []


def test_one_tokenizer_alone_is_not_enough(files, capsys):
    error = refused(capsys, "inspect", files.path, "--student", files.student)
    assert "--teacher: the teacher's tokenizer is not named" in error


def test_a_missing_file_and_an_unknown_action_are_one_line(tmp_path, capsys):
    assert refused(capsys, "inspect", tmp_path / "none.pt").count("\n") == 1
    error = refused(capsys, "mend", "map.pt")
    assert "invalid choice: 'mend'" in error
    assert "'convert'" in error

"""The known tools: their flags, their file names, and rows that leak nothing."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from megatron_ext.cli.main import main
from megatron_ext.cli.projection.nemo_tools import clean_model_name, prepared_name
from tests.cli.run_files import refusal
from tests.projection.trained_pair import trained_pair

DIGITS = [0.9009, 0.0901, 0.0090]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return trained_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def models(pair):
    return ("--student-model", str(pair[0][1]), "--teacher-model", str(pair[1][1]))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tool(name, *words):
    main(["projection", name, *map(str, words)])


def table(path):
    content = torch.load(path, weights_only=True)
    sums = content["likelihoods"].sum(dim=1)
    assert torch.all((sums == 0) | ((sums - 1).abs() < 1e-6))
    assert content["enable_scale_trick"] is False
    return content


def digits(pair, content):
    row = pair[0][0].token_to_id("201")
    return [round(share, 4) for share in content["likelihoods"][row].tolist() if share]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("meta-llama/Llama-3.2-1B", "Llama-3.2"),
        ("Qwen/Qwen3-4B-Base", "Qwen3"),
        ("google/gemma-3-12b-it", "gemma-3"),
        ("microsoft/Phi-4-mini-instruct", "Phi-4-mini-instruct_mini"),
        ("folder/of/Llama-3.1-8B-Instruct/", "Llama-3.1"),
    ],
)
def test_models_are_named_in_files_as_the_known_tools_do(model, name):
    assert clean_model_name(model) == name


def test_the_published_file_name_is_ours():
    assert prepared_name("meta-llama/Llama-3.2-1B", "Qwen/Qwen3-4B", 32) + "_special.pt" == (
        "projection_map_Llama-3.2_to_Qwen3_multitoken_top_32_double_special.pt"
    )


def test_the_steps_chain_by_their_file_names(pair, models, capsys):
    tool("minimal-projection-via-multitoken", *models, "--num-examples", 2)
    stem = "cross_tokenizer_data/projection_map_student_to_teacher_multitoken_top_32_double_special"
    assert digits(pair, table(f"{stem}.pt")) == DIGITS
    assert len(capsys.readouterr().out.splitlines()) == 2
    tool("reapply-exact-map", *models, "--initial-projection-path", f"{stem}.pt")
    stem += "_exact_map_remapped"
    tool("sort-and-cut-projection-matrix", "--initial-projection-path", f"{stem}.pt", "--top_k", 4)
    content = table(f"{stem}_top_4_sorted.pt")
    assert content["indices"].shape[1] == 4
    assert digits(pair, content) == DIGITS
    assert content["student_model_id"] == str(pair[0][1])


def test_the_wrapper_makes_all_three(pair, models, folder):
    tool("build-projection-matrix", *models, "--data-dir", "data", "--no-scale-trick")
    assert sorted(path.name for path in Path("data").iterdir()) == [
        "projection_map_student_to_teacher_multitoken_top_32_double_special.pt",
        "projection_map_student_to_teacher_multitoken_top_32_double_special_exact_map_remapped.pt",
        "projection_matrix_student_teacher_top4.pt",
    ]
    content = table("data/projection_matrix_student_teacher_top4.pt")
    assert digits(pair, content) == DIGITS
    exact = content["is_exact_row"]
    assert (content["likelihoods"][exact, 0] == 1).all()
    assert (content["indices"][exact, 1:] == -1).all()
    names = [pair[1][0].get_vocab().get(pair[0][0].id_to_token(i)) for i in range(len(exact))]
    ordinary = [i for i, name in enumerate(names) if name is not None and i > 2]
    assert content["indices"][ordinary, 0].tolist() == [names[i] for i in ordinary]


def test_the_flags_of_the_wrapper_reach_the_steps(models):
    words = ("--skip-exact-map", "--no-special-token-mapping", "--no-reverse-pass")
    tool("build-projection-matrix", *models, *words, "--prep-top-k", 8, "--final-output", "last.pt")
    names = [path.name for path in Path("cross_tokenizer_data").iterdir()]
    assert names == ["projection_map_student_to_teacher_multitoken_top_8_double.pt"]
    content = table("last.pt")
    assert (content["indices"][2] == -1).all(), "<|image_pad|> has a row without special tokens"


def test_a_stem_of_ones_own_gets_the_ending_too(models):
    tool("minimal-projection-via-multitoken", *models, "--output-filename", "mine")
    assert Path("cross_tokenizer_data/mine_special.pt").is_file()
    words = ("--disable-special-token-mapping", "--output-filename", "mine", "--output-dir", "here")
    tool("minimal-projection-via-multitoken", *models, *words)
    assert Path("here/mine.pt").is_file()


def test_the_scale_trick_is_said_to_do_nothing_and_does_nothing(models, capsys):
    first = "cross_tokenizer_data/mine_special.pt"
    words = ("--output-filename", "mine", "--disable-scale-trick")
    tool("minimal-projection-via-multitoken", *models, *words)
    without = table(first)
    assert "scale-trick" not in capsys.readouterr().err
    flags = ("--enable-scale-trick", "--enable-exact-match", "--use-canonicalization")
    tool("minimal-projection-via-multitoken", *models, *words[:2], *flags)
    error = capsys.readouterr().err
    assert error.count("--enable-scale-trick does nothing") == 1
    assert error.count("--enable-exact-match, --use-canonicalization does nothing") == 1
    again = table(first)
    assert torch.equal(again["indices"], without["indices"])
    assert torch.equal(again["likelihoods"], without["likelihoods"])


def test_a_filler_is_cut_and_said(capsys):
    content = {
        "indices": torch.tensor([[1, 2, 3, 9], [4, 5, 6, 9]]),
        "likelihoods": torch.tensor([[0.75, 0.08, 0.0, 0.17]] * 2),
        "enable_scale_trick": True,
    }
    torch.save(content, "map.pt")
    words = ("--initial-projection-path", "map.pt", "--top_k", 2)
    tool("sort-and-cut-projection-matrix", *words)
    assert "left out a filler: 17.0% of the mass of 2 rows" in capsys.readouterr().err
    assert table("map_top_2_sorted.pt")["indices"].tolist() == [[1, 2], [4, 5]]
    for quiet in ("--quiet", "-q"):
        tool("sort-and-cut-projection-matrix", *words, "--preserve_last", quiet)
        assert "".join(capsys.readouterr()) == ""
    assert table("map_top_2_sorted_preservelast.pt")["indices"].tolist() == [[1, 9], [4, 9]]
    tool("sort-and-cut-projection-matrix", *words, "--no-preserve_last", "--output_path", "o.pt")
    assert table("o.pt")["indices"].tolist() == [[1, 2], [4, 5]]


def test_flags_that_the_second_step_shares_are_said_to_do_nothing(models, capsys):
    torch.save({(0, 0): 1.0}, "pairs.pt")
    words = ("--initial-projection-path", "pairs.pt", "--top-k", "4", "--disable-scale-trick")
    tool("reapply-exact-map", *models, *words)
    error = capsys.readouterr().err
    assert "note: --top-k does nothing here\n" in error
    assert Path("pairs_exact_map_remapped.pt").is_file()


@pytest.mark.parametrize("stored", ["files", "weights"])
def test_embeddings_relate_the_tokens_that_differ(pair, models, stored, capsys):
    sizes = [tokenizer.get_vocab_size() for tokenizer, _ in pair]
    random = np.random.default_rng(0)
    matrices = [random.normal(size=(size, 8)).astype(np.float32) for size in sizes]
    number, digit = pair[0][0].token_to_id("201"), pair[1][0].token_to_id("7")
    matrices[0][number] = matrices[1][digit]
    words = ["--space", "shared", "--top_k", "2"]
    if stored == "files":
        np.save("student.npy", matrices[0])
        save_file({"a": matrices[1], "b": matrices[1]}, "teacher.safetensors")
        words += ["--student-embeddings", "student.npy", "--teacher-tensor", "b"]
        words += ["--teacher-embeddings", "teacher.safetensors", "--keep_top_tokens", "9"]
    else:
        for (_, path), matrix in zip(pair, matrices, strict=True):
            weights = {"model.embed_tokens.weight": matrix, "lm_head.weight": matrix[:4]}
            save_file(weights, path / "model.safetensors")
    tool("minimal-projection-generator", *models, *words)
    content = table("cross_tokenizer_data/temp_projection_map_student_to_teacher_top_2.pt")
    assert content["indices"][number, 0] == digit
    assert content["likelihoods"][number, 0] > 0.5
    said = "note: --keep_top_tokens does nothing" in capsys.readouterr().err
    assert said == (stored == "files")
    tool("minimal-projection-generator", *models, *words, "--weight_threshold", "0.5")
    content = table("cross_tokenizer_data/temp_projection_map_student_to_teacher_top_2.pt")
    assert content["indices"][number].tolist() == [digit, -1]


def test_a_model_without_weights_asks_for_embeddings(pair, models, capsys, tmp_path):
    for (_, path), name in zip(pair, ("s", "t"), strict=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_bytes((path / "tokenizer.json").read_bytes())
    words = (
        "projection",
        "minimal-projection-generator",
        "--student-model",
        "s",
        "--teacher-model",
    )
    assert "--student-embeddings" in refusal(capsys, *words, "t")
    assert "student and teacher are one model" in refusal(capsys, *words, "s")

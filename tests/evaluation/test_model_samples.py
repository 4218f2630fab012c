"""What a page shows of two models is what transformers computes of them, chunk by chunk."""

import json
import math
import shutil

import pytest
import torch
import yaml
from megatron.core import parallel_state
from transformers import AutoModelForCausalLM

from megatron_ext.alignment import TokenAligner
from megatron_ext.cli.main import main
from megatron_ext.cli.pages.frame import in_line
from megatron_ext.evaluation.model_samples import model_samples
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.training.checkpoints.huggingface_import import import_huggingface
from tests.cli.html_page import HtmlPage
from tests.evaluation.tiny_language_model import save_tiny_model
from tests.process_group import run_ranks

TEXTS = ["the theory of the thing, then", " ", "there is another " * 40, "the 12 naïve theories"]
PROMPTS = ["the theory of"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("samples")
    student = save_tiny_model(root / "student")
    teacher = save_tiny_model(root / "teacher", seed=7, text="a theory is another thing of theirs")
    return student, teacher


def sample(rank, student, teacher, run):
    """The samples of both, and the page of a run with them."""
    parallel_state.destroy_model_parallel()
    found = model_samples(student, teacher, TEXTS, prompts=PROMPTS)
    short = run.parent / "short"
    shutil.copytree(teacher, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    found["of short models"] = model_samples(student, short, TEXTS[:1], prompts=PROMPTS)
    import_huggingface(student, run)
    text = run / "text.jsonl"
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    config = {
        "teachers": {
            "teacher": {"checkpoint": str(teacher)},
            "itself": {"checkpoint": str(student)},
            "other": {"checkpoint": str(teacher), "library": "huggingface"},
        },
        "loss": {"objective": "alm"},
        "data": {"train": [str(text)], "text_key": "text"},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    main(["report", str(run), "--with-models", "--prompt", PROMPTS[0], "--sample-bytes", "0"])
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tmp_path_factory.mktemp("run") / "run"


@pytest.fixture(scope="module")
def found(folders, run):
    return run_ranks(1, sample, *folders, run)[0]


def log_probs(folder, ids, bos):
    """[T, V] behind each token before the ids."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[bos, *ids[:-1]]])).logits[0].double()
    return logits.log_softmax(-1)


def test_models_that_read_few_tokens_complete_by_fewer(found):
    (whole,), (cut,) = found["completions"], found["of short models"]["completions"]
    for name in ("student", "teacher"):
        assert 0 < len(cut[name].encode()) < len(whole[name].encode()) / 2


def test_pieces_have_the_surprise_and_the_likeliest_tokens_of_transformers(found, folders):
    tokenizers = [build_tokenizer(TokenizerConfig(model=str(folder))) for folder in folders]
    aligner = TokenAligner(*tokenizers)
    # The longest is cut by what the models read, 96 tokens.
    longest, *others = found["texts"]
    assert 0 < sum(piece[1] for piece in longest) <= 800
    for text, pieces in zip((TEXTS[0], TEXTS[3]), others, strict=True):
        assert "".join(piece[0] for piece in pieces) == text
        assert sum(piece[1] for piece in pieces) == len(text.encode())
        alignment = aligner.align(text)
        spans = alignment.student_spans, alignment.teacher_spans
        sides = zip((aligner.student, aligner.teacher), folders, tokenizers, spans, strict=True)
        for side, (encoder, folder, tokenizer, of_side) in enumerate(sides):
            ids = encoder.encode([text]).ids.tolist()
            logs = log_probs(folder, ids, tokenizer.bos_id)
            nats = -logs.gather(1, torch.tensor(ids)[:, None])[:, 0]
            expected = [float(nats[begin:end].sum()) for begin, end in of_side.tolist()]
            known = [piece[2 + side] for piece in pieces if piece[2] is not None]
            assert sum(known) == pytest.approx(sum(expected), abs=2e-3 * len(known))
            # Where a character lies within one chunk, piece by piece; rounded to a thousandth.
            if len(known) == len(expected):
                assert known == pytest.approx(expected, abs=1e-3)
            best = logs[of_side[0][0]].exp().topk(5)
            shown = pieces[0][4 + side]
            assert [percent for _, percent in shown] == pytest.approx(
                (100 * best.values).tolist(), abs=0.06
            )
            spelled = [tokenizer.token_bytes(i) for i in best.indices.tolist()]
            for (name, _), raw in zip(shown, spelled, strict=True):
                assert raw is None or name in (raw.decode(errors="replace"), f"<{raw.hex(' ')}>")


def test_groups_add_up_to_all_that_was_compared(found):
    by = {}
    for row in found["groups"]:
        by.setdefault(row["by"], []).append(row)
    assert list(by) == ["script", "class", "chunk"]
    totals = [
        (sum(row["bytes"] for row in rows), sum(row["chunks"] for row in rows))
        for rows in by.values()
    ]
    assert len(set(totals)) == 1
    nats = [
        sum(row["student"] * row["bytes"] * math.log(2) for row in rows) for rows in by.values()
    ]
    assert nats == pytest.approx([nats[0]] * 3)
    assert {row["name"] for row in by["chunk"]} <= {"1:1", "1:n", "n:1", "n:m"}
    (single,) = (row for row in by["chunk"] if row["name"] == "1:1")
    assert 0 <= single["agreement"] <= 1
    assert all(row["agreement"] is None for row in by["chunk"] if row["name"] != "1:1")


def test_the_page_shows_the_samples_and_keeps_them(found, run, capsys):
    kept = json.loads((run / "samples.json").read_text())
    of_run, itself, other = (kept["teachers"][name] for name in ("teacher", "itself", "other"))
    assert "is not run by megatron-core" in other["problem"]
    for piece in itself["texts"][1]:
        assert (piece[2], piece[4]) == (piece[3], piece[5])
    assert all(row["agreement"] in (None, 1) for row in itself["groups"])
    # An imported student reads longer texts.
    assert of_run["texts"][1:] == found["texts"][1:]
    assert of_run["completions"] == found["completions"]
    (completion,) = found["completions"]
    assert completion["prompt"] == PROMPTS[0]
    page = HtmlPage((run / "report.html").read_text())
    assert "Where they differ" in page.text
    # Of both pairs, and what the student writes as its own teacher.
    assert page.text.count(in_line(completion["student"])) == 3
    texts = [text for one in (of_run, itself) for text in one["texts"]]
    pieces = [piece for text in texts for piece in text]
    titles = [one["title"] for tag, one in page.elements if tag == "bdi" and "title" in one]
    assert len(titles) == len(pieces)
    # Without models, from the file.
    main(["report", str(run), "--sample-bytes", "0"])
    assert "Where they differ" in (run / "report.html").read_text()

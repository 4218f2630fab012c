"""Tasks read published files, ask what they should, and count right."""

import errno
import gzip
import json
import math
import os
from unittest.mock import Mock

import pytest

from megatron_ext.cli import generate, output
from megatron_ext.cli.main import main
from megatron_ext.errors import DataError, MegatronExtError
from megatron_ext.evaluation.run_tasks import results_table, write_results, write_samples
from megatron_ext.evaluation.tasks import TASKS, TaskOptions
from megatron_ext.evaluation.tasks.gsm8k import flexible_number, normalised, strict_number
from megatron_ext.evaluation.tasks.task import texts_of
from tests.evaluation.stand_in_model import StandInModel, written

ROWS = [
    ("What is 1, or 2?", ("one", "two", "three", "four"), 2),
    ("Which?", ("a", "b", "c", "d"), 0),
    ("Who?", ("e", "f", "g", "h"), 2),
]
PROBLEMS = [
    ("How many are 2 and 3?", "They are 5.\n#### 5"),
    ("And 1,000 more?", "It is\n#### 1,005"),
    ("And none?", "#### 0"),
]


def mmlu_csv(folder):
    for split, rows in (("dev", ROWS[:2]), ("test", ROWS[2:] + ROWS[:1])):
        lines = [
            ",".join([f'"{text}"', *choices, "ABCD"[answer]]) for text, choices, answer in rows
        ]
        written(folder / split / f"college_physics_{split}.csv", "\n".join(lines) + "\n")


def mmlu_json(folder):
    for split, rows in (("dev", ROWS[:2]), ("test", ROWS[2:] + ROWS[:1])):
        records = [
            {"question": q, "subject": "college_physics", "choices": list(c), "answer": a}
            for q, c, a in rows
        ]
        text = "\n".join(map(json.dumps, records))
        written(folder / "college_physics" / f"{split}-00000-of-00001.json", text)


def mmlu_parquet(folder):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    mmlu_json(folder)
    for file in folder.rglob("*.json"):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        parquet.write_table(pyarrow.Table.from_pylist(records), file.with_suffix(".parquet"))
        file.unlink()


@pytest.mark.parametrize("write", [mmlu_csv, mmlu_json, mmlu_parquet])
def test_mmlu_asks_for_a_letter_behind_solved_questions(tmp_path, write):
    write(tmp_path)
    asked = []

    def nats(context, letter):
        asked.append((context, letter))
        return -1.0 if letter == " C" else -2.0

    task = TASKS["mmlu"](TaskOptions(data=tmp_path, num_fewshot=1))
    result = task.run(StandInModel(nats=nats))
    assert asked[0][0] == (
        "The following are multiple choice questions (with answers) about college physics.\n\n"
        "What is 1, or 2?\nA. one\nB. two\nC. three\nD. four\nAnswer: C\n\n"
        "Who?\nA. e\nB. f\nC. g\nD. h\nAnswer:"
    )
    assert [letter for _, letter in asked[:4]] == [" A", " B", " C", " D"]
    assert result.metrics["accuracy"] == 1.0
    wrong = task.run(StandInModel(nats=lambda _, letter: -1.0 if letter == " A" else -2.0))
    assert wrong.metrics == {
        "accuracy": 0.0,
        "accuracy_over_subjects": 0.0,
        "accuracy/college physics": 0.0,
    }


def test_gsm8k_generates_behind_solved_problems_and_compares_numbers(tmp_path):
    lines = [json.dumps({"question": q, "answer": a}) for q, a in PROBLEMS]
    written(tmp_path / "train.jsonl", lines[0])
    data = written(tmp_path / "test.jsonl", "\n".join(lines[1:]))
    said = {"And 1,000 more?": " It is $1,005.", "And none?": " None.\n#### 0"}
    model = StandInModel(complete=lambda prompt: said[prompt.split("Question: ")[-1][:-8]])
    result = TASKS["gsm8k"](TaskOptions(data=data, num_fewshot=1)).run(model)
    assert model.prompts[0] == (
        "Question: How many are 2 and 3?\nAnswer: They are 5.\n#### 5\n\n"
        "Question: And 1,000 more?\nAnswer:"
    )
    assert "Question:" in model.options.stop
    assert result.metrics == {"exact_match/strict": 0.5, "exact_match/flexible": 1.0}
    assert [sample["strict"] for sample in result.samples] == [False, True]


@pytest.mark.parametrize(
    ("completion", "strict", "flexible"),
    [
        ("#### -3", "-3", "-3"),
        ("#### 1,234.", "1234", "1234"),
        ("so $18.", "[invalid]", "18"),
        ("no number", "[invalid]", "[invalid]"),
    ],
)
def test_numbers_are_found_in_completions(completion, strict, flexible):
    assert normalised(strict_number(completion)) == strict
    assert normalised(flexible_number(completion)) == flexible


@pytest.mark.parametrize("name", ["texts.jsonl", "texts.jsonl.gz", "list.json.gz", "texts.txt"])
def test_bits_per_byte_counts_every_token_once_in_windows(tmp_path, name):
    texts = ["", "naïve" * 11, "b"]
    path = tmp_path / name
    if name.endswith(".txt"):
        texts = ["naïve" * 11]
        path.write_text(texts[0], encoding="utf-8")
    else:
        records = [json.dumps({"text": text}) for text in texts]
        is_list = name.startswith("list")
        content = (f"[{', '.join(records)}]" if is_list else "\n".join(records)).encode()
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    size = sum(len(text.encode()) for text in texts)
    seen = []

    def nats(context, window):
        seen.append((context, window))
        return -math.log(2)

    model = StandInModel(nats=nats, max_length=16)
    result = TASKS["bits_per_byte"](TaskOptions(data=path)).run(model)
    assert result.metrics["bits_per_byte"] == pytest.approx(len(seen) / size)
    assert result.metrics["bytes_per_token"] == 1.0
    # Four windows of 66 bytes; the last is filled up with what is before it.
    long = seen[:5]
    assert len(long[4][0].encode("utf-8", "ignore")) > len(long[3][0])


@pytest.mark.parametrize(
    ("task", "name", "text"),
    [
        ("mmlu", "x_test.csv", "question,a,b,c\n"),
        ("mmlu", "x.json", '[{"question": "q", "choices": ["a"], "answer": 0}]'),
        ("gsm8k", "x.jsonl", '{"question": "q"}'),
        ("gsm8k", "x.jsonl", "no json"),
        ("bits_per_byte", "x.jsonl", ""),
        ("bits_per_byte", "x.bin", "text"),
    ],
)
def test_bad_files_get_one_line(tmp_path, task, name, text):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(MegatronExtError, match=name):
        TASKS[task](TaskOptions(data=path, num_fewshot=0))


def test_a_record_without_the_text_is_named_with_the_flag_of_its_field(tmp_path):
    path = written(tmp_path / "x.jsonl", '{"text": "a"}\n{"question": "b"}\n')
    said = r"x\.jsonl, record 2: .*no text in text; got the fields question; set --text-field"
    with pytest.raises(DataError, match=said):
        TASKS["bits_per_byte"](TaskOptions(data=path))


def test_a_task_that_is_not_known_is_answered_with_every_choice(tmp_path, capsys):
    words = ["evaluate", "--model", "none", "--task", "bits", "--data", str(tmp_path)]
    with pytest.raises(SystemExit):
        main(words)
    error = capsys.readouterr().err
    assert "--task: unknown task; got 'bits'" in error
    assert "or lm_eval:NAME; did you mean 'bits_per_byte'?" in error


@pytest.mark.parametrize("task", ["mmlu", "gsm8k", "bits_per_byte"])
def test_data_that_is_not_there_is_the_reason(tmp_path, task):
    with pytest.raises(MegatronExtError, match=r"^\S+nofolder: there is no such file or folder;"):
        TASKS[task](TaskOptions(data=tmp_path / "nofolder"))


def test_too_few_examples_are_said_before_a_model_is_built(tmp_path):
    mmlu_csv(tmp_path)
    with pytest.raises(MegatronExtError, match="too few solved examples of college physics"):
        TASKS["mmlu"](TaskOptions(data=tmp_path))


def test_results_are_a_file_and_a_table(tmp_path):
    path = written(tmp_path / "texts.txt", "text")
    result = TASKS["bits_per_byte"](TaskOptions(data=path)).run(StandInModel())
    write_results(tmp_path / "r.json", result, {"task": "bits_per_byte"})
    write_samples(tmp_path / "s.jsonl", result)
    values = json.loads((tmp_path / "r.json").read_text())
    assert values["task"] == "bits_per_byte"
    assert values["count"] == 1
    assert values["metrics"] == result.metrics
    assert len((tmp_path / "s.jsonl").read_text().splitlines()) == 1
    assert f"{result.metrics['bits_per_byte']:.4f}" in results_table("bits_per_byte", result)


def test_texts_are_no_messages_of_a_user(tmp_path, capsys):
    data = written(tmp_path / "texts.txt", "text")
    words = ["evaluate", "--checkpoint", "none", "--task", "bits_per_byte", "--data", str(data)]
    with pytest.raises(SystemExit) as exit:
        main([*words, "--apply-chat-template"])
    assert exit.value.code == 2
    assert "--apply-chat-template" in capsys.readouterr().err


def test_completions_are_printed_where_their_file_cannot_be_written(tmp_path, monkeypatch, capsys):
    model = StandInModel(complete=lambda prompt: f"{prompt} and more")
    monkeypatch.setattr(generate, "load_models", lambda arguments, **options: model)
    monkeypatch.setattr(generate, "finish", lambda model: None)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(output, "write_text", Mock(side_effect=full))
    prompts = written(tmp_path / "prompts.jsonl", '{"prompt": "é"}\n')
    words = ["generate", "--model=m", f"--prompts={prompts}", f"--output={tmp_path / 'new.jsonl'}"]
    with pytest.raises(SystemExit):
        main(words)
    said = capsys.readouterr()
    assert json.loads(said.out) == {"prompt": "é", "completion": "é and more"}
    assert "new.jsonl: cannot write the file; got No space left" in said.err


def test_a_prompt_that_is_no_text_is_shown(tmp_path):
    path = written(tmp_path / "prompts.jsonl", '{"prompt": 5}\n')
    with pytest.raises(DataError, match="no text in prompt; got prompt 5; "):
        texts_of(path, "prompt")

"""Numbers are those of lm-evaluation-harness over the same HuggingFace model and local data."""

import json

import pytest

from megatron_ext.errors import MissingDependencyError
from megatron_ext.evaluation.lm_eval_tasks import LmEvalTask
from megatron_ext.evaluation.tasks import TASKS, TaskOptions
from tests.evaluation.stand_in_model import written

HAS_HARNESS = True
try:
    import lm_eval
except ImportError:
    HAS_HARNESS = False
needs_harness = pytest.mark.skipif(not HAS_HARNESS, reason="the package lm_eval is not installed")

HEAD = """task: tiny_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
"""
TASK_FILES = {
    "choice": """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: answer
doc_to_choice: choices
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "generation": """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "rolling": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
""",
}
NAMES = [f"tiny_{name}" for name in TASK_FILES]


@pytest.mark.skipif(HAS_HARNESS, reason="lm_eval is installed")
def test_without_the_package_one_line_says_so(tmp_path):
    with pytest.raises(MissingDependencyError, match="lm_eval"):
        LmEvalTask("hellaswag", TaskOptions(data=None))


@pytest.fixture
def tasks(tmp_path):
    words = ["the theory", "of the other", "thing there", "then the"]
    rows = [
        {
            "question": f"{word} {other}",
            "choices": [" the", " thing of", " other", " a then"],
            "answer": number % 4,
            "text": f"{word} {other} " * (1 + 8 * number),
        }
        for number, (word, other) in enumerate(zip(words, reversed(words), strict=True))
    ]
    data = written(tmp_path / "rows.jsonl", "\n".join(map(json.dumps, rows)))
    for name, text in TASK_FILES.items():
        written(tmp_path / "tasks" / f"{name}.yaml", HEAD.format(name=name, data=data) + text)
    return tmp_path / "tasks"


@pytest.fixture
def model(tmp_path):
    from megatron_ext.distributed import process_groups
    from megatron_ext.evaluation.megatron_language_model import ModelOptions, load_language_model
    from tests.evaluation.tiny_language_model import save_tiny_model

    folder = save_tiny_model(tmp_path / "model")
    yield folder, load_language_model(folder, ModelOptions(adds_bos=False, seq_length=96))
    process_groups.finalize()


@needs_harness
def test_answers_are_those_of_the_harness(tasks, model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder, ours = model
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    expected = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "dtype": "float32", "max_length": 96},
        tasks=NAMES,
        task_manager=manager,
        device="cpu",
        bootstrap_iters=0,
    )
    for name in NAMES:
        result = LmEvalTask(name, TaskOptions(data=tasks)).run(ours)
        assert result.metrics
        for key, value in result.metrics.items():
            metric = key.removeprefix(f"{name}/")
            assert value == pytest.approx(expected["results"][name][metric], rel=1e-5)
        samples = expected["samples"][name]
        assert len(samples) == result.count == 4
        for sample, theirs in zip(result.samples, samples, strict=True):
            if name == "tiny_generation":
                assert sample["responses"] == theirs["filtered_resps"]
            else:
                _close(sample["responses"], theirs["filtered_resps"])
    bits = expected["results"]["tiny_rolling"]["bits_per_byte,none"]
    data = tasks.parent / "rows.jsonl"
    found = TASKS["bits_per_byte"](TaskOptions(data=data)).run(ours)
    assert found.metrics["bits_per_byte"] == pytest.approx(bits, rel=1e-5)


def _close(ours, theirs):
    """Nested log-likelihoods, whether they are of first choices included."""
    if isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for pair in zip(ours, theirs, strict=True):
            _close(*pair)
    else:
        assert float(ours) == pytest.approx(float(theirs), rel=1e-5)

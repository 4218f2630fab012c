"""A run starts from a HuggingFace folder, learns from another, and is exported again."""

import os
from itertools import chain

import pytest
import torch
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_ext.huggingface.checkpoint_files import SIDE_FOLDER
from megatron_ext.training.checkpoints.huggingface_export import export_huggingface
from megatron_ext.training.checkpoints.huggingface_import import import_huggingface
from megatron_ext.training.configuration.yaml_file import read_config_file
from megatron_ext.training.metrics import read_metrics
from tests.huggingface.run_from_folders import train_runs, write_run
from tests.huggingface.tiny_models import COMPARED, save_model, tensors_of
from tests.process_group import run_ranks

ALL_TEXT = os.environ.get("MEGATRON_EXT_ALL_TEXT") == "1"
STUDENT, TEACHER = "gemma3", "qwen3"
TEACHER_ROWS = 431
"""More than the student's 301 by other padding, so that two ranks would cut their heads apart."""


PAIRS = {
    "run": (STUDENT, TEACHER),
    "imported": (STUDENT, "checkpoint"),
    "transformers": (STUDENT, TEACHER, "huggingface"),
    "experts": ("qwen2-moe", "mixtral"),
    "sinks": ("gpt-oss", "deepseek-v2"),
    "caps": ("gemma2", "gemma2"),
    "latent": ("deepseek-v3", "qwen3-moe"),
    "residuals": ("gpt-neox", "olmo2"),
    **({"linear": ("qwen3.5", "qwen3-next")} if "qwen3-next" in COMPARED else {}),
}
"""Student and teacher of each run, what runs the teacher, and the objective."""
SHARDED = ["run", "experts", "sinks", "latent", "residuals", *({"linear"} & {*PAIRS})]
"""Those that two ranks run, too; all of them with MEGATRON_EXT_ALL_TEXT."""
if ALL_TEXT:
    PAIRS |= {
        "turned": (TEACHER, STUDENT),
        "chunks": (STUDENT, TEACHER, "megatron", "strict_topk"),
        "multipliers": ("granite", "phi3"),
        "fused": ("phi3", "smollm3"),
        "unrotated": ("smollm3", "granite"),
        "norms": ("olmo3", "gpt-neox"),
    }
    SHARDED = list(PAIRS)

SEQUENCE_TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
WIDE = {
    f"{name}-{layout}": (name, sizes)
    for name in (("sinks", "latent") if ALL_TEXT else ())
    for layout, sizes in {
        "ep2-tp2": EP2 | SEQUENCE_TP2,
        "ep4-tp2": SEQUENCE_TP2
        | {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1},
        "ep2-pp2": EP2 | {"pipeline_model_parallel_size": 2},
        "cp2-tp2": SEQUENCE_TP2 | {"context_parallel_size": 2},
    }.items()
}
"""Runs of experts of these over four ranks."""

CUTS = {"cut": "run"} | ({"linear-cut": "linear"} if "linear" in PAIRS else {})
"""Runs over context-parallel ranks, by name: of the first they share windows and both rotary
embeddings."""

OF_OTHERS = [name for name, pair in PAIRS.items() if not {STUDENT, TEACHER} & {*pair}]
"""Runs of other models than the first two."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    save_model(STUDENT, root / STUDENT)
    save_model(TEACHER, root / TEACHER, vocab_size=TEACHER_ROWS)
    for name in {*chain(*(PAIRS[name][:2] for name in OF_OTHERS))}:
        save_model(name, root / name)
    import_huggingface(root / TEACHER, root / "checkpoint")
    for name, values in PAIRS.items():
        run = dict(zip(("student", "teacher", "library", "objective"), values, strict=False))
        write_run(root, f"{name}-alone", **run)
        write_run(root, name, **run, **SEQUENCE_TP2)
    for name, (pair, sizes) in WIDE.items():
        run = dict(zip(("student", "teacher"), PAIRS[pair], strict=True))
        write_run(root, name, **run, **sizes)
    for name, pair in CUTS.items():
        student, teacher = PAIRS[pair]
        write_run(root, name, student=student, teacher=teacher, context_parallel_size=2)
    alone = [f"{name}-alone" for name in PAIRS]
    run_ranks(1, train_runs, root, alone, alone)
    run_ranks(2, train_runs, root, [*SHARDED, *CUTS], [*CUTS, "imported", "transformers"])
    if WIDE:
        run_ranks(4, train_runs, root, list(WIDE), timeout_s=300)
    return root


def test_models_and_tokenizers_are_those_of_the_folders(root):
    values, _ = read_config_file(root / "run" / "config.yaml")
    assert values["tokenizer"]["model"] == str(root / STUDENT)
    assert values["student"]["kv_channels"] == 16
    assert values["student"]["scale_embeddings"]
    assert values["teacher"]["tokenizer"]["model"] == str(root / TEACHER)
    assert values["teacher"]["model"]["qk_layernorm"]


@pytest.mark.parametrize("name", [name for name in PAIRS if name != "chunks"])
def test_the_first_loss_is_that_of_transformers_over_the_ids_alone(root, name):
    folders = (STUDENT, TEACHER) if name in ("imported", "transformers") else PAIRS[name][:2]
    student, teacher = (_log_probs(root / folder) for folder in folders)
    divergence = kl_div(student, teacher, log_target=True, reduction="none").sum(-1).mean()
    for run in {f"{name}-alone", *({name} & set(SHARDED))}:
        (measured,) = read_metrics(root / run)
        assert measured["kd"] == pytest.approx(float(divergence), rel=1e-4)


@pytest.mark.parametrize("name", [*SHARDED, *WIDE, *CUTS])
def test_the_gradient_is_that_of_one_process(root, name):
    of_one = root / f"{CUTS.get(name) or WIDE.get(name, (name,))[0]}-alone"
    (alone,), (sharded,) = read_metrics(of_one), read_metrics(root / name)
    for number in ("kd", "grad_norm"):
        assert sharded[number] == pytest.approx(alone[number], rel=1e-4)


@pytest.mark.parametrize("name", ["run", *(name for name in OF_OTHERS if name in SHARDED)])
def test_an_exported_run_is_the_student_with_all_its_rows(root, name):
    student, exported = PAIRS[name][0], root / f"exported-{name}"
    export_huggingface(root / name, exported)
    before, after = tensors_of(root / student), tensors_of(exported)
    assert after.keys() == before.keys()
    for key, tensor in before.items():
        # A step of 1e-30 is all that was made.
        torch.testing.assert_close(after[key], tensor, rtol=0, atol=1e-28)
    kept = root / name / "checkpoints" / "iter_0000001" / SIDE_FOLDER
    assert (kept / "generation_config.json").is_file()
    for file in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (exported / file).read_bytes() == (root / student / file).read_bytes()


def test_a_run_without_huggingface_files_is_exported_with_its_own_tokenizer(root):
    (root / "run" / "checkpoints" / "iter_0000001" / SIDE_FOLDER).rename(root / "kept")
    export_huggingface(root / "run", root / "without", dtype=torch.bfloat16, verify=False)
    model = AutoModelForCausalLM.from_pretrained(root / "without")
    assert type(model).__name__ == "Gemma3ForCausalLM"
    assert model.dtype == torch.bfloat16
    tokenizers = [AutoTokenizer.from_pretrained(root / name) for name in ("without", STUDENT)]
    ids = [tokenizer("the other thing")["input_ids"] for tokenizer in tokenizers]
    assert ids[0] == ids[1]
    assert tokenizers[0].chat_template == tokenizers[1].chat_template


def _log_probs(folder):
    """[T, V] of every label, over the ids of the tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [1, *tokenizer("the theory of the other thing", add_special_tokens=False).input_ids]
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    return logits[:, : len(tokenizer)].log_softmax(-1)

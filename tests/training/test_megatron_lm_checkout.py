"""Megatron-LM's own scripts, from the checkout that MEGATRON_LM_PATH names.

Each is run as it is and under our flags; what it writes must be the same bytes.
"""

import hashlib
import json
import os
import re
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

from tests.tokenizers.tokenizer_files import byte_level
from tests.training.launched_ranks import free_port
from tests.training.megatron_stand_in import REPOSITORY, report, run

SHARED = Path(os.environ.get("MEGATRON_EXT_SHARED", REPOSITORY.parent / "shared"))
TEXTS = [
    "Zażółć gęślą jaźń, naïve café 12345.",
    "吾輩は猫である。名前はまだ無い。",
    "def f(x):\n    return  x + 1\n\n",
    "🙂 and 👩‍👩‍👧",
    "",
]
NUMBERS = ["1 2 3", "98", "0 7"]

PROBE = """
import json, sys
from megatron.training.arguments import parse_args, validate_args
from megatron.training.global_vars import get_tokenizer, set_global_variables
args = parse_args()
validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
set_global_variables(args)
print(json.dumps([type(get_tokenizer()).__module__, get_tokenizer().vocab_size,
                  args.padded_vocab_size, args.tokenizer_type]))
"""
FORMAT_PROBE = """
import json
from megatron.training.arguments import parse_args
from megatron_ext.tokenizers import build_tokenizer
args = parse_args()
print(json.dumps([build_tokenizer(args).prompt_format, args.sft_tokenizer_prompt_format]))
"""
MODEL = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 1 --train-iters 1 --lr 1e-4
    --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --mock-data
"""


@pytest.fixture(scope="module")
def checkout():
    """The checkout, where its parts that are needed import on this machine."""
    path = os.environ.get("MEGATRON_LM_PATH")
    if path is None:
        pytest.skip("MEGATRON_LM_PATH names no checkout of Megatron-LM")
    imports = "import megatron.training.arguments, megatron.training.global_vars"
    finished = run("-c", imports, cwd=Path(path), python_path=path)
    if finished.returncode != 0:
        pytest.skip(f"the checkout does not import here: {finished.stderr.splitlines()[-1]}")
    return Path(path)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Megatron's JSON rank list of a whole published vocabulary."""
    tekken = json.loads(_mistral("tekken_240911.json").read_text(encoding="utf-8"))
    file = tmp_path_factory.mktemp("ranks") / "ranks.json"
    file.write_text(json.dumps(tekken["vocab"]), encoding="utf-8")
    return file


def _mistral(name):
    return Path(str(files("mistral_common") / "data" / name))


def _flags(name, ranks):
    """Old flags and new ones of the same tokenizer."""
    if name == "null":
        return (
            ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"],
            ["--tokenizer-library", "null", "--vocab-size", "100"],
        )
    model, old = {
        "sentencepiece": (_mistral("tokenizer.model.v1"), "Llama2Tokenizer"),
        "tiktoken": (ranks, "TikTokenizer"),
        "huggingface": (SHARED / "tokenizers" / "qwen2_5", "HuggingFaceTokenizer"),
    }[name]
    if not model.exists():
        pytest.skip(f"{model} is not on this machine")
    return (
        ["--tokenizer-type", old, "--tokenizer-model", str(model)],
        ["--tokenizer-library", name, "--tokenizer-model", str(model)],
    )


def _preprocess(checkout, prefix, texts, *words, ours):
    """SHA-256 of the two files that ``preprocess_data.py`` writes."""
    data = prefix.with_suffix(".jsonl")
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    data.write_text("".join(lines), encoding="utf-8")
    command = ("-m", "megatron_ext", "run") if ours else ()
    finished = run(
        *(*command, "tools/preprocess_data.py", "--input", str(data), "--workers", "1"),
        *("--append-eod", "--output-prefix", str(prefix), *words),
        cwd=checkout,
        python_path=str(checkout),
    )
    assert finished.returncode == 0, finished.stderr
    digest = hashlib.sha256()
    for suffix in ("bin", "idx"):
        digest.update(Path(f"{prefix}_text_document.{suffix}").read_bytes())
    return digest.hexdigest()


@pytest.mark.parametrize("name", ["sentencepiece", "tiktoken", "huggingface", "null"])
def test_preprocess_data_writes_the_same_bytes_as_alone(name, checkout, ranks, tmp_path):
    old, new = _flags(name, ranks)
    texts = NUMBERS if name == "null" else TEXTS
    try:
        alone = _preprocess(checkout, tmp_path / "alone", texts, *old, ours=False)
    except subprocess.TimeoutExpired:
        pytest.skip("the checkout alone does not tokenize here")
    assert _preprocess(checkout, tmp_path / "old", texts, *old, ours=True) == alone
    if name == "null":
        # The new flags have one meaning; the old type counted one id more before 0.18.
        return
    assert _preprocess(checkout, tmp_path / "new", texts, *new, ours=True) == alone


def test_the_training_arguments_and_the_global_tokenizer_are_ours(checkout, ranks, tmp_path):
    _, new = _flags("sentencepiece", ranks)
    probe = tmp_path / "probe.py"
    probe.write_text(PROBE, encoding="utf-8")
    words = ("-m", "megatron_ext", "run", str(probe), *MODEL.split(), *new)
    got = report(run(*words, cwd=checkout, python_path=str(checkout)))
    module = "megatron_ext.tokenizers.text_tokenizer"
    assert got == [module, 32000, 32000, "GPTSentencePieceTokenizer"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--tokenizer-library huggingface --tokenizer-mode sft", "auto"),
        (
            "--tokenizer-library huggingface --tokenizer-mode sft "
            "--sft-tokenizer-prompt-format identity",
            "identity",
        ),
        ("--tokenizer-type SFTTokenizer", "nemotron-h-aligned"),
    ],
)
def test_the_default_of_the_old_flag_is_the_format_of_the_old_type_alone(
    words, expected, checkout, tmp_path
):
    model = byte_level(tmp_path)
    probe = tmp_path / "probe.py"
    probe.write_text(FORMAT_PROBE, encoding="utf-8")
    special = ("--tokenizer-special-tokens", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_233>")
    template = ("--chat-template", "{% for m in messages %}{{ m.content }}{% endfor %}")
    flags = (*words.split(), "--tokenizer-model", str(model), *special, *template)
    finished = run(
        *("-m", "megatron_ext", "run", str(probe), *flags), cwd=checkout, python_path=str(checkout)
    )
    found, old = report(finished)
    assert found == expected
    assert old == ("identity" if expected == "identity" else "nemotron-h-aligned")


@pytest.mark.parametrize("words", [(), ("--sft-packing", "best-fit", "--sft-loss-mode", "full")])
def test_sft_trains_on_our_masks(words, checkout, tmp_path):
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"{i}?"},
                {"role": "assistant", "content": "No."},
            ]
        }
        for i in range(8)
    ]
    data = tmp_path / "chat.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    model = [word for word in MODEL.split() if word != "--mock-data"]
    model[model.index("--train-iters") + 1] = "3"
    finished = run(
        *(str(REPOSITORY / "tests/training/cpu_script.py"), "pretrain_gpt.py", "--sft", *words),
        *(*model, "--data-path", str(data), "--split", "1,0,0", "--no-masked-softmax-fusion"),
        *("--distributed-backend", "gloo", "--log-interval", "1", "--eval-iters", "0"),
        *("--eval-interval", "9", "--num-workers", "0", "--global-batch-size", "2"),
        *("--data-cache-path", str(tmp_path / "cache"), "--calculate-per-token-loss"),
        *("--tokenizer-library", "sentencepiece", "--tokenizer-prompt-format", "mistral"),
        *("--tokenizer-model", str(_mistral("tokenizer.model.v1"))),
        cwd=checkout,
        python_path=str(checkout),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        CUDA_DEVICE_MAX_CONNECTIONS="1",
    )
    assert finished.returncode == 0, finished.stderr
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", finished.stdout)]
    assert len(losses) == 3
    assert losses[2] < losses[0] < 11

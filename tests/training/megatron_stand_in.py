"""Folders laid out as checkouts of Megatron-LM: its modules' names and flags, and little else.

A checkout's own tokenizer gives the id -1 for every text, so that it shows who built it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

OLD_LAYOUT = "megatron/core/tokenizers/text/utils/build_tokenizer.py"
NEW_LAYOUT = "megatron/core/tokenizers/utils/build_tokenizer.py"
LAYOUTS = {"0.16": OLD_LAYOUT, "main": NEW_LAYOUT}

_ARGUMENTS = """
import argparse, os

TYPES = ["HuggingFaceTokenizer", "GPTSentencePieceTokenizer", "TikTokenizer", "NullTokenizer",
         "GPT2BPETokenizer", "SFTTokenizer"]

def _add_tokenizer_args(parser):
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--vocab-size", type=int, default=None)
    group.add_argument("--padded-vocab-size", type=int, default=None)
    group.add_argument("--vocab-file", default=None)
    group.add_argument("--merge-file", default=None)
    group.add_argument("--vocab-extra-ids", type=int, default=0)
    group.add_argument("--tokenizer-type", choices=TYPES, default=None)
    group.add_argument("--tokenizer-model", default=None)
    group.add_argument("--tiktoken-num-special-tokens", type=int, default=1000)
    group.add_argument("--trust-remote-code", action="store_true", default=False)
{flags}
    return parser

def add_megatron_arguments(parser):
    parser.add_argument("--make-vocab-size-divisible-by", type=int, default=128)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser = _add_tokenizer_args(parser)
    parser.add_argument("--sft-tokenizer-prompt-format", default="nemotron-h-aligned")
    return parser

def parse_args(extra_args_provider=None):
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    args = parser.parse_args()
    args.rank = int(os.getenv("RANK", "0"))
    return args

def validate_args(args, defaults):
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args
"""
_FLAGS = {
    "0.16": """
    group.add_argument("--tokenizer-metadata", default=None)
    group.add_argument("--tokenizer-special-tokens", nargs="+", default=None)
    group.add_argument("--legacy-tokenizer", action="store_true", default=False)
    group.add_argument("--tiktoken-pattern", default=None)
    group.add_argument("--tokenizer-hf-use-fast", action="store_true", default=False)
    group.add_argument(
        "--tokenizer-hf-include-special-tokens", action="store_true", default=False
    )""",
    "main": """
    group.add_argument("--no-pad-vocab-size", "--disable-pad-vocab-size", dest="pad_vocab_size",
                       action="store_false", default=True)
    group.add_argument("--tokenizer-metadata", dest="metadata_path", default=None)
    group.add_argument("--tokenizer-special-tokens", dest="special_tokens", nargs="+", default=None)
    group.add_argument("--tiktoken-pattern", choices=["v1", "v2"], default=None)
    group.add_argument("--tokenizer-hf-no-use-fast", action="store_true", default=False)
    group.add_argument("--tokenizer-hf-no-include-special-tokens", action="store_true",
                       default=False)
    group.add_argument("--null-tokenizer-eod-id", type=int, default=None)
    group.add_argument("--null-tokenizer-pad-id", type=int, default=-1)
    group.add_argument("--use-gigatoken", action="store_true", default=False)""",
}
_BUILDER = '''
class Tokenizer:
    vocab_size = 5
    eod = -1
    def tokenize(self, text):
        return [-1]

def build_tokenizer(args, **kwargs):
    """The checkout's."""
    return Tokenizer()
'''
_GLOBALS = """
from {builder} import build_tokenizer

_TOKENIZER = None

def set_global_variables(args):
    global _TOKENIZER
    _TOKENIZER = build_tokenizer(args)

def get_tokenizer():
    return _TOKENIZER
"""
_PRETRAIN = """
import json, sys
from {builder} import build_tokenizer as build_for_data
from megatron.training.arguments import parse_args, validate_args
from megatron.training.global_vars import get_tokenizer, set_global_variables

def main(extra_args_provider=None):
    args = validate_args(parse_args(extra_args_provider), {{"tokenizer_type": "GPT2BPETokenizer"}})
    set_global_variables(args)
    text = "1 2 3"
    print(json.dumps({{
        "ids": get_tokenizer().tokenize(text),
        "data_ids": build_for_data(args).tokenize(text),
        "eod": get_tokenizer().eod,
        "args": vars(args),
        "argv": sys.argv,
        "path": sys.path[:3],
        "name": __name__,
        "file": __file__,
    }}))

if __name__ == "__main__":
    main()
"""
_PREPROCESS = """
import argparse, json, multiprocessing, os, sys
sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), os.path.pardir)))
from {builder} import build_tokenizer
from megatron.training.arguments import _add_tokenizer_args

class Encoder:
    def __init__(self, args):
        self.args = args
    def initializer(self):
        Encoder.tokenizer = build_tokenizer(self.args)
    def encode(self, text):
        return Encoder.tokenizer.tokenize(text)

if __name__ == "__main__":
    parser = _add_tokenizer_args(argparse.ArgumentParser())
    parser.add_argument("--start", required=True)
    args = parser.parse_args()
    assert args.tokenizer_type.lower()
    args.rank = args.tensor_model_parallel_size = 1
    args.make_vocab_size_divisible_by = 128
    encoder = Encoder(args)
    with multiprocessing.get_context(args.start).Pool(1, encoder.initializer) as pool:
        print(json.dumps({{"ids": pool.map(encoder.encode, ["4 5", "6"]),
                           "type": args.tokenizer_type}}))
"""
_MULTIMODAL = """
from pretrain import main

def add_multimodal_args(parser):
    parser.add_argument("--special-tokens", nargs="*", default=["<image>"])
    parser.add_argument("--tokenizer-prompt-format", choices=["mistral", "llama3"], required=True)
    parser.add_argument("--image-tag-type", choices=["nvlm", "internvl", ""])
    parser.add_argument("--force-system-message", action="store_true", default=False)
    return parser

if __name__ == "__main__":
    main(add_multimodal_args)
"""


def make_checkout(folder, release):
    """Write the stand-in of a release into ``folder``."""
    module = LAYOUTS[release].removesuffix(".py").replace("/", ".")
    globals_builder = "megatron.training.tokenizer" if release == "0.16" else module
    files = {
        LAYOUTS[release]: _BUILDER,
        "megatron/training/arguments.py": _ARGUMENTS.replace("{flags}", _FLAGS[release]),
        "megatron/training/global_vars.py": _GLOBALS.format(builder=globals_builder),
        "megatron/core/__init__.py": "",
        "megatron/training/__init__.py": "",
        "pretrain.py": _PRETRAIN.format(builder=module),
        "multimodal.py": _MULTIMODAL,
        "tools/preprocess.py": _PREPROCESS.format(builder=module),
    }
    if release == "0.16":
        files["megatron/training/tokenizer/tokenizer.py"] = _BUILDER
        files["megatron/training/tokenizer/__init__.py"] = "from .tokenizer import build_tokenizer"
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder


def run(*command, cwd, python_path="", **environment):
    """Run Python in ``cwd`` with this repository importable, besides what is installed."""
    path = os.pathsep.join(entry for entry in (python_path, str(REPOSITORY)) if entry)
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def report(finished):
    """The JSON that a script of the stand-in printed last."""
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])

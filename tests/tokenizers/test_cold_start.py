"""A tokenizer is there at once: nothing heavy is imported to construct one."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
libraries = {"tokenizers", "sentencepiece", "tiktoken"} & sys.modules.keys()
tokenizer = build_tokenizer(TokenizerConfig(model=sys.argv[1]))
ids = tokenizer.tokenize("the parser ends here")
assert tokenizer.detokenize(ids).strip() == "the parser ends here"
heavy = {"torch", "triton", "transformers", "megatron.core", "gigatoken", "awkward", "jinja2"}
found = {*heavy, *sys.argv[2:]} & sys.modules.keys()
# Of Megatron's main the module of the one for images imports LLaVA's, and torch with it.
config = TokenizerConfig(model=sys.argv[1], mode="multimodal", prompt_format="identity")
images = build_tokenizer(config)
assert images.tokenize("<image>")[-1] == images.image_token_id
print(*sorted(libraries | found | {"torch", "megatron.core", "transformers"} & sys.modules.keys()))
"""
OTHERS = {
    "sentencepiece-v1": {"tiktoken", "tokenizers"},
    "tekken": {"sentencepiece", "tokenizers"},
    "huggingface-byte-level": {"sentencepiece", "tiktoken"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_constructing_a_tokenizer_imports_its_own_library_and_nothing_heavy(tokenizer_path, name):
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tokenizer_path(name)), *OTHERS[name]],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip() == ""

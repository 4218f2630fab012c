"""Published tokenizers and texts; see the conversation tests for where they are."""

import json
import os
import re
from functools import cache

from megatron_ext.tokenizers import MegatronTokenizerText
from tests.conversation.shared_files import SHARED, needs_shared

ALL_TEXT = os.environ.get("MEGATRON_EXT_ALL_TEXT") == "1"
__all__ = ["SHARED", "needs_shared"]

HUGGINGFACE = (
    "bert_uncased",
    "gemma3",
    "gpt2",
    "llama3_2",
    "mistral_7b_v1",
    "mistral_nemo",
    "phi4_mini",
    "qwen2_5",
    "qwen3",
    "t5_small",
)
FILES = {
    "llama2_sp": "sentencepiece",
    "openai_tiktoken/cl100k_base.tiktoken": "tiktoken",
    "openai_tiktoken/o200k_base.tiktoken": "tiktoken",
    "openai_tiktoken/p50k_base.tiktoken": "tiktoken",
    "openai_tiktoken/r50k_base.tiktoken": "tiktoken",
    "sp_tiny/botchan_en_bpe_1000.model": "sentencepiece",
    "sp_tiny/botchan_en_unigram_1000.model": "sentencepiece",
    "sp_tiny/kyoto_ja_unigram_8000.model": "sentencepiece",
}
LIBRARY_OF = dict.fromkeys(HUGGINGFACE, "huggingface") | FILES


@cache
def published(name):
    """A tokenizer of the shared folder."""
    path = SHARED / "tokenizers" / name
    if name == "llama2_sp":
        path /= "tokenizer.model"
    return MegatronTokenizerText(path, {"library": LIBRARY_OF[name]}, engine="reference")


def published_texts():
    """Paragraphs by what they are in: 30 languages and more, mathematics, prose, code."""
    corpora = SHARED / "corpora"
    texts = {
        path.name.removesuffix(".admin.po"): _po_texts(path)
        for path in sorted((corpora / "django_po").glob("*.admin.po"))
    }
    rows = (corpora / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    texts["gsm8k"] = ["\n".join(json.loads(row).values()) for row in rows[:400]]
    prose = (corpora / "wagahai" / "wagahaiwa_nekodearu.txt").read_text(encoding="utf-8")
    texts["wagahai"] = [line for line in prose.splitlines() if line][:400]
    code = (corpora / "python_code" / "json.decoder.py.txt").read_text(encoding="utf-8")
    texts["python"] = re.split(r"(?<=\n)\n(?=\S)", code)
    return texts


def _po_texts(path):
    """Translations of a catalogue, one paragraph each."""
    source = path.read_text(encoding="utf-8")
    found = re.findall(r'^msgstr(?:\[\d\])? ((?:"[^\n]*"\s*)+)', source, flags=re.MULTILINE)
    lines = ("".join(json.loads(line) for line in text.splitlines() if line) for text in found[1:])
    return [text for text in lines if text]

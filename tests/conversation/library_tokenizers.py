"""Tokenizers of every library that know the control tokens of every prompt format."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from megatron_ext.conversation import ConversationTokenizer
from megatron_ext.tokenizers.libraries.huggingface import HuggingFaceTokenizer
from megatron_ext.tokenizers.libraries.sentencepiece import SentencePieceTokenizer
from megatron_ext.tokenizers.libraries.tiktoken import TiktokenTokenizer
from tests.conversation.byte_tokenizer import CONTROL_TOKENS, ByteTokenizer
from tests.tokenizers.short_tekken import tekken_file
from tests.tokenizers.tokenizer_files import byte_level

LIBRARIES = ("bytes", "huggingface", "sentencepiece", "tiktoken")
OWN_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}{{ '[PREFIX]' + call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""What each has as its own chat template: one that does not mark what is trained."""
ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def library_tokenizer(library: str, folder: Path) -> ConversationTokenizer:
    """A tokenizer of one of ``LIBRARIES``; its file, where it is made here, goes to ``folder``."""
    tokenizer = _tokenizer(library, folder)
    tokenizer.chat_template = OWN_TEMPLATE
    return tokenizer


def _tokenizer(library: str, folder: Path) -> Any:
    data = files("mistral_common") / "data"
    if library == "huggingface":
        path = byte_level(folder) / "tokenizer.json"
        return HuggingFaceTokenizer(path, additional_special_tokens=CONTROL_TOKENS, **ROLES)
    if library == "sentencepiece":
        path = Path(str(data / "mistral_instruct_tokenizer_240323.model.v3"))
        return SentencePieceTokenizer(path, additional_special_tokens=CONTROL_TOKENS, **ROLES)
    if library == "tiktoken":
        path = tekken_file()
        return TiktokenTokenizer(path, additional_special_tokens=CONTROL_TOKENS, **ROLES)
    return ByteTokenizer()

"""Tokenizers of every library that know the control tokens of every prompt format."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from byte_tokenizer import CONTROL_TOKENS, ByteTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_ext.conversation import ConversationTokenizer
from megatron_ext.tokenizers.libraries.huggingface.tokenizer import HuggingFaceTokenizer
from megatron_ext.tokenizers.libraries.sentencepiece.tokenizer import SentencePieceTokenizer
from megatron_ext.tokenizers.libraries.tiktoken.tokenizer import TiktokenTokenizer

LIBRARIES = ("bytes", "huggingface", "sentencepiece", "tiktoken")
ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def library_tokenizer(library: str, folder: Path) -> ConversationTokenizer:
    """A tokenizer of one of ``LIBRARIES``; its file, where it is made here, goes to ``folder``."""
    data = files("mistral_common") / "data"
    if library == "huggingface":
        path = byte_level_bpe(folder)
        return HuggingFaceTokenizer(path, additional_special_tokens=CONTROL_TOKENS, **ROLES)
    if library == "sentencepiece":
        path = Path(str(data / "mistral_instruct_tokenizer_240323.model.v3"))
        return SentencePieceTokenizer(path, additional_special_tokens=CONTROL_TOKENS, **ROLES)
    if library == "tiktoken":
        path = Path(str(data / "tekken_240911.json"))
        return TiktokenTokenizer(path, additional_special_tokens=CONTROL_TOKENS, **ROLES)
    return ByteTokenizer()


def byte_level_bpe(folder: Path) -> Path:
    """A small byte-level BPE that has learned the tests themselves."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    source = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.py")]
    tokenizer.train_from_iterator(source, trainer)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path

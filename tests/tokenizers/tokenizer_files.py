"""Tokenizer files for tests: the vocabularies of mistral-common, and small ones trained here."""

import argparse
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

import sentencepiece
from hypothesis import HealthCheck, settings
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.tokenizers.short_tekken import tekken_file

MANY = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
"""For properties of tokenizers that fixtures make."""

SENTENCES = [
    *(line for line in inspect.getsource(argparse).splitlines() if line.strip()),
    *(
        "Zażółć gęślą jaźń, naïve café.",
        "吾輩は猫である。名前はまだ無い。",
        "Съешь ещё этих мягких булок",
        "🙂 and 👩‍👩‍👧 and 🤷‍♀️",
    )
    * 20,
]

RANKS_IN_LIST = 2000


def mistral_file(name: str) -> Path:
    """A file of mistral-common's data folder."""
    return Path(str(files("mistral_common") / "data" / name))


def json_rank_list(folder: Path) -> Path:
    """Megatron's JSON rank list: the first ranks of Tekken."""
    file = folder / "ranks.json"
    file.write_text(_first_ranks(), encoding="utf-8")
    return file


@cache
def _first_ranks() -> str:
    tekken = json.loads(mistral_file("tekken_240911.json").read_text(encoding="utf-8"))
    return json.dumps(tekken["vocab"][:RANKS_IN_LIST])


def rank_file(folder: Path) -> Path:
    """The same ranks as base64 lines, one of them missing as 50256 is in p50k_base."""
    rows = json.loads(json_rank_list(folder).read_text(encoding="utf-8"))
    lines = [f"{row['token_bytes']} {row['rank']}\n" for row in rows if row["rank"] != 1990]
    file = folder / "ranks.tiktoken"
    file.write_text("".join(lines), encoding="ascii")
    return file


def byte_level_bpe(
    texts: Iterable[str],
    vocab_size: int,
    special_tokens: Sequence[str] = (),
    *,
    normalizer: object = None,
    split: object = None,
) -> Tokenizer:
    """GPT-2's pipeline, trained on ``texts``; ``split`` cuts them before its pre-tokenizer does."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    cuts = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, cuts]) if split else cuts
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def byte_level(folder: Path) -> Path:
    """GPT-2's pipeline, with one added token that is special and one that is not."""
    tokenizer = byte_level_bpe(SENTENCES, 900)
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens(["<tool>"])
    return _save(tokenizer, folder, eos_token="<|end|>")


def nfc_byte_level(folder: Path) -> Path:
    """Qwen's pipeline: NFC before byte-level BPE."""
    tokenizer = byte_level_bpe(SENTENCES, 900, ["<|end|>"], normalizer=normalizers.NFC())
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return _save(tokenizer, folder, eos_token={"content": "<|end|>"})


def metaspace(folder: Path) -> Path:
    """Llama 2's pipeline: a space in front, byte fallback, BOS from the post-processor."""
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    _train(
        tokenizer,
        trainers.BpeTrainer(
            vocab_size=900,
            special_tokens=["<unk>", "<s>", "</s>", *byte_pieces],
            limit_alphabet=90,
            show_progress=False,
        ),
    )
    return _save(tokenizer, folder, keep_special={"<unk>", "<s>", "</s>"})


def word_piece(folder: Path) -> Path:
    """BERT's pipeline: lower case, accents stripped, truncation and padding left in the file."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    _train(
        tokenizer,
        trainers.WordPieceTrainer(
            vocab_size=900, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], show_progress=False
        ),
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    return _save(tokenizer, folder, pad_token="[PAD]", cls_token="[CLS]", unk_token="[UNK]")


def unigram(folder: Path) -> Path:
    """T5's pipeline: Unigram, whose vocabulary holds the special tokens as ordinary pieces."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    tokenizer.decoder = decoders.Metaspace()
    _train(
        tokenizer,
        trainers.UnigramTrainer(
            vocab_size=500,
            special_tokens=["<pad>", "</s>", "<unk>"],
            unk_token="<unk>",
            show_progress=False,
        ),
    )
    return _save(tokenizer, folder, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


def nfkc_sentencepiece(folder: Path) -> Path:
    """SentencePiece with its default normaliser and no byte fallback: lossy by design."""
    return _train_sentencepiece(folder, byte_fallback=False)


def nfkc_byte_fallback_sentencepiece(folder: Path) -> Path:
    """SentencePiece with its default normaliser, and bytes for what it does not know."""
    return _train_sentencepiece(folder, byte_fallback=True)


def _train_sentencepiece(folder: Path, *, byte_fallback: bool) -> Path:
    prefix = folder / "trained"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_prefix=str(prefix),
        vocab_size=700,
        model_type="bpe",
        byte_fallback=byte_fallback,
        character_coverage=0.98,
        pad_id=3,
        minloglevel=2,
    )
    return prefix.with_suffix(".model")


def _train(tokenizer: Tokenizer, trainer: object) -> None:
    tokenizer.train_from_iterator(SENTENCES, trainer)


def _save(
    tokenizer: Tokenizer, folder: Path, *, keep_special: set[str] | None = None, **config: object
) -> Path:
    document = json.loads(tokenizer.to_str())
    if keep_special is not None:
        document["added_tokens"] = [
            row for row in document["added_tokens"] if row["content"] in keep_special
        ]
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _mistral(name: str) -> Callable[[Path], Path]:
    return lambda _folder: mistral_file(name)


MAKERS: Mapping[str, Callable[[Path], Path]] = {
    "sentencepiece-v1": _mistral("tokenizer.model.v1"),
    "sentencepiece-v3": _mistral("mistral_instruct_tokenizer_240323.model.v3"),
    "sentencepiece-v7": _mistral("mistral_instruct_tokenizer_241114.model.v7"),
    "sentencepiece-nfkc": nfkc_sentencepiece,
    "sentencepiece-nfkc-bytes": nfkc_byte_fallback_sentencepiece,
    "tekken": lambda _folder: tekken_file(),
    "json-rank-list": json_rank_list,
    "rank-file": rank_file,
    "huggingface-byte-level": byte_level,
    "huggingface-nfc": nfc_byte_level,
    "huggingface-metaspace": metaspace,
    "huggingface-wordpiece": word_piece,
    "huggingface-unigram": unigram,
}

BYTE_EXACT = ("tekken", "json-rank-list", "rank-file", "huggingface-byte-level")
"""Token bytes spell every text."""

SPACE_EXACT = ("sentencepiece-v1", "sentencepiece-v3", "sentencepiece-v7", "huggingface-metaspace")
"""Token bytes spell every text without U+2581, after a dummy prefix."""

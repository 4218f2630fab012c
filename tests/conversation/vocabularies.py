"""Vocabularies of every library, with what the tests of injection must know of each.

Those here are made in a second; the published ones are read where they are at hand.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import Tokenizer

from megatron_ext.tokenizers.base import MegatronTokenizerTextAbstract
from megatron_ext.tokenizers.libraries.byte_level import ByteLevelTokenizer
from megatron_ext.tokenizers.libraries.huggingface import HuggingFaceTokenizer
from megatron_ext.tokenizers.libraries.sentencepiece import SentencePieceTokenizer
from megatron_ext.tokenizers.libraries.tiktoken import TiktokenTokenizer
from tests.conversation.shared_files import SHARED
from tests.tokenizers.tokenizer_files import byte_level as byte_level_bpe


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, and what its own library and its file say of it."""

    tokenizer: MegatronTokenizerTextAbstract
    controls: Mapping[str, int]
    """Special tokens, and tokens added to what the model has: no content may give these ids."""
    user_defined: Mapping[str, int]
    """Tokens of the model that its library reads in any text: content gives these ids, but for
    marks such as ``<unused0>`` where the template writes the same one."""
    unknown: int | None
    """What stands for characters that the vocabulary does not have; None where it has all."""
    library_ids: Callable[[str], list[int]]
    """What the original library makes of a text in which control tokens are read."""


def small_vocabularies(folder: Path) -> dict[str, Callable[[], Vocabulary]]:
    """Vocabularies made in ``folder`` or brought by mistral-common, by name."""
    data = Path(str(files("mistral_common") / "data"))
    made: dict[str, Callable[[], Vocabulary]] = {
        "byte-level BPE": lambda: huggingface(_byte_level(folder)),
        "BPE with user-defined tokens": lambda: huggingface(_like_gemma(folder)),
        "WordPiece": lambda: huggingface(_word_piece(folder)),
        "Unigram of bare text": lambda: huggingface(_bare_unigram(folder)),
        "words of bare text": lambda: huggingface(_bare_words(folder)),
        "SentencePiece Unigram, NFKC": lambda: sentencepiece_model(_unigram_model(folder)),
        "bytes": lambda: byte_level(["<think>", "</think>", "<|im_start|>", "<|im_end|>"]),
    }
    for file in sorted(data.glob("*.model.v*")):
        made[file.name] = lambda file=file: sentencepiece_model(file)
    for file in sorted(data.glob("tekken*.json")):
        made[file.name] = lambda file=file: tiktoken_file(file)
    return {name: cache(make) for name, make in made.items()}


def published_vocabularies() -> dict[str, Callable[[], Vocabulary]]:
    """Vocabularies of the shared folder, by name; none where there is no such folder."""
    found: dict[str, Callable[[], Vocabulary]] = {}
    for file in sorted(SHARED.glob("tokenizers/*/tokenizer.json")):
        found[file.parent.name] = lambda file=file: huggingface(file)
    for file in sorted(SHARED.glob("tokenizers/*/*.model")):
        found[file.name] = lambda file=file: sentencepiece_model(file)
    for file in sorted(SHARED.glob("tokenizers/*/*.tiktoken")):
        found[file.name] = lambda file=file: tiktoken_file(file)
    return found


def huggingface(file: Path) -> Vocabulary:
    """A ``tokenizer.json``."""
    document = json.loads(file.read_text(encoding="utf-8"))
    rows = document["model"]["vocab"]
    model = set(rows) if isinstance(rows, dict) else {piece for piece, _ in rows}
    added = document["added_tokens"]
    library = Tokenizer.from_file(str(file))
    library.no_padding()
    library.no_truncation()
    # Where a file leaves ids out, the library gives its added tokens other ids than the file says.
    of_file = {library.token_to_id(row["content"]): row["id"] for row in added}

    def library_ids(text: str) -> list[int]:
        ids = library.encode(text, add_special_tokens=False).ids
        return [of_file.get(i, i) for i in ids]

    return Vocabulary(
        HuggingFaceTokenizer(file),
        {r["content"]: r["id"] for r in added if r["special"] or r["content"] not in model},
        {r["content"]: r["id"] for r in added if not r["special"] and r["content"] in model},
        _unknown(document["model"], library),
        library_ids,
    )


def sentencepiece_model(file: Path) -> Vocabulary:
    """A SentencePiece model; its library reads no control piece, so that we cut at their names."""
    library = sentencepiece.SentencePieceProcessor(model_file=str(file))
    pieces = [library.id_to_piece(i) for i in range(library.get_piece_size())]
    controls = {piece: i for i, piece in enumerate(pieces) if library.is_control(i)}
    names = re.compile(f"({'|'.join(map(re.escape, sorted(controls, key=len, reverse=True)))})")

    def library_ids(text: str) -> list[int]:
        ids: list[int] = []
        for part in filter(None, names.split(text)):
            ids += [controls[part]] if part in controls else library.encode(part)
        return ids

    marks = re.compile(r"\[/?REF.*\]|<(user|reserved)_\w+>")
    return Vocabulary(
        SentencePieceTokenizer(file),
        controls,
        {piece: i for i, piece in enumerate(pieces) if marks.fullmatch(piece)},
        library.unk_id(),
        library_ids,
    )


def tiktoken_file(file: Path) -> Vocabulary:
    """A rank file of tiktoken."""
    tokenizer = TiktokenTokenizer(file)
    library = tokenizer._encoding
    return Vocabulary(
        tokenizer,
        dict(library._special_tokens),
        {},
        None,
        lambda text: list(library.encode(text, allowed_special="all")),
    )


def byte_level(names: Sequence[str]) -> Vocabulary:
    """Bytes, with special tokens behind them."""
    tokenizer = ByteLevelTokenizer(special_tokens=names)
    controls = {name: tokenizer.token_to_id(name) for name in names}
    cut = re.compile(f"({'|'.join(map(re.escape, names))})")

    def library_ids(text: str) -> list[int]:
        parts = filter(None, cut.split(text))
        return [
            i for part in parts for i in ([controls[part]] if part in controls else part.encode())
        ]

    return Vocabulary(tokenizer, controls, {}, None, library_ids)


def _unknown(model: Mapping[str, Any], library: Tokenizer) -> int | None:
    named: int | None = model.get("unk_id")
    name = model.get("unk_token")
    return named if name is None else library.token_to_id(name)


def _added(token_id: int, content: str, *, special: bool = False, **flags: bool) -> dict[str, Any]:
    row = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    return {"id": token_id, "content": content, **row, **flags, "special": special}


def _saved(folder: Path, name: str, document: Mapping[str, Any]) -> Path:
    file = folder / name / "tokenizer.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document), encoding="utf-8")
    return file


def _byte_level(folder: Path) -> Path:
    """Added tokens with every flag, some in the model's vocabulary, with merges that give them."""
    document = json.loads((byte_level_bpe(folder) / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = document["model"]["vocab"]
    merges = document["model"]["merges"]
    for name in ("<s>", "</s>"):
        # The merges of a whole name, so that ordinary text would give its id.
        for end in range(2, len(name) + 1):
            vocab.setdefault(name[:end], len(vocab))
            if [name[: end - 1], name[end - 1]] not in merges:
                merges.append([name[: end - 1], name[end - 1]])
    rows = [_added(vocab[name], name, special=True) for name in ("<s>", "</s>")]
    others = [
        ("<|im_start|>", {"special": True}),
        ("<|im_end|>", {"special": True}),
        ("<think>", {}),
        ("</think>", {}),
        ("<tool_call>", {"normalized": True}),
        ("<|user|>", {"special": True, "rstrip": True}),
        ("<|assistant|>", {"special": True, "rstrip": True}),
        ("<mask>", {"special": True, "lstrip": True}),
        ("<both>", {"lstrip": True, "rstrip": True}),
        ("<word>", {"single_word": True}),
        ("stop", {}),
        ("<|im_start|>user", {}),
        ("<ünï 再>", {"special": True}),
    ]
    rows += [_added(len(vocab) + i, name, **flags) for i, (name, flags) in enumerate(others)]
    return _saved(folder, "byte-level", {**document, "added_tokens": rows})


def _like_gemma(folder: Path) -> Path:
    """Marks, tags and runs of newlines among the pieces of the model."""
    pieces = ["<unk>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
    pieces += ["<unused0>", "<unused1>", "<table>", "</table>", "\n", "\n\n", "\n\n\n", "▁▁", "▁"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += list("abcdefghijklmnopqrstuvwxyz0123456789<>/_|?.,!ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for word in ("▁the", "<unused0>", "<end_of_turn>", "user", "model"):
        for end in range(2, len(word) + 1):
            vocab.setdefault(word[:end], len(vocab))
            if [word[: end - 1], word[end - 1]] not in merges:
                merges.append([word[: end - 1], word[end - 1]])
    return _saved(
        folder,
        "like-gemma",
        {
            "version": "1.0",
            "added_tokens": [
                _added(i, piece, special=i < 5) for i, piece in enumerate(pieces[:13])
            ],
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                ],
            },
            "model": {
                **{"type": "BPE", "vocab": vocab, "merges": merges, "unk_token": "<unk>"},
                **{"byte_fallback": True, "fuse_unk": True, "ignore_merges": True},
            },
        },
    )


def _word_piece(folder: Path) -> Path:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "the", "user", "assistant"]
    pieces += [*"abcdefghijklmnopqrstuvwxyz0123456789[]<>/_|?.,!#"]
    pieces += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz0123456789"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    return _saved(
        folder,
        "word-piece",
        {
            "version": "1.0",
            "added_tokens": [
                *(_added(i, piece, special=True) for i, piece in enumerate(pieces[:5])),
                _added(len(pieces), "[TURN]"),
            ],
            "normalizer": {
                **{"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True},
                **{"strip_accents": None, "lowercase": True},
            },
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "model": {
                **{"type": "WordPiece", "vocab": vocab, "unk_token": "[UNK]"},
                **{"continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
            },
        },
    )


def _bare_unigram(folder: Path) -> Path:
    """No normaliser and no pre-tokenizer: any piece that a text holds is found, spaces and all."""
    pieces = ["<unk>", "<s>", "</s>", "<turn>", *"abcdefghijklmnopqrstuvwxyz <>/?.,!\n"]
    vocab = [[piece, -float(i)] for i, piece in enumerate(pieces)]
    return _saved(
        folder,
        "bare-unigram",
        {
            "version": "1.0",
            "added_tokens": [_added(i, pieces[i], special=True) for i in range(4)],
            "model": {"type": "Unigram", "vocab": vocab, "unk_id": 0},
        },
    )


def _bare_words(folder: Path) -> Path:
    """The whole stretch between two control tokens is one word."""
    pieces = ["<unk>", "<s>", "</s>", "<turn>", "user\n", "assistant\n", "hello", "\n"]
    return _saved(
        folder,
        "bare-words",
        {
            "version": "1.0",
            "added_tokens": [_added(i, pieces[i], special=True) for i in range(4)],
            "model": {
                "type": "WordLevel",
                "vocab": {piece: i for i, piece in enumerate(pieces)},
                "unk_token": "<unk>",
            },
        },
    )


def _unigram_model(folder: Path) -> Path:
    """Trained on the tests, with control pieces and with user-defined ones."""
    file = folder / "unigram.model"
    source = [p.read_text(encoding="utf-8") for p in sorted(Path(__file__).parent.glob("t*.py"))]
    with file.open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter("\n".join(source).splitlines()),
            model_writer=model,
            vocab_size=600,
            model_type="unigram",
            normalization_rule_name="nmt_nfkc",
            byte_fallback=True,
            control_symbols=["<|im_start|>", "<|im_end|>", "<think>"],
            user_defined_symbols=["<user_mark>", "<reserved_0>", "def ", "0", "1"],
            minloglevel=2,
        )
    return file

"""Two small HuggingFace checkpoints to distil between: ``python make_checkpoints.py FOLDER``.

The teacher is a Qwen3 with a byte-level vocabulary of 3,072, trained for 240 steps on the
documentation that comes with Python. The student is a Llama of half its width, with random weights
and a vocabulary of 2,048 pieces in the way of SentencePiece. Both folders hold what a
downloaded one does: ``config.json``, safetensors, tokenizer, chat template and generation config.
Text to distil and to measure on lies beside them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from megatron_ext.cli.demo.corpus import write_corpus

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CONTROL_TOKENS: Final = ["<unk>", "<s>", "</s>", "<|start|>", "<|end|>"]
TEACHER_STEPS: Final = 240
LEAST_STEPS: Final = 4
"""A schedule that rises and falls has no fewer."""

BATCH_SIZE: Final = 8
LENGTH: Final = 128


def main() -> None:
    """Write ``data/``, ``teacher/`` and ``student/`` under the folder."""
    arguments = _arguments()
    # A model this small gains nothing from more, and where other programs run, waits for them.
    torch.set_num_threads(1)
    folder, started = Path(arguments.folder), time.perf_counter()
    torch.manual_seed(0)
    write_corpus(folder / "data")
    texts = _texts(folder / "data" / "train.jsonl")
    reader = save_tokenizer(byte_level_bpe(texts, 3072), folder / "teacher")
    teacher = teacher_model(len(reader))
    train(teacher, reader, texts, steps=arguments.steps)
    save_model(teacher, folder / "teacher", title="teacher")
    reader = save_tokenizer(piece_bpe(texts, 2048), folder / "student")
    save_model(student_model(len(reader)), folder / "student", title="student")
    print(f"{time.perf_counter() - started:.0f} seconds")


def byte_level_bpe(texts: list[str], size: int) -> tokenizers.Tokenizer:
    """BPE over bytes, as GPT-2, Llama 3 and Qwen have it."""
    found = tokenizers.Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=CONTROL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(texts, trainer)
    return found


def piece_bpe(texts: list[str], size: int) -> tokenizers.Tokenizer:
    """BPE over characters with a ``▁`` for each space and single digits, bytes for the rest."""
    found = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    found.normalizer = normalizers.Replace(" ", "▁")
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("▁", behavior="merged_with_next"),
            pre_tokenizers.Split("\n", behavior="isolated"),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    found.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*CONTROL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    found.train_from_iterator(texts, trainer)
    return _with_bytes_as_pieces(found)


def _with_bytes_as_pieces(trained: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same with bytes as ordinary pieces: only control tokens are looked for in a text."""
    values = json.loads(trained.to_str())
    values["added_tokens"] = values["added_tokens"][: len(CONTROL_TOKENS)]
    return tokenizers.Tokenizer.from_str(json.dumps(values))


def save_tokenizer(inner: tokenizers.Tokenizer, folder: Path) -> Any:
    """Write it as transformers does, and return it."""
    found = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    found.save_pretrained(folder)
    return found


def teacher_model(vocab_size: int) -> Any:
    """3 layers of width 128."""
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            **_sizes(vocab_size, width=128, layers=3, feed_forward=384), tie_word_embeddings=False
        )
    )


def student_model(vocab_size: int) -> Any:
    """2 layers of width 64."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **_sizes(vocab_size, width=64, layers=2, feed_forward=192), tie_word_embeddings=False
        )
    )


def _sizes(vocab_size: int, *, width: int, layers: int, feed_forward: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def train(model: Any, reader: Any, texts: list[str], *, steps: int) -> None:
    """Next-token prediction on random stretches of the texts; plain torch."""
    ids = [id for text in texts for id in [1, *reader(text, add_special_tokens=False).input_ids, 2]]
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=4e-3, total_steps=steps, pct_start=min(0.5, 20 / steps)
    )
    for step, batch in enumerate(_batches(torch.tensor(ids), steps), 1):
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 60 == 0 or step == steps:
            print(f"teacher: step {step} of {steps}, loss {loss.item():.2f}", flush=True)


def _batches(ids: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
    for _ in range(steps):
        starts = torch.randint(len(ids) - LENGTH, (BATCH_SIZE,)).tolist()
        yield torch.stack([ids[start : start + LENGTH] for start in starts])


def save_model(model: Any, folder: Path, *, title: str) -> None:
    """Beside its tokenizer; in bf16, as most are published."""
    model.generation_config.max_new_tokens = 40
    transformers.utils.logging.disable_progress_bar()
    model.to(torch.bfloat16).save_pretrained(folder)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{folder}: {title} of {count:,} parameters, {model.config.vocab_size:,} tokens")


def _texts(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", help="where they go")
    parser.add_argument(
        "--steps", type=int, default=TEACHER_STEPS, help=f"of the teacher ({TEACHER_STEPS})"
    )
    arguments = parser.parse_args()
    if arguments.steps < LEAST_STEPS:
        parser.error(f"--steps must be {LEAST_STEPS} or more")
    return arguments


if __name__ == "__main__":
    main()

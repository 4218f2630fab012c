"""What rounding a teacher's weights changes in the loss.

    python -m benchmarks.teacher_precision --output benchmarks/results/teacher_precision.json

Teacher and student are Qwen3 models over bytes, trained on the documentation that comes with
Python. On held-out text each precision of the teacher, as ``load_causal_lm`` loads it, is compared
with its fp32 and, by forward KL, with the student. Nats and bits are of a byte.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.alignment import machine
from megatron_ext.ops.vocab_kl import vocab_kl_reference
from megatron_ext.teachers.causal_lm import load_causal_lm
from megatron_ext.teachers.weight_precision import WeightPrecision

ROWS, LENGTH, HELD_OUT_ROWS = 8, 128, 32
SIZES: Final = {"teacher": (192, 4), "student": (64, 2)}
"""Width and layers."""
PRECISIONS: Final[tuple[WeightPrecision | None, ...]] = (None, "int8", "fp8", "int4")


def _texts() -> torch.Tensor:
    """[rows, LENGTH + 1] int64"""
    from pydoc_data.topics import topics

    data = torch.tensor(list("\n".join(topics.values()).encode()))
    return data[: len(data) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)


def _trained(side: str, rows: torch.Tensor, steps: int) -> Qwen3ForCausalLM:
    width, layers = SIZES[side]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (ROWS,), generator=draw)]
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def _teacher_logits(folder: Path, tokens: torch.Tensor, precision: WeightPrecision | None) -> Any:
    """[N, 256] of a folder as runs load it."""
    model = load_causal_lm(
        folder, dtype=torch.float32, device=torch.device("cpu"), weight_precision=precision
    )
    assert model.head is not None
    return functional.linear(model(tokens, None), model.head).flatten(0, 1)


def measure(steps: int) -> list[dict[str, Any]]:
    """A row for each precision."""
    rows = _texts()
    held_out, rows = rows[-HELD_OUT_ROWS:], rows[:-HELD_OUT_ROWS]
    tokens, labels = held_out[:, :-1], held_out[:, 1:].flatten()
    student = _trained("student", rows, steps // 3)
    with torch.no_grad():
        own = student(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
    with tempfile.TemporaryDirectory() as folder:
        _trained("teacher", rows, steps).save_pretrained(folder)
        logits = {each: _teacher_logits(Path(folder), tokens, each) for each in PRECISIONS}
    exact = logits[None]
    gradients = {each: _gradient(own, teacher) for each, teacher in logits.items()}
    return [
        {
            "weight_precision": precision or "fp32",
            "bits_per_byte": float(functional.cross_entropy(teacher, labels)) / math.log(2),
            "kl_to_fp32": float(vocab_kl_reference(teacher, exact).mean()),
            "loss": float(vocab_kl_reference(own, teacher).mean()),
            "gradient_error": float(
                (gradients[precision] - gradients[None]).norm() / gradients[None].norm()
            ),
        }
        for precision, teacher in logits.items()
    ]


def _gradient(own: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Of the mean forward KL at the student's logits."""
    own = own.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(vocab_kl_reference(own, teacher).mean(), own)
    return gradient


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    import torchao

    rows = measure(arguments.steps)
    result = {
        "machine": machine(),
        "torch": torch.__version__,
        "torchao": torchao.__version__,
        "steps": arguments.steps,
        "rows": rows,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""How far DistillKit's compressed log-probabilities are from what it was given.

    python -m benchmarks.distillkit_curves CHECKOUT

CHECKOUT is one of arcee-ai/DistillKit; the committed result is of commit a61c2e7, on a CPU. Made-up
power laws with noise, each with an exponent and a likeliest token of its own, are compressed and
read by DistillKit itself. In nats; ``mass`` is the sum of the K probabilities as they are read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import torch

RESULT: Final = Path(__file__).parent / "results" / "distillkit_curves.json"
VOCAB, ROWS = 50_000, 400
CAPTURES: Final[dict[str, dict[str, Any]]] = {
    "recommended": {
        "k": 128,
        "exact_k": 16,
        "exact_dtype": "bfloat16",
        "polynomial_terms": [0, 1, 2, 3, 4, "sqrt"],
        "delta_encoding": False,
    },
    "budget": {
        "k": 50,
        "exact_k": 1,
        "exact_dtype": "bfloat16",
        "polynomial_terms": [0, 1, "sqrt"],
        "delta_encoding": False,
    },
    "offline example": {"k": 128, "exact_k": 32, "polynomial_terms": [0, 1, 2]},
}
"""Configurations of DistillKit's README."""


def main(checkout: str) -> None:
    """Measure, print and write the result."""
    sys.path.insert(0, checkout)
    from distillkit.compression import (  # type: ignore[import-not-found]
        DistributionQuantizationConfig,
        LogprobCompressor,
    )

    torch.manual_seed(0)
    exponent = 0.6 + 2.5 * torch.rand(ROWS, 1)
    logits = 0.4 * torch.randn(ROWS, VOCAB) - exponent * torch.arange(1, VOCAB + 1).log()
    logits[:, 0] += 8 * torch.rand(ROWS)
    log_probs = logits.log_softmax(dim=-1)
    results = {}
    for name, options in CAPTURES.items():
        config = DistributionQuantizationConfig(**{"d": VOCAB, "residual_bins": [], **options})
        compressor = LogprobCompressor(config=config)
        _, values = compressor.decompress_to_sparse(compressor.compress(log_probs[None]))
        read, true = values[0].double(), log_probs.topk(config.k).values.double()
        error = (read - true).abs().amax(dim=-1)
        results[name] = {
            "config": config.model_dump(mode="json"),
            "largest_error_of_the_median_row": round(float(error.median()), 4),
            "largest_error": round(float(error.max()), 4),
            "largest_mass": round(float(read.exp().sum(dim=-1).max()), 4),
            "largest_error_of_mass": round(
                float((read.exp().sum(-1) - true.exp().sum(-1)).abs().max()), 4
            ),
        }
    RESULT.write_text(json.dumps({"rows": ROWS, "results": results}, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Record rows that DistillKit compresses, to hold our reader to them.

    python tests/teachers/record_distillkit_rows.py CHECKOUT

CHECKOUT is one of arcee-ai/DistillKit; ``distillkit_rows.json`` is of commit a61c2e7.
"""

import json
import sys
from pathlib import Path

import torch

FILE = Path(__file__).with_name("distillkit_rows.json")
D, ROWS = 300, 3
_BINS = [
    {"scale_dtype": "float16", "element_bits": 8, "num_elements": 3},
    {"scale_dtype": "float32", "element_bits": 3, "num_elements": 4},
    {"scale_dtype": "bfloat16", "element_bits": 1, "num_elements": 2},
]
CAPTURES = {
    "exact": {"k": 8, "exact_k": 8},
    "budget": {
        "k": 12,
        "exact_k": 1,
        "exact_dtype": "bfloat16",
        "polynomial_terms": [0, 1, "sqrt"],
        "delta_encoding": False,
    },
    "deltas": {"k": 16, "exact_k": 6, "polynomial_terms": [0, 1, 2]},
    "bins": {
        "k": 16,
        "exact_k": 4,
        "polynomial_terms": [0, 1],
        "residual_bins": _BINS,
        "delta_encoding": False,
    },
    "diffused": {
        "k": 12,
        "exact_k": 2,
        "exact_dtype": "float64",
        "polynomial_terms": [0, "exp"],
        "term_dtype": "bfloat16",
        "residual_bins": _BINS[1:2],
        "error_diffusion": True,
        "normalize_t": True,
    },
}


def main(checkout):
    sys.path.insert(0, checkout)
    from distillkit.compression import DistributionQuantizationConfig, LogprobCompressor

    torch.manual_seed(5)
    places = torch.arange(1, D + 1).log() * torch.tensor([[0.8], [1.5], [2.5]])
    logits = (0.3 * torch.randn(ROWS, D) - places)[:, torch.randperm(D)]
    rows = {}
    for name, options in CAPTURES.items():
        config = {"d": D, "residual_bins": [], **options}
        compressor = LogprobCompressor(config=DistributionQuantizationConfig(**config))
        row = compressor.compress(logits.log_softmax(dim=-1)[None])
        ids, values = compressor.decompress_to_sparse(row)
        rows[name] = {
            "config": config,
            "compressed_logprobs": row["compressed_logprobs"][0].tolist(),
            "bytepacked_indices": row["bytepacked_indices"][0].tolist(),
            "token_ids": ids[0].tolist(),
            "log_probs": values[0].double().tolist(),
        }
    FILE.write_text(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

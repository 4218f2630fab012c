"""Tiny models of transformers' own classes with random weights, in folders, and rows to read."""

import os
from typing import NamedTuple

import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.teachers.base import TokenRows

VOCAB_SIZE = 97
"""Odd, so that every shard has padding."""

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}

MODELS = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral with a window": ("Mistral", {"sliding_window": 6}),
    "gemma 2": (
        "Gemma2",
        {"head_dim": 16, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 0.5, **_WINDOWS},
    ),
    "gemma 3": ("Gemma3Text", {"head_dim": 16, **_WINDOWS}),
    "phi 3": ("Phi3", {}),
    "phi": ("Phi", {}),
    "gpt-2": ("GPT2", {}),
    "granite": ("Granite", {"logits_scaling": 3.0}),
    "gpt-oss": ("GptOss", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
if os.environ.get("MEGATRON_EXT_ALL_TEXT"):
    # Its scan takes seconds on a CPU.
    _SCAN = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
    MODELS["falcon h1"] = ("FalconH1", _SCAN)
"""transformers' name and what its configuration differs in, by a name of our own."""

LOGITS = ("gemma 2", "phi")
"""Those whose logits are no product: capped ones, and ones with a bias."""


def save_causal_lm(name, folder):
    """One of ``MODELS``."""
    import transformers

    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**_SIZES, **options})
    torch.manual_seed(sorted(MODELS).index(name))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def own_logits(folder, texts):
    """[L, V] of each text, which the model reads alone, with attention that is written out."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    return [model(text[None]).logits[0] for text in texts]


class PackedRows(NamedTuple):
    """A microbatch as a run has it on one rank; see ``TokenInputs``."""

    tokens: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: None
    rows: TokenRows


def packed_rows(texts, length):
    """Rows of texts, filled up to ``length``; every token but the padding predicts something."""
    shape = len(texts), length
    tokens, positions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORE_INDEX)
    for row, own in enumerate(texts):
        filled = torch.cat(list(own))
        counted = [torch.arange(len(text)) for text in own]
        tokens[row, : len(filled)] = filled
        positions[row] = torch.cat([*counted, torch.arange(length - len(filled))])
        labels[row, : len(filled)] = filled
    rows = TokenRows(tokens=tokens, position_ids=positions, labels=labels)
    return PackedRows(tokens, positions, None, rows)


def some_texts(*lengths, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=draw) for length in lengths]

"""What a spawned rank runs: the loss of conversations that share samples, and of each alone."""

import torch
from torch.utils.data import default_collate

from megatron_ext.data.sft_dataset import attention_mask
from megatron_ext.distributed import process_groups
from megatron_ext.distributed.layout import Layout
from megatron_ext.training.configuration.config import ModelConfig, ParallelConfig, TrainingConfig
from megatron_ext.training.megatron_models import cpu_megatron
from megatron_ext.training.megatron_models.models import build_gpt_model

POSITIONS = ("learned_absolute", "rope")
VOCAB_SIZE = 512

Sample = dict[str, torch.Tensor]
Loss = tuple[float, int, torch.Tensor]
"""Sum over trained positions, their number, and the gradient of the word embeddings."""


def losses(rank, cases):
    """By positions and case: the loss of a batch, under the mask of its segments or a causal one.

    Args:
        rank: Of this process.
        cases: Samples by name, and whether their segments are kept apart.
    """
    cpu_megatron.install()
    groups = process_groups.initialize(Layout())
    found = {}
    for positions in POSITIONS:
        gpt = build_gpt_model(
            ModelConfig(
                num_layers=2,
                hidden_size=32,
                num_attention_heads=4,
                ffn_hidden_size=64,
                seq_length=64,
                position_embedding_type=positions,
                # Attention that is far from uniform: what a token sees matters.
                init_method_std=0.2,
            ),
            padded_vocab_size=VOCAB_SIZE,
            parallel=ParallelConfig(),
            training=TrainingConfig(train_iters=1),
            groups=groups,
        )
        found[positions] = {
            name: _loss(gpt, default_collate(samples), has_segments)
            for name, (samples, has_segments) in cases.items()
        }
    return found


def _loss(gpt, batch, has_segments):
    gpt.zero_grad()
    mask = attention_mask(batch["cu_seqlens"], batch["tokens"].shape[1]) if has_segments else None
    per_token = gpt(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
    loss = (per_token * batch["loss_mask"]).sum()
    loss.backward()
    gradient = gpt.embedding.word_embeddings.weight.grad
    return loss.item(), int(batch["loss_mask"].sum()), gradient.clone()

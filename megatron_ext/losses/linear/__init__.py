from megatron_ext.losses.linear.linear_distillation import (
    LinearDistillation,
    LinearOutput,
    no_logits,
)
from megatron_ext.losses.linear.microbatch_tiles import MicrobatchTiles

__all__ = ["LinearDistillation", "LinearOutput", "MicrobatchTiles", "no_logits"]

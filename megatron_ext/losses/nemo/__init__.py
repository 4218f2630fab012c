from megatron_ext.losses.nemo.gold import nemo_gold
from megatron_ext.losses.nemo.projected_kl import nemo_projected_kl

__all__ = ["nemo_gold", "nemo_projected_kl"]

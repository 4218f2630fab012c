from megatron_ext.ops.linear_form.function import TileLoss, linear_loss
from megatron_ext.ops.linear_form.tile_plan import Tile, TilePlan

__all__ = ["Tile", "TileLoss", "TilePlan", "linear_loss"]

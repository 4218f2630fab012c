from megatron_ext.ops.selected_tokens.divergence import (
    SelectedDivergence,
    SelectedPair,
    selected_divergence,
    tokens_of_chunks,
)
from megatron_ext.ops.selected_tokens.function import (
    evaluate_selected_tokens,
    selected_log_prob_reference,
    write_selected_gradient,
)
from megatron_ext.ops.selected_tokens.operands import SelectedTokens

__all__ = [
    "SelectedDivergence",
    "SelectedPair",
    "SelectedTokens",
    "evaluate_selected_tokens",
    "selected_divergence",
    "selected_log_prob_reference",
    "tokens_of_chunks",
    "write_selected_gradient",
]

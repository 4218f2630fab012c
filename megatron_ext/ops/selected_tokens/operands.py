"""Operands and results of selected tokens. T rows, K tokens, K' with a label apart, Vp columns."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import LogSumExp, VocabShard
from megatron_ext.ops.chunk_rows import local_column


class SelectedTokens(NamedTuple):
    """Log-probabilities of several tokens of each row, replicated over the group. No graph.

    K' tokens: K and, with labels, one more of each row.
    """

    log_prob: torch.Tensor
    """[T, K' + 1] of the tokens, -inf for none, and of all others together. These are summed from
    their own columns, so that they are exact where the selected ones hold nearly all."""

    column: torch.Tensor
    """int64 [T, K']: this rank's column of each token, -1 where it has none."""

    whole: LogSumExp
    """[T] of ``logits / temperature`` over all columns; the logarithm is NaN where the row has NaN
    or +inf."""

    rest: LogSumExp
    """[T] over the columns that are not selected."""

    place: torch.Tensor | None = None
    """int64 [T]: place of each label among the tokens; K, the last, is that of a label which is
    none of the others, and of rows without one. None without labels."""

    token_loss: torch.Tensor | None = None
    """[T] cross-entropy of each label, 0 where there is none, NaN of one beyond the vocabulary."""

    top_column: torch.Tensor | None = None
    """int64 [T]: global column of the largest logit, the first of equals, if that is asked for."""

    def without_label(self, log_prob: torch.Tensor) -> torch.Tensor:
        """[T, K + 1] of ``log_prob`` [T, K' + 1], with its graph: a label that is none of the
        tokens joins the rest."""
        if self.place is None:
            return log_prob
        label, rest = log_prob[:, -2], log_prob[:, -1]
        # Their sum would have no derivative.
        is_nothing = (label == -torch.inf) & (rest == -torch.inf)
        label, rest = label.masked_fill(is_nothing, 0.0), rest.masked_fill(is_nothing, 0.0)
        joined = torch.logaddexp(label, rest).masked_fill(is_nothing, -torch.inf)
        return torch.cat([log_prob[:, :-2], joined[:, None]], dim=1)


class AskedTokens(NamedTuple):
    """Tokens whose logits are read."""

    token_id: torch.Tensor
    """int64 [T, K']"""

    column: torch.Tensor
    """int64 [T, K'], -1 for none of this rank's."""

    place: torch.Tensor | None

    @classmethod
    def of(
        cls, token_id: torch.Tensor, labels: torch.Tensor | None, shard: VocabShard
    ) -> AskedTokens:
        """Tokens, and labels that are none of them."""
        place = None
        if labels is not None:
            count = token_id.shape[1]
            hits = (token_id == labels[:, None]) & (labels[:, None] >= 0)
            places = torch.arange(count, device=labels.device)
            place = torch.where(hits, places, count).amin(dim=1)
            is_apart = (place == count) & (labels >= 0) & (labels < shard.vocab_size)
            apart = torch.where(is_apart, labels, -1)
            token_id = torch.cat([token_id, apart[:, None]], dim=1)
        return cls(token_id.contiguous(), local_column(token_id, shard).contiguous(), place)


class LocalTokens(NamedTuple):
    """What this rank has of each row."""

    picked: torch.Tensor
    """[T, K'] selected logits over the temperature, 0 for those that it does not have."""

    peak: torch.Tensor
    """[T] of its other columns, 0 where there is none."""

    total: torch.Tensor
    """[T]: sum of ``exp(logit / tau - peak)`` over them."""

    top_column: torch.Tensor | None
    """int64 [T]: this rank's column of the largest logit."""


class Upstream(NamedTuple):
    """What arrives for an evaluation, as ``write_selected_gradient`` takes it."""

    on_log_prob: torch.Tensor
    labels: torch.Tensor | None
    label_scale: torch.Tensor | float

    def with_labels(self, found: SelectedTokens) -> torch.Tensor:
        """Upstream gradients [T, K' + 1], the labels' among them; 0 where there is no mass."""
        on_tokens = self.on_log_prob
        if self.labels is not None and found.place is not None:
            weight = ((self.labels >= 0) * self.label_scale).to(on_tokens.dtype)
            on_tokens = on_tokens.scatter_add(1, found.place[:, None], -weight[:, None])
        return on_tokens.masked_fill(found.log_prob == -torch.inf, 0.0)

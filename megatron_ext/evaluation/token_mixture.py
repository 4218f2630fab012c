"""Models that predict the same tokens together, and their next token behind a growing text.

B rows, T tokens, V columns of the whole vocabulary, Vp local ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.evaluation.language_model import Mean

CACHE_STEP: Final = 64
"""Multiple of the lengths of caches, so that rotary embeddings are made for few lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMixture:
    """Models of one vocabulary, or one alone, on the same ranks."""

    chunks: tuple[GPTModel, ...]
    """This rank's part of each model, frozen."""

    weights: tuple[float, ...] = (1.0,)
    """Weight of each, with the sum 1."""

    mean: Mean = "probs"

    def mixed(
        self,
        logits: Sequence[torch.Tensor],
        log_softmax: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Logits of the mixture, from those of each model; of one alone, its own.

        Args:
            logits: [..., Vp] of each model.
            log_softmax: Normalises logits over the whole vocabulary.
        """
        if len(logits) == 1:
            return logits[0]
        pairs = list(zip(self.weights, logits, strict=True))
        if self.mean == "logits":
            # A weight of 0 times a column of padding, -inf, is no number.
            return torch.stack([weight * each for weight, each in pairs if weight]).sum(0)
        logs = [log_softmax(each.float()) + math.log(weight) for weight, each in pairs if weight]
        return torch.stack(logs).logsumexp(0)


def last_logits(
    chunk: GPTModel,
    tokens: torch.Tensor,
    context: StaticInferenceContext,
    *,
    shard: VocabShard,
    groups: ProcessGroups,
) -> torch.Tensor | None:
    """[B, V] fp32 logits after ``tokens`` [B, T], -inf beyond the vocabulary; on the last stage.

    Args:
        context: Cache of the tokens before, which those here are added to.

    Collectives: those of the schedule and of the layers, one all-gather over ``tp``.
    """
    begin = context.sequence_len_offset
    positions = torch.arange(begin, begin + tokens.shape[1], device=tokens.device)

    def forward(_: Any, model: GPTModel) -> tuple[torch.Tensor, Any]:
        output = model(
            tokens,
            positions.expand_as(tokens),
            None,
            inference_context=context,
            runtime_gather_output=True,
        )
        return output, lambda logits, *, non_loss_data: logits

    outputs = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=None,
        model=[chunk],
        num_microbatches=1,
        seq_length=tokens.shape[1],
        micro_batch_size=len(tokens),
        forward_only=True,
        collect_non_loss_data=True,
    )
    context.increment_sequence_len_offset(tokens.shape[1])
    context.enable_decode_mode()
    if not groups.is_last_stage:
        return None
    logits: torch.Tensor = outputs[0][:, -1].float()
    logits[:, shard.vocab_size :] = -torch.inf
    return logits


_MOST_STEPS: Final = 8
"""Tokens that are read one by one behind a cached text; more are read anew with it."""


class NextTokens:
    """Probabilities of a model's next token behind texts that share their beginnings.

    The keys and values of the last text are kept, and what the next one has in common with it is
    not computed again.

    Args:
        chunk: This rank's part of the model, frozen.
        max_length: Longest text, in tokens.
    """

    def __init__(
        self, chunk: GPTModel, shard: VocabShard, groups: ProcessGroups, *, max_length: int
    ) -> None:
        self._chunk, self._shard, self._groups = chunk, shard, groups
        self.max_length = max_length
        # The states of linear attention are those behind all tokens, and cannot be taken back.
        self._keeps_states = chunk.config.linear_attention_freq is not None
        self._context = StaticInferenceContext(1, -(-max_length // CACHE_STEP) * CACHE_STEP)
        self._read: list[int] = []

    @torch.no_grad()
    def after(self, ids: Sequence[int]) -> NDArray[np.float64]:
        """[V] of the next token after ``ids``, at least one; the same on every rank of a replica.

        Collectives: for every piece that is read those of ``last_logits``; one broadcast of [V]
        over ``tp`` and one over ``pp``.
        """
        same = 0
        while same < min(len(self._read), len(ids) - 1) and self._read[same] == ids[same]:
            same += 1
        if len(ids) - same > _MOST_STEPS or (self._keeps_states and same < len(self._read)):
            same = 0
        pieces = [ids[same:]] if same == 0 else [[token] for token in ids[same:]]
        self._context.sequence_len_offset = same
        if same == 0:
            self._context.enable_prefill_mode()
        logits = None
        for piece in pieces:
            tokens = torch.tensor([list(piece)], device=self._groups.device)
            logits = last_logits(
                self._chunk, tokens, self._context, shard=self._shard, groups=self._groups
            )
        self._read = list(ids)
        if logits is None:
            logits = torch.zeros(1, self._shard.vocab_size, device=self._groups.device)
        else:
            logits = logits[:, : self._shard.vocab_size].contiguous()
            # Tensor-parallel ranks have the same, but one decides, so that none can differ.
            first = dist.get_process_group_ranks(self._groups.tp)[0]
            dist.broadcast(logits, src=first, group=self._groups.tp)
        whole = self._groups.broadcast_from_last_stage(logits)[0].double()
        probs: NDArray[np.float64] = whole.softmax(0).cpu().numpy()
        return probs

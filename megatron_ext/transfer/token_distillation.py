"""Rows of added tokens that learn to stand for what spelled them.

Token distillation (Dobler et al. 2025, arXiv 2505.20133): the model reads snippets of a text by its
old tokens and by the new ones, and the new tokens' rows learn to give the same last hidden states
behind them. All other weights stay as they are.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch.nn import functional

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.imports import needed_packages
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.transfer.hypernetwork import padded

_TOLD: Final = 10
"""Steps between two lines of progress."""


def frozen_model(folder: Path, *, feature: str) -> Any:
    """A HuggingFace folder's model of transformers in fp32, without gradients.

    Raises:
        ConfigError: transformers cannot read the folder.
    """
    with needed_packages(feature):
        from transformers import AutoModelForCausalLM
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "transformers does not read this model",
            where=folder,
            got=(str(error).splitlines() or [type(error).__name__])[0],
            expected="a HuggingFace folder",
            fix="export a run or a checkpoint with megatron-ext export-hf",
        ) from error
    return model.eval().requires_grad_(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationOptions:
    """Settings of token distillation."""

    steps: int = 200
    lr: float = 1e-3
    batch_size: int = 16
    snippets: int = 100
    """Most snippets of each token."""

    length: int = 48
    """Tokens of a snippet, about."""

    next_token_weight: float = 1.0
    """Weight of the snippets' cross-entropy, from which a head of its own learns its new rows;
    0 leaves it as it starts."""

    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "snippets", "length", "lr"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive", got=getattr(self, name))
        if not self.next_token_weight >= 0:
            raise ConfigError("next_token_weight must not be negative", got=self.next_token_weight)


class Snippet(NamedTuple):
    """A part of a text, as both tokenizers read it."""

    old: list[int]
    new: list[int]

    places: list[tuple[int, int]]
    """Positions in both, behind the first new token, at which the same bytes are read."""


@dataclass(frozen=True, slots=True)
class DistilledRows:
    """Rows of new tokens."""

    rows: dict[str, torch.Tensor]
    """[new tokens, D] by the name of the tensor, in fp32."""

    snippets: dict[int, int]
    """Number of snippets by id; tokens without any have the rows that they had."""

    losses: list[float]
    """Of every step, the relative squared difference of hidden states."""


def find_snippets(
    old: MegatronTokenizerText,
    new: MegatronTokenizerText,
    texts: Iterable[str],
    options: DistillationOptions,
) -> dict[int, list[Snippet]]:
    """Snippets by the new token that they are around, the first in the texts.

    Args:
        old: Tokenizer of the model as it was, whose ids the new one has, too.
    """
    count = old.vocab_size
    found: defaultdict[int, list[Snippet]] = defaultdict(list)
    for text in texts:
        ids, ends = (values.tolist() for values in new.encode_with_byte_ends(text))
        if max(ids, default=0) < count:
            continue
        old_ids, old_ends = (values.tolist() for values in old.encode_with_byte_ends(text))
        place_of = {end: place for place, end in enumerate(old_ends)}
        for place, token in enumerate(ids):
            if token >= count and len(found[token]) < options.snippets:
                snippet = _around(place, (ids, ends), (old_ids, place_of), options.length)
                if snippet is not None:
                    found[token].append(snippet)
    return {token: snippets for token, snippets in found.items() if snippets}


def _around(
    place: int,
    new: tuple[Sequence[int], Sequence[int]],
    old: tuple[Sequence[int], dict[int, int]],
    length: int,
) -> Snippet | None:
    """The snippet around a new token, from where both tokenizers begin a token."""
    (ids, ends), (old_ids, place_of) = new, old
    begin = max(0, place - length // 2)
    while begin > 0 and ends[begin - 1] not in place_of:
        begin -= 1
    old_begin = place_of[ends[begin - 1]] + 1 if begin else 0
    stop = min(len(ids), place + length // 2)
    places = [
        (place_of[ends[i]] - old_begin, i - begin)
        for i in range(place, stop)
        if ends[i] in place_of and (i + 1 == len(ids) or ends[i + 1] != ends[i])
    ]
    if not places:
        return None
    return Snippet(
        list(old_ids[old_begin : old_begin + places[-1][0] + 1]), list(ids[begin:stop]), places
    )


def distil_rows(
    folder: Path,
    old: MegatronTokenizerText,
    new: MegatronTokenizerText,
    snippets: dict[int, list[Snippet]],
    options: DistillationOptions,
    *,
    tell: Callable[[str], None],
) -> DistilledRows:
    """Train the rows of new tokens, on a GPU where there is one.

    Args:
        folder: HuggingFace folder of the model with the new rows.
        old: Tokenizer of the model as it was.
        new: Tokenizer of the folder.
        snippets: The result of ``find_snippets``.
        tell: Called with lines of progress.

    Raises:
        DataError: There are no snippets.
    """
    if not snippets:
        raise DataError(
            "none of the new tokens is in the text", fix="give a text that has some of them"
        )
    rows = _Rows(folder, old, snippets, options)
    everything = [snippet for of_token in snippets.values() for snippet in of_token]
    draw = random.Random(options.seed)
    losses = []
    for step in range(options.steps):
        batch = draw.choices(everything, k=options.batch_size)
        losses.append(rows.learn(batch))
        if (step + 1) % _TOLD == 0:
            tell(f"step {step + 1} of {options.steps}, difference {losses[-1]:.4f}")
    own = slice(old.vocab_size, new.vocab_size)
    return DistilledRows(rows.values(own), {k: len(v) for k, v in snippets.items()}, losses)


class _Rows:
    """A model of which the new rows of embedding and head learn."""

    def __init__(
        self,
        folder: Path,
        old: MegatronTokenizerText,
        snippets: dict[int, list[Snippet]],
        options: DistillationOptions,
    ) -> None:
        self._options = options
        self._first = [] if old.bos_id is None else [old.bos_id]
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = frozen_model(folder, feature="token distillation").to(self._device)
        self._weights = {"embedding": self._model.get_input_embeddings().weight}
        head = self._model.get_output_embeddings().weight
        if head is not self._weights["embedding"] and options.next_token_weight:
            self._weights["head"] = head
        # Only rows of tokens that a snippet has; the others keep theirs.
        self._ids = torch.tensor(sorted(snippets), device=self._device)
        self._learning = {
            name: weight[self._ids].clone().requires_grad_()
            for name, weight in self._weights.items()
        }
        for weight in self._weights.values():
            weight.requires_grad_()
        self._optimizer = torch.optim.AdamW(
            self._learning.values(), lr=options.lr, weight_decay=0.0
        )

    def learn(self, batch: Sequence[Snippet]) -> float:
        """One step; returns the relative squared difference of hidden states."""
        offset = len(self._first)
        olds, news = (
            padded([self._first + list(ids) for ids in part], self._device)
            for part in zip(*((snippet.old, snippet.new) for snippet in batch), strict=True)
        )
        places = torch.tensor(
            [
                (row, offset + there, offset + here)
                for row, snippet in enumerate(batch)
                for there, here in snippet.places
            ],
            device=self._device,
        )
        row, there, here = places.unbind(1)
        with torch.no_grad():
            target = self._hidden(olds)[row, there]
        hidden = self._hidden(news)
        difference = (hidden[row, here] - target).square().mean() / target.square().mean()
        loss = difference
        if self._options.next_token_weight:
            logits = self._model.get_output_embeddings()(hidden[:, :-1])
            labels = news[:, 1:].masked_fill(news[:, 1:] < 0, -100)
            entropy = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss = loss + self._options.next_token_weight * entropy
        loss.backward()
        for name, weight in self._weights.items():
            if weight.grad is not None:
                self._learning[name].grad = weight.grad[self._ids]
                weight.grad = None
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight[self._ids] = self._learning[name]
        return float(difference)

    def values(self, ids: slice) -> dict[str, torch.Tensor]:
        """Rows of ``ids`` by ``embedding`` and ``head``."""
        return {name: weight[ids].detach().cpu() for name, weight in self._weights.items()}

    def _hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """[B, T, D] last hidden states; rows are padded behind their ends, with -1."""
        mask = (ids >= 0).long()
        read = self._model.base_model(input_ids=ids.clamp(min=0), attention_mask=mask)
        hidden: torch.Tensor = read.last_hidden_state
        return hidden

"""Training of a hypernetwork on vocabularies that are learnt on the fly (arXiv 2405.07883).

Every few steps a byte-level BPE of a random size is learnt from a random part of the text. The
model, which does not learn, reads and predicts the text in its tokens: those that the old
vocabulary has are copies, but for a share that is treated as if it had them not, the others are
predicted. The loss is the model's cross-entropy by bytes, and how far the predictions are from the
rows of tokens that the old vocabulary does have.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.huggingface.checkpoint_files import CheckpointFiles
from megatron_ext.huggingface.model_settings import family_of
from megatron_ext.huggingface.tensor_files import TensorReader
from megatron_ext.projection.speller import Speller
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.tokenizers.token_bytes import byte_of_character
from megatron_ext.transfer.hypernetwork import (
    Hypernetwork,
    HypernetworkConfig,
    padded,
    rows_fingerprint,
)
from megatron_ext.transfer.token_distillation import frozen_model

_TOLD: Final = 10
_BYTES: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class HypernetworkTraining:
    """Settings of the training of a hypernetwork."""

    steps: int = 1000
    lr: float = 1e-3
    batch_size: int = 8
    seq_length: int = 128
    vocabulary_size: int = 4096
    """Most tokens of a vocabulary that is learnt."""

    steps_per_vocabulary: int = 10
    hidden_share: float = 0.3
    """Share of common tokens that are treated as if the old vocabulary lacked them."""

    row_weight: float = 1.0
    """Weight of the distance to the rows of these."""

    layers: int = 2
    hidden: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "lr", "batch_size", "steps_per_vocabulary"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive", got=getattr(self, name))
        if self.seq_length < 2:
            raise ConfigError("a text has two tokens at least", got=self.seq_length)
        if self.vocabulary_size <= 2 * _BYTES:
            raise ConfigError(
                "a vocabulary of so few tokens has hardly more than bytes",
                where="--vocabulary-size",
                got=self.vocabulary_size,
                expected=f"above {2 * _BYTES}",
            )


def train_hypernetwork(
    folder: Path,
    texts: Sequence[str],
    options: HypernetworkTraining,
    *,
    tell: Callable[[str], None],
) -> Hypernetwork:
    """Train a hypernetwork for a HuggingFace folder, on a GPU where there is one.

    Raises:
        DataError: There is no text.
    """
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise DataError("there is no text to learn vocabularies from", where="--data")
    torch.manual_seed(options.seed)
    learner = _Learner(folder, texts, options)
    for step in range(options.steps):
        if step % options.steps_per_vocabulary == 0:
            learner.draw_vocabulary()
        bits, distance = learner.step(step)
        if (step + 1) % _TOLD == 0:
            tell(
                f"step {step + 1} of {options.steps}, {bits:.4f} bits per byte, "
                f"distance of rows {distance:.4f}"
            )
    return learner.network.cpu().eval()


class _Vocabulary:
    """A vocabulary that was learnt, against the old one."""

    def __init__(
        self, tokenizer: Tokenizer, speller: Speller, draw: random.Random, options: Any, most: int
    ) -> None:
        self.tokenizer = tokenizer
        size = tokenizer.get_vocab_size()
        table = byte_of_character()
        tokens = [bytes(table[c] for c in tokenizer.id_to_token(i) or "") for i in range(size)]
        self.lengths = torch.tensor([len(token) for token in tokens])
        copies, self.predicted, self.pieces, truths = [], [], [], []
        spelled = speller.spell(tokens)
        for token_id, (token, pieces) in enumerate(zip(tokens, spelled, strict=True)):
            own = speller.id_of(token)
            if own is not None and len(token) > 1 and draw.random() < options.hidden_share:
                cut = draw.randrange(1, len(token))
                halves = speller.spell([token[:cut], token[cut:]])
                pieces = [*halves[0], *halves[1]] if all(halves) else []
            elif own is not None:
                copies.append((token_id, own))
                continue
            if pieces and len(pieces) <= most:
                self.predicted.append(token_id)
                self.pieces.append(pieces)
                truths.append(-1 if own is None else own)
            else:
                copies.append((token_id, -1 if own is None else own))
        self.copies = torch.tensor(copies).reshape(-1, 2)
        self.truths = torch.tensor(truths, dtype=torch.int64)


class _Learner:
    """The frozen model, the network and its optimizer."""

    def __init__(self, folder: Path, texts: Sequence[str], options: HypernetworkTraining) -> None:
        self._options, self._texts = options, list(texts)
        self._draw = random.Random(options.seed)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = frozen_model(folder, feature="hypernetworks").to(self._device)
        old = build_tokenizer(TokenizerConfig(model=str(folder)))
        self._speller = Speller(old)
        embedding = self._model.get_input_embeddings()
        self._scale = float(getattr(embedding, "embed_scale", 1.0))
        head = self._model.get_output_embeddings().weight
        is_tied = head is embedding.weight
        matrices = [embedding.weight] if is_tied else [embedding.weight, head]
        self._rows = torch.cat([matrix[: old.vocab_size] for matrix in matrices], dim=1)
        config = HypernetworkConfig(
            model=_fingerprint(folder, old.vocab_size, is_tied=is_tied),
            width=embedding.weight.shape[1],
            parts=len(matrices),
            hidden=options.hidden,
            layers=options.layers,
        )
        self.network = Hypernetwork(config).to(self._device)
        self._optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=options.lr, weight_decay=0.01
        )
        self._vocabulary: _Vocabulary | None = None

    def draw_vocabulary(self) -> None:
        """Learn another vocabulary from a random part of the text."""
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self._draw.randint(2 * _BYTES, self._options.vocabulary_size),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        count = max(1, len(self._texts) // self._draw.randint(1, 4))
        tokenizer.train_from_iterator(self._draw.sample(self._texts, count), trainer)
        most = self.network.config.most_pieces
        self._vocabulary = _Vocabulary(tokenizer, self._speller, self._draw, self._options, most)

    def step(self, number: int) -> tuple[float, float]:
        """One step: bits per byte of its texts, and the relative distance of rows."""
        vocabulary = self._vocabulary
        assert vocabulary is not None
        rows, distance = self._new_rows(vocabulary)
        width = self.network.config.width
        ids = self._batch(vocabulary).to(self._device)
        read = rows[:, :width][ids.clamp(min=0)] * self._scale
        hidden = self._model.base_model(
            inputs_embeds=read, attention_mask=(ids >= 0).long()
        ).last_hidden_state
        logits = hidden[:, :-1] @ rows[:, -width:].t()
        labels = ids[:, 1:].masked_fill(ids[:, 1:] < 0, -100)
        nats = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        size = vocabulary.lengths.to(self._device)[labels[labels >= 0]].sum()
        # By bytes, which do not depend on the vocabulary, of which a token has some four.
        loss = 4 * nats / size + self._options.row_weight * distance
        for group in self._optimizer.param_groups:
            group["lr"] = self._options.lr * (1 - number / self._options.steps)
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self._optimizer.step()
        return float(nats / size) / 0.6931471805599453, float(distance)

    def _new_rows(self, vocabulary: _Vocabulary) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, parts D] of all its tokens, and the relative distance of those that are known."""
        mean = self._rows.mean(0, keepdim=True)
        rows = mean.expand(len(vocabulary.lengths), -1).clone()
        copies = vocabulary.copies.to(self._device)
        known = copies[copies[:, 1] >= 0]
        rows[known[:, 0]] = self._rows[known[:, 1]]
        distance = rows.new_zeros(())
        if vocabulary.predicted:
            predicted = self.network(self._rows, padded(vocabulary.pieces, self._device))
            places = torch.tensor(vocabulary.predicted, device=self._device)
            rows = rows.index_copy(0, places, predicted)
            has_truth = (vocabulary.truths >= 0).to(self._device)
            if has_truth.any():
                truth = self._rows[vocabulary.truths.to(self._device)[has_truth]]
                off = (predicted[has_truth] - truth).square().mean()
                distance = off / truth.square().mean()
        return rows, distance

    def _batch(self, vocabulary: _Vocabulary) -> torch.Tensor:
        """[B, T] ids of random places in random texts, -1 behind their ends."""
        rows = []
        for _ in range(self._options.batch_size):
            text = self._draw.choice(self._texts)
            start = self._draw.randrange(max(1, len(text) - 4 * self._options.seq_length))
            part = text[start : start + 8 * self._options.seq_length]
            rows.append(vocabulary.tokenizer.encode(part).ids[: self._options.seq_length])
        return padded(rows, torch.device("cpu"))


def _fingerprint(folder: Path, ids: int, *, is_tied: bool) -> str:
    files = CheckpointFiles(folder)
    family = family_of(files)
    names = [family.embedding] if is_tied else [family.embedding, family.head]
    with TensorReader(files) as reader:
        return rows_fingerprint([reader.whole(name) for name in names], ids)

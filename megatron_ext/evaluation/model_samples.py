"""What a student and its teacher write and predict on the same texts, for the page of a run.

Both models read whole texts with the same bytes before each token. Chunks of tokens that spell the
same bytes compare; texts are cut so that both models read them at once. One process.

T tokens of a text, C chunks of it, V columns of a model's vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from megatron.core import parallel_state

from megatron_ext.alignment import TokenAligner
from megatron_ext.alignment.alignment import Alignment
from megatron_ext.alignment.chunk_places import alignment_of
from megatron_ext.alignment.text_tokens import TextTokens
from megatron_ext.distributed.vocab_parallel import VocabShard, log_softmax
from megatron_ext.evaluation.language_model import GenerationOptions, first_id
from megatron_ext.evaluation.megatron_language_model import (
    MegatronLanguageModel,
    ModelOptions,
    groups_for,
    load_mixture,
    open_model,
)
from megatron_ext.evaluation.scored_text import ChunkGroups, ScoredText, TextPredictions, pieces_of
from megatron_ext.teachers.base import InputRows
from megatron_ext.teachers.megatron_teacher import MegatronTeacher
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training.validation import same_tokens

LIKELIEST: Final = 5
"""Likeliest tokens that are kept of each model at each chunk."""
_TEXT_BYTES: Final = 800
_SHOWN_TEXTS: Final = 3
_PROMPT_BYTES: Final = 120
COMPLETIONS: Final = GenerationOptions(max_new_tokens=48, temperature=0.7, top_p=0.95)
_TILE_ROWS: Final = 128


def model_samples(
    student: Path, teacher: Path, texts: Sequence[str], *, prompts: Sequence[str] = ()
) -> dict[str, Any]:
    """Samples of both models as plain values for ``samples.json``.

    ``completions`` are drawn behind each prompt, with the same random numbers for both models.
    ``texts`` are the longest texts in pieces of whole characters, each with its bytes, both
    surprises in nats (None outside of chunks), and the likeliest tokens of both with their
    probabilities in per cent. ``groups`` are sums over all texts by script, class and kind of
    chunk.

    Args:
        student: A checkpoint, as ``find_checkpoint`` takes it.
        teacher: Likewise.
        texts: The texts; of each the first 800 bytes are read.
        prompts: Beginnings to complete; those of the texts where none is given.

    Raises:
        MegatronExtError: A model or its tokenizer cannot be read.
    """
    options = ModelOptions(micro_batch_size=1)
    groups = groups_for(options)
    opened = [open_model(path, options) for path in (student, teacher)]
    tokenizers = opened[0].tokenizer, opened[1].tokenizer
    aligned = sorted(_aligned_texts(texts, tokenizers), key=lambda one: -len(one.text.encode()))
    given = list(prompts) or [_beginning(one.text) for one in aligned[:_SHOWN_TEXTS]]
    # Half of what the shorter model reads is left for the prompt.
    room = min(each.model.seq_length for each in opened) // 2
    drawn = replace(COMPLETIONS, max_new_tokens=min(COMPLETIONS.max_new_tokens, max(1, room)))
    completions, predictions = [], []
    try:
        for side, each in enumerate(opened):
            model = load_mixture([each], options, groups)
            ids = [one.tokens[side].ids.tolist() for one in aligned]
            predictions.append([_predictions(model, of_text) for of_text in ids])
            completions.append(model.generate(given, drawn))
            # One at a time: both need not fit.
            del model
    finally:
        parallel_state.destroy_model_parallel()
    chunk_groups = ChunkGroups(same_tokens(*tokenizers, device=torch.device("cpu")).numpy())
    shown: list[list[list[Any]]] = []
    for one, *both in zip(aligned, *predictions, strict=True):
        scored = _scored(one, both)
        if scored is not None:
            chunk_groups.add(one.text, scored)
            if len(shown) < _SHOWN_TEXTS:
                shown.append(list(pieces_of(one.text, scored, tokenizers)))
    pairs = zip(given, *completions, strict=True)
    return {
        "completions": [dict(zip(("prompt", "student", "teacher"), p, strict=True)) for p in pairs],
        "texts": shown,
        "groups": chunk_groups.rows(),
    }


@dataclass(frozen=True, slots=True)
class _AlignedText:
    """A text with the tokens of both models."""

    text: str
    tokens: tuple[TextTokens, TextTokens]
    alignment: Alignment


def _aligned_texts(
    texts: Sequence[str], tokenizers: tuple[MegatronTokenizerText, MegatronTokenizerText]
) -> Iterator[_AlignedText]:
    """The beginnings of the texts; those that a tokenizer makes no token of are left out."""
    aligner = TokenAligner(*tokenizers)
    for text in texts:
        begin = _first_bytes(text, _TEXT_BYTES)
        if not begin.strip():
            continue
        student, teacher = (side.encode([begin]) for side in (aligner.student, aligner.teacher))
        if len(student.ids) and len(teacher.ids):
            alignment = alignment_of(*aligner.align_joined(student, teacher))
            yield _AlignedText(begin, (student, teacher), alignment)


def _first_bytes(text: str, count: int) -> str:
    return text.encode(errors="ignore")[:count].decode(errors="ignore")


def _beginning(text: str) -> str:
    """The beginning of a text, up to the end of a word where there is one."""
    begin = _first_bytes(text, _PROMPT_BYTES)
    words = begin.rpartition(" ")[0]
    return words if words.strip() and begin != text else begin


@torch.no_grad()
def _predictions(model: MegatronLanguageModel, ids: Sequence[int]) -> TextPredictions:
    """Predictions of as many of the ids as the model reads at once."""
    bos = model.tokenizer.bos_id if model.adds_bos else None
    first = first_id(model.tokenizer) if bos is None else bos
    row = [first, *ids][: model.max_length + 1]
    scorer = model.scorer
    tokens = torch.tensor([row[:-1]], device=scorer.groups.device)
    labels = torch.tensor(row[1:], device=scorer.groups.device)
    if not len(labels):
        empty = np.zeros((0, LIKELIEST))
        return TextPredictions(np.zeros(0), empty.astype(np.int64), empty)
    positions = torch.arange(len(labels), device=tokens.device)[None]
    teacher = MegatronTeacher(scorer.models.chunks, shard=scorer.shard)
    (target,) = teacher.targets([InputRows(tokens, positions)])
    assert target.hidden is not None
    parts = [
        _of_rows(target.logits_of(target.hidden[0, of]), labels[of], scorer.shard)
        for of in (slice(i, i + _TILE_ROWS) for i in range(0, len(labels), _TILE_ROWS))
    ]
    nats, likeliest, probabilities = (
        torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True)
    )
    return TextPredictions(nats, likeliest, probabilities)


def _of_rows(
    logits: torch.Tensor, labels: torch.Tensor, shard: VocabShard
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Nats [T] of the labels, and the likeliest columns and their probabilities [T, 5]."""
    log_probs = log_softmax(logits, shard)[:, : shard.vocab_size].double()
    best = log_probs.topk(LIKELIEST, dim=1)
    return -log_probs.gather(1, labels[:, None])[:, 0], best.indices, best.values.exp()


def _scored(one: _AlignedText, predictions: Sequence[TextPredictions]) -> ScoredText | None:
    """The chunks that both models have read whole; None where there is none."""
    whole = one.alignment
    spans = whole.student_spans, whole.teacher_spans
    is_read = np.logical_and(
        *(span[:, 1] <= len(side.nats) for span, side in zip(spans, predictions, strict=True))
    )
    count = int(is_read.sum())
    if not count:
        return None
    fence = np.concatenate([np.zeros(1, np.int64), np.asarray(one.tokens[0].ends, np.int64)])
    sums = [np.concatenate([[0.0], np.cumsum(side.nats)]) for side in predictions]
    cut = [span[:count] for span in spans]
    nats = [total[span[:, 1]] - total[span[:, 0]] for total, span in zip(sums, cut, strict=True)]
    return ScoredText(
        whole.chunk_class[:count],
        fence[cut[0]],
        (nats[0], nats[1]),
        (cut[0][:, 0].astype(np.int64), cut[1][:, 0].astype(np.int64)),
        predictions,
    )

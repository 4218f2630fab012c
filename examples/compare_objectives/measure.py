"""What students know of held-out text, and how far they agree with their teacher.

    python examples/compare_objectives/measure.py TEXT RUN...

Prints one JSON object: ``teacher``, ``unigram`` and each run as it was named. Of a model:

- ``bits_per_byte``: see ``docs/quickstart.md``.
- ``bits_per_digit``: of numerals, which are runs of two digits or more in a window: ``-log2 p`` of
  the tokens that cover them, over their digits. A token may hold the space before them too.
- ``numeral_probability``: mean over numerals of the probability of all of their tokens.
- ``first_choices``: different tokens that are most probable somewhere.
- ``agreement``: share of chunks of one token a side for which student and teacher find the same
  token most probable, of those that both vocabularies have.

``unigram`` is what the student's text says without any model: frequencies of its tokens, plus one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ext.alignment import ChunkClass
from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.data.aligner import PackedSample
from megatron_ext.distributed import process_groups
from megatron_ext.distributed.layout import Layout, launched_processes
from megatron_ext.losses import VocabularyMatch
from megatron_ext.projection import SparseProjection
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.build import padded_vocab_size
from megatron_ext.training.checkpoints.checkpoint import load_weights
from megatron_ext.training.checkpoints.folder import find_checkpoint
from megatron_ext.training.checkpoints.tokenizer import check_same_tokenizer
from megatron_ext.training.configuration.config import TEACHER, DistillConfig, ModelConfig
from megatron_ext.training.configuration.yaml_file import read_config_file
from megatron_ext.training.inputs import Inputs, read_inputs
from megatron_ext.training.megatron_models import cpu_megatron
from megatron_ext.training.megatron_models.models import build_gpt_model, freeze
from megatron_ext.training.microbatch import Microbatch, TokenBatch
from megatron_ext.typed_mapping import build_config

NUMERAL = re.compile(rb"[0-9]{2,}")
BATCH_SIZE = 4


class Comparison:
    """Held-out rows with the teacher's first choices, for one student after the other."""

    def __init__(self, config: DistillConfig) -> None:
        assert config.teacher is not None
        cpu_megatron.install()
        self.config = config
        self.groups = process_groups.initialize(Layout())
        self.inputs: Inputs = read_inputs(config, world_size=launched_processes())
        assert self.inputs.data.held_out is not None
        self.held_out = self.inputs.data.held_out
        teacher = self.inputs.teachers[TEACHER].tokenizer
        projection = SparseProjection.from_tokenizers(self.inputs.tokenizer, teacher)
        self.match = VocabularyMatch.from_partition(projection.partition())
        self.teacher, self.choices = self._of_teacher(
            self._model(config.teacher.model, teacher, config.teacher.checkpoint)
        )

    def of_unigrams(self) -> dict[str, Any]:
        """The frequencies of the student's tokens in its own training text."""
        counts = torch.ones(self.inputs.tokenizer.vocab_size)
        for source in self.inputs.data.sources:
            for block in range(source.dataset.block_count(0)):
                for sample in source.dataset[0, block].samples:
                    for piece in sample.pieces:
                        ids = torch.from_numpy(piece.student_ids).long()
                        counts += torch.bincount(ids, minlength=len(counts))
        scores = Scores(self.inputs.tokenizer)
        for samples, batch in self._batches():
            logits = counts.log().expand(*batch.student.labels.shape, -1)
            scores.add_student(samples, logits, batch)
        return scores.summary()

    def of_student(self, run: Path) -> dict[str, Any]:
        """What a student knows, and how far it agrees with the teacher."""
        student = self._model(self.config.student, self.inputs.tokenizer, str(run / "checkpoints"))
        scores = Scores(self.inputs.tokenizer)
        agreed = compared = 0
        for (samples, batch), expected in zip(self._batches(), self.choices, strict=True):
            logits = self._logits(student, batch.student, self.inputs.tokenizer)
            scores.add_student(samples, logits, batch)
            rows = batch.sides.alignments[TEACHER].student_spans[_singles(batch), 0]
            choices = logits.flatten(0, 1)[rows][:, self.match.common_student].argmax(dim=-1)
            agreed += int((choices == expected).sum())
            compared += len(expected)
        share = agreed / max(compared, 1)
        return scores.summary() | {"agreement": share, "one_to_one_chunks": compared}

    def _of_teacher(self, teacher: Any) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """The teacher's own numbers, and for each batch its choice at chunks of one token a side,
        as an index into the tokens that both have."""
        tokenizer = self.inputs.teachers[TEACHER].tokenizer
        scores, choices = Scores(self.inputs.tokenizer), []
        for samples, batch in self._batches():
            logits = self._logits(teacher, batch.teachers[TEACHER], tokenizer)
            scores.add_teacher(samples, logits, batch)
            rows = batch.sides.alignments[TEACHER].teacher_spans[_singles(batch), 0]
            common = logits.flatten(0, 1)[rows][:, self.match.common_teacher]
            choices.append(common.argmax(dim=-1))
        return scores.summary(), choices

    def _batches(self) -> Iterator[tuple[list[PackedSample], Microbatch]]:
        """All held-out rows, in order."""
        for first in range(0, len(self.held_out.samples), BATCH_SIZE):
            samples = self.held_out.samples[first : first + BATCH_SIZE]
            yield samples, Microbatch.of(self.held_out.dataset.collator(samples), {})

    def _model(self, model: ModelConfig, tokenizer: MegatronTokenizerText, checkpoint: str) -> Any:
        """A trained model."""
        gpt = build_gpt_model(
            model,
            padded_vocab_size=padded_vocab_size(
                tokenizer.vocab_size,
                make_vocab_size_divisible_by=model.make_vocab_size_divisible_by,
                tensor_model_parallel_size=1,
            ),
            parallel=self.config.parallel,
            training=self.config.training,
            groups=self.groups,
        )
        folder = find_checkpoint(checkpoint, where="the model to measure")
        check_same_tokenizer(folder, tokenizer)
        load_weights(folder, [gpt])
        return freeze([gpt])[0]

    def _logits(
        self, model: Any, side: TokenBatch, tokenizer: MegatronTokenizerText
    ) -> torch.Tensor:
        """[B, T, V], without the columns that pad the vocabulary."""
        logits: torch.Tensor = model(side.tokens, side.position_ids, None)
        return logits[..., : tokenizer.vocab_size].float()


class Scores:
    """Sums of ``-log2 p`` over text and over numerals, and what was most probable."""

    def __init__(self, tokenizer: MegatronTokenizerText) -> None:
        self._tokenizer = tokenizer
        self._bits = self._digit_bits = self._probability = 0.0
        self._bytes = self._digits = self._numerals = 0
        self._first_choices: set[int] = set()

    def add_student(
        self, samples: list[PackedSample], logits: torch.Tensor, batch: Microbatch
    ) -> None:
        """One batch of the student, rows of one text each. logits [B, T, V]."""
        for row, sample in zip(self._bits_of(logits, batch.student.labels), samples, strict=True):
            (piece,) = sample.pieces
            widths = piece.student_widths
            self._add_row(row[: len(widths)], widths, self._text(sample))

    def add_teacher(
        self, samples: list[PackedSample], logits: torch.Tensor, batch: Microbatch
    ) -> None:
        """One batch of the teacher, by chunks: the student's tokens say how wide they are."""
        alignment = batch.sides.alignments[TEACHER]
        bits = self._bits_of(logits, batch.teachers[TEACHER].labels)
        ids = (alignment.student_chunk_id.numpy(), alignment.teacher_chunk_id.numpy())
        for row, sample in enumerate(samples):
            (piece,) = sample.pieces
            student, teacher = (side[row] for side in ids)
            first = student[student >= 0].min(initial=0)
            count = int(student.max(initial=-1)) + 1 - int(first)
            own = student[: len(piece.student_widths)]
            widths = np.bincount(
                own[own >= 0] - first, piece.student_widths[own >= 0], minlength=count
            )
            cost = np.bincount(
                teacher[teacher >= 0] - first, bits[row][teacher >= 0], minlength=count
            )
            self._bits += float(bits[row][teacher < 0].sum())
            self._add_row(cost, widths.astype(np.int64), self._text(sample))

    def _bits_of(self, logits: torch.Tensor, labels: torch.Tensor) -> np.ndarray[Any, Any]:
        """[B, T] ``-log2 p`` of labels, 0 where there is none."""
        trained = labels != IGNORE_INDEX
        self._first_choices.update(logits.argmax(dim=-1)[trained].tolist())
        log_probs = torch.log_softmax(logits, dim=-1)
        nats = -log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        bits: np.ndarray[Any, Any] = torch.where(trained, nats, 0.0).double().numpy() / math.log(2)
        return bits

    def _add_row(
        self, bits: np.ndarray[Any, Any], widths: np.ndarray[Any, Any], text: bytes
    ) -> None:
        """Pieces of a text with their costs and widths in bytes, in order."""
        stops = np.cumsum(widths)
        self._bits += float(bits.sum())
        self._bytes += int(widths.sum())
        for numeral in NUMERAL.finditer(text):
            start, stop = numeral.span()
            covers = (stops > start) & (stops - widths < stop)
            cost = float(bits[covers].sum())
            self._digit_bits += cost
            self._digits += stop - start
            self._numerals += 1
            self._probability += 2.0**-cost

    def _text(self, sample: PackedSample) -> bytes:
        ids = [int(i) for piece in sample.pieces for i in piece.student_ids]
        return b"".join(self._tokenizer.token_bytes(i) or b"" for i in ids)

    def summary(self) -> dict[str, Any]:
        """See the top of this file."""
        return {
            "bits_per_byte": self._bits / self._bytes,
            "bytes": self._bytes,
            "bits_per_digit": self._digit_bits / max(self._digits, 1),
            "digits": self._digits,
            "numerals": self._numerals,
            "numeral_probability": self._probability / max(self._numerals, 1),
            "first_choices": len(self._first_choices),
        }


def main() -> None:
    """Measure the runs of the command line, in its order, on its text."""
    text, *runs = sys.argv[1:]
    values, where = read_config_file(Path(runs[0]) / "config.yaml")
    with torch.no_grad(), contextlib.redirect_stdout(sys.stderr):
        config = build_config(DistillConfig, values, where)
        data = dataclasses.replace(config.data, validation=(text,))
        # Not the folder of a run: it would be held to the text that it was started with.
        folder = str(Path(runs[0]).parent)
        comparison = Comparison(dataclasses.replace(config, data=data, run_dir=folder))
        measured = {"teacher": comparison.teacher, "unigram": comparison.of_unigrams()}
        for run in runs:
            measured[run] = comparison.of_student(Path(run))
    print(json.dumps(measured))


def _singles(batch: Microbatch) -> torch.Tensor:
    return batch.sides.alignments[TEACHER].chunk_class == ChunkClass.ONE_TO_ONE


if __name__ == "__main__":
    main()

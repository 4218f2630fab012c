"""What students know of held-out text, and how far they agree with their teacher.

    python examples/compare_objectives/measure.py RUNS NAME...

Prints one JSON object, by run:

- ``bits_per_byte``: see ``docs/quickstart.md``.
- ``bits_per_digit``: of numerals, which are runs of two digits or more in a window: ``-log2 p`` of
  the tokens that cover them, over their digits.
- ``numeral_probability``: mean over numerals of the probability of all of their tokens.
- ``agreement``: share of chunks of one token a side for which both models find the same token most
  probable, of those that both vocabularies have.
- ``projected_agreement``: share of all chunks for which student and teacher put most mass on the
  same token of the teacher's, the student's prediction being carried over by the projection; see
  ``top1_agreement`` of ``projected_kl``. For a student that has learnt little this is 0: the space
  begins the spelling of so many of its tokens that it gets the most of any even distribution.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.alignment.chunk_class import ChunkClass
from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.distributed import process_groups
from megatron_ext.distributed.layout import launched_processes
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses import (
    DistillationInputs,
    ProjectedKLLoss,
    ProjectionShard,
    TeacherTargets,
    VocabularyMatch,
)
from megatron_ext.projection import SparseProjection
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.build import padded_vocab_size
from megatron_ext.training import cpu_megatron
from megatron_ext.training.checkpoint import load_weights
from megatron_ext.training.checkpoint_folder import find_checkpoint
from megatron_ext.training.collator import Batch, collate
from megatron_ext.training.config import DistillConfig, ModelConfig
from megatron_ext.training.config_file import build_config, read_config_file
from megatron_ext.training.datasets import Window, WindowDataset
from megatron_ext.training.inputs import Inputs, read_inputs
from megatron_ext.training.models import build_gpt_model, freeze

NUMERAL = re.compile(rb"[0-9]{2,}")
BATCH_SIZE = 4


class Comparison:
    """Held-out windows with the teacher's predictions, for one student after the other."""

    def __init__(self, config: DistillConfig) -> None:
        assert config.teacher is not None
        cpu_megatron.install()
        self.config = config
        self.groups = process_groups.initialize(
            tensor_model_parallel_size=1, pipeline_model_parallel_size=1
        )
        self.inputs: Inputs = read_inputs(config, world_size=launched_processes())
        assert self.inputs.teacher_tokenizer is not None
        data = self.inputs.validation_data
        assert isinstance(data, WindowDataset)
        self.windows = [data[index] for index in range(len(data))]
        teacher = self.inputs.teacher_tokenizer
        self.teacher_shard = _shard(teacher, config.teacher.model)
        self.teacher = self.model(config.teacher.model, teacher, config.teacher.checkpoint)
        self.student_shard = _shard(self.inputs.tokenizer, config.student)
        projection = SparseProjection.from_tokenizers(self.inputs.tokenizer, teacher)
        self.match = VocabularyMatch.from_partition(projection.partition())
        self.projection = ProjectionShard.from_projection(
            projection,
            student_shard=self.student_shard,
            teacher_shard=self.teacher_shard,
        )
        self.projected_kl = ProjectedKLLoss()

    def model(self, model: ModelConfig, tokenizer: MegatronTokenizerText, checkpoint: str) -> Any:
        """A trained model."""
        gpt = build_gpt_model(
            model,
            padded_vocab_size=_shard(tokenizer, model).stop,
            parallel=self.config.parallel,
            training=self.config.training,
            groups=self.groups,
        )
        folder = find_checkpoint(checkpoint, where="the model to measure")
        load_weights(folder, gpt, fingerprint=tokenizer.fingerprint())
        return freeze(gpt)

    def batches(self) -> Iterator[tuple[list[Window], Batch]]:
        """All windows, in order."""
        assert self.config.teacher is not None
        for first in range(0, len(self.windows), BATCH_SIZE):
            windows = self.windows[first : first + BATCH_SIZE]
            yield (
                windows,
                collate(
                    windows,
                    student_length=self.config.student.seq_length,
                    teacher_length=self.config.teacher.model.seq_length,
                    text_only=True,
                ),
            )

    def of_teacher(self) -> dict[str, Any]:
        """The teacher's own numbers."""
        scores = Scores(self.inputs.tokenizer)
        for windows, batch in self.batches():
            side = batch.teacher
            assert side is not None
            logits = self.teacher(side.tokens, side.position_ids, None)
            scores.add(windows, "teacher", logits, side.labels, self.teacher_shard)
        return scores.summary()

    def of_student(self, run: Path) -> dict[str, Any]:
        """A student's, and how far it agrees with the teacher."""
        student = self.model(self.config.student, self.inputs.tokenizer, str(run / "checkpoints"))
        scores = Scores(self.inputs.tokenizer)
        agreed, projected = Share(), Share()
        for windows, batch in self.batches():
            assert batch.teacher is not None
            logits = student(batch.student.tokens, batch.student.position_ids, None)
            scores.add(windows, "student", logits, batch.student.labels, self.student_shard)
            targets = TeacherTargets(
                kind="logits",
                shard=self.teacher_shard,
                logits=self.teacher(batch.teacher.tokens, batch.teacher.position_ids, None),
            )
            agreed.add(*self._same_choice(batch.alignment, logits, targets.to_logits()))
            output = self.projected_kl(
                DistillationInputs(
                    student_logits=logits,
                    student_shard=self.student_shard,
                    labels=batch.student.labels,
                    teacher=targets,
                    alignment=batch.alignment,
                    projection=self.projection,
                )
            )
            projected.add(*output.metrics["top1_agreement"])
        return scores.summary() | {
            "agreement": agreed.value,
            "one_to_one_chunks": agreed.count,
            "projected_agreement": projected.value,
            "chunks": projected.count,
        }

    def _same_choice(
        self, alignment: AlignmentBatch | None, student: torch.Tensor, teacher: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Chunks of one token a side on whose best common token both agree, and all of them."""
        assert alignment is not None
        singles = alignment.chunk_class == ChunkClass.ONE_TO_ONE
        choices = [
            logits.flatten(0, 1)[spans[singles, 0]][:, common].argmax(dim=-1)
            for logits, spans, common in (
                (student, alignment.student_spans, self.match.common_student),
                (teacher, alignment.teacher_spans, self.match.common_teacher),
            )
        ]
        return (choices[0] == choices[1]).sum(), singles.sum()


class Share:
    """So many of so many."""

    def __init__(self) -> None:
        self._sum = 0.0
        self.count = 0

    def add(self, part: torch.Tensor, of: torch.Tensor) -> None:
        """One batch's."""
        self._sum += float(part)
        self.count += int(of)

    @property
    def value(self) -> float:
        """Of everything that was added; 0 of nothing."""
        return self._sum / max(self.count, 1)


class Scores:
    """Sums of ``-log2 p`` over text and over numerals."""

    def __init__(self, tokenizer: MegatronTokenizerText) -> None:
        self._tokenizer = tokenizer
        self._bits = self._digit_bits = self._probability = 0.0
        self._bytes = self._digits = self._numerals = 0

    def add(
        self,
        windows: list[Window],
        side: str,
        logits: torch.Tensor,
        labels: torch.Tensor,
        shard: VocabShard,
    ) -> None:
        """One batch of one model. logits [B, T, V], labels [B, T]."""
        log_probs = torch.log_softmax(logits[..., : shard.vocab_size].float(), dim=-1)
        trained = labels != IGNORE_INDEX
        nats = -log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        bits = torch.where(trained, nats, 0.0).double().numpy() / math.log(2)
        for row, window in zip(bits, windows, strict=True):
            sequence = getattr(window, side)
            widths = sequence.text_bytes[1:]
            stops = np.cumsum(widths)
            row = row[: len(widths)]
            self._bits += float(row.sum())
            self._bytes += int(widths.sum())
            for numeral in NUMERAL.finditer(self._text(window)):
                start, stop = numeral.span()
                covers = (stops > start) & (stops - widths < stop)
                cost = float(row[covers].sum())
                self._digit_bits += cost
                self._digits += stop - start
                self._numerals += 1
                self._probability += 2.0**-cost

    def _text(self, window: Window) -> bytes:
        ids = window.student.ids[1:][window.student.text_bytes[1:] > 0]
        return b"".join(self._tokenizer.token_bytes(int(i)) or b"" for i in ids)

    def summary(self) -> dict[str, Any]:
        """See the top of this file."""
        return {
            "bits_per_byte": self._bits / self._bytes,
            "bytes": self._bytes,
            "bits_per_digit": self._digit_bits / max(self._digits, 1),
            "digits": self._digits,
            "numerals": self._numerals,
            "numeral_probability": self._probability / max(self._numerals, 1),
        }


def main() -> None:
    """Measure the runs that are named, in the order of the command line."""
    root, *names = sys.argv[1:]
    values, where = read_config_file(Path(root) / names[0] / "config.yaml")
    with torch.no_grad(), contextlib.redirect_stdout(sys.stderr):
        comparison = Comparison(build_config(DistillConfig, values, where))
        measured = {"teacher": comparison.of_teacher()}
        for name in names:
            measured[name] = comparison.of_student(Path(root) / name)
    print(json.dumps(measured))


def _shard(tokenizer: MegatronTokenizerText, model: ModelConfig) -> VocabShard:
    size = padded_vocab_size(
        tokenizer.vocab_size,
        make_vocab_size_divisible_by=model.make_vocab_size_divisible_by,
        tensor_model_parallel_size=1,
    )
    return VocabShard(start=0, stop=size, vocab_size=tokenizer.vocab_size, group=None)


if __name__ == "__main__":
    main()

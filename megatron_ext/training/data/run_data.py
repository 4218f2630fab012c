"""Everything a run reads besides models: training sources and held-out rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ext.data.collator import CrossTokenizerCollator
from megatron_ext.data.global_batches import GlobalBatches, Replica, WeightedDataset
from megatron_ext.documents.id_tokenizers import IdTokenizers
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training.config import DistillConfig
from megatron_ext.training.data.held_out import HeldOut
from megatron_ext.training.data.sources import (
    held_out_dataset,
    make_collator,
    summary,
    training_sources,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """The same on every rank."""

    collator: CrossTokenizerCollator
    """Of training rows."""

    sources: list[WeightedDataset]

    held_out: HeldOut | None

    config: DistillConfig

    @classmethod
    def read(
        cls,
        config: DistillConfig,
        tokenizer: MegatronTokenizerText,
        teachers: Mapping[str, tuple[MegatronTokenizerText, int]],
    ) -> RunData:
        """Index the files, and tokenize what is held out.

        Args:
            config: The run.
            tokenizer: The student's.
            teachers: Tokenizer and sequence length of each teacher by its name.

        Raises:
            MegatronExtError: Files that cannot be read, hold nothing, or fit no row.
        """
        collator = make_collator(config, tokenizer, teachers)
        known = IdTokenizers(
            student=tokenizer,
            teachers={name: its for name, (its, _) in teachers.items()},
            named=config.data.indexed_tokenizer,
        )
        sources = training_sources(config, collator, known)
        held_out = None
        if config.data.validation:
            # Without an end-of-document token labels are the text, whose bytes are counted.
            reader = make_collator(config, tokenizer, teachers, append_eod=False)
            held_out = HeldOut(
                held_out_dataset(config, reader, known),
                global_batch_size=config.training.global_batch_size,
            )
        return cls(collator=collator, sources=sources, held_out=held_out, config=config)

    @property
    def has_student_ids(self) -> bool:
        """Whether documents to train on are kept as ids of the student's tokenizer."""
        return any(source.dataset.documents.has_student_ids for source in self.sources)

    def batches(self, replica: Replica) -> GlobalBatches:
        """Global batches from the first one on, as a replica reads them."""
        workers = self.config.data.num_workers
        options: dict[str, Any] = {"num_workers": workers}
        if workers:
            options["multiprocessing_context"] = "forkserver"
        return GlobalBatches(
            self.sources,
            global_batch_size=self.config.training.global_batch_size,
            replica=replica,
            seed=self.config.training.seed,
            **options,
        )

    def summary(self) -> dict[str, Any]:
        """What a user should know of the text; plain values."""
        held_out = self.held_out
        return {
            "train": summary([source.dataset for source in self.sources]),
            "validation": held_out
            and {
                **summary([held_out.dataset]),
                "rows": len(held_out.samples),
                "dropped_bytes": held_out.dropped_bytes,
                "refused": [document._asdict() for document in held_out.refused],
            },
        }

"""Prompts of a corpus as rows that are still to be completed, in the order of a data set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_ext.data.aligner import PackedSample
from megatron_ext.data.packed_dataset import PackedBlock, PackedTextDataset
from megatron_ext.data.sampled_text import Prompt, SampledTexts
from megatron_ext.errors import MegatronExtError


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSample(PackedSample):
    """A row whose text begins with a prompt; it has no pieces before it is completed."""

    prompt: Prompt

    place: int
    """Number of the prompt over all epochs, which seeds its completion."""


class PromptDataset(PackedTextDataset):
    """Blocks of prompts, a row each.

    Args:
        reader: Reads the prompts.
        options: Arguments of ``PackedTextDataset``.
    """

    def __init__(self, reader: SampledTexts, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._reader = reader

    @property
    def identity(self) -> dict[str, object]:
        """Plain values on which the prompts depend, except for the tokenizers."""
        return {**super().identity, "prompts": True}

    def __getitem__(self, key: tuple[int, int]) -> PackedBlock:
        """Read the prompts of a block.

        Args:
            key: Epoch, and number of the block in it.

        Raises:
            DataError: A file has changed.
            MegatronExtError: A prompt that cannot be read, with file and row.
        """
        numbers = self.order.documents(*key).tolist()
        contents, refused = self._contents(sorted(numbers))
        samples: list[PackedSample] = []
        for number in numbers:
            if number not in contents:
                continue
            try:
                prompt = self._reader.prompt(contents[number])
            except MegatronExtError as error:
                refused.append(self._refused(number, error))
                continue
            place = key[0] * len(self.documents) + number
            samples.append(PromptSample((), prompt=prompt, place=place))
        return PackedBlock(tuple(samples), 0, tuple(refused))

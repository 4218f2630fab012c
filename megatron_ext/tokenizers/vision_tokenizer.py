"""Text tokenizers that know images: the multimodal capability, over any library."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ext.tokenizers.text_tokenizer import MegatronTokenizerText

IMAGE_TOKEN = "<image>"


class MegatronTokenizerVision(MegatronTokenizerText):
    """A text tokenizer whose vocabulary holds image tokens.

    Args:
        path: As for ``MegatronTokenizerText``.
        config: As for ``MegatronTokenizerText``.
        special_tokens: Names to add to the vocabulary.
        image_tag_type: Tags around each image: ``nvlm``, ``internvl`` or none.
        force_system_message: Replace the system message by the prompt format's own.
        options: As for ``MegatronTokenizerText``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        config: Mapping[str, Any],
        *,
        special_tokens: Sequence[str] = (IMAGE_TOKEN,),
        image_tag_type: str = "",
        force_system_message: bool = False,
        **options: Any,
    ) -> None:
        names = dict.fromkeys([*options.pop("additional_special_tokens", ()), *special_tokens])
        super().__init__(path, config, additional_special_tokens=tuple(names), **options)
        self.image_tag_type = image_tag_type
        self.force_system_message = force_system_message

    @property
    def mode(self) -> str:
        return "multimodal"

    def constructor_options(self) -> dict[str, Any]:
        # The names to add are among the library's additional ones by now.
        return super().constructor_options() | {
            "special_tokens": (),
            "image_tag_type": self.image_tag_type,
            "force_system_message": self.force_system_message,
        }

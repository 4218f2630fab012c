"""``MegatronTokenizerVision``: a tokenizer of any library with an image token and image tags.

Shape letters: T tokens, K positions.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.conversation import (
    DEFAULT_IMAGE_TOKEN_INDEX,
    IMAGE_TOKEN,
    Conversation,
    ImageTags,
    image_tags,
)
from megatron_ext.conversation.images import with_images
from megatron_ext.conversation.message import checked_messages
from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.base import ParseSpecial
from megatron_ext.tokenizers.libraries import library_of
from megatron_ext.tokenizers.text_offsets import characters_of
from megatron_ext.tokenizers.text_tokenizer import MegatronTokenizerText
from megatron_ext.tokenizers.token_bytes import character_starts, utf8
from megatron_ext.tokenizers.token_ids import ByteEnds, IdArray, checked_texts, integers


@dataclass(frozen=True, eq=False)
class TaggedText:
    """A text with image tags, and the map of its bytes to the original."""

    text: str
    """The text with its tags."""
    here: NDArray[np.int64]
    """[K] positions in its bytes, ascending; all bytes between two are original or inserted."""
    there: NDArray[np.int64]
    """[K] the same positions in the bytes of the original."""

    @classmethod
    def of(cls, text: str, tags: ImageTags) -> TaggedText:
        """``text`` with ``tags`` around each image; existing tags are kept."""
        whole = tags(IMAGE_TOKEN)
        before, after = len(tags.before), len(tags.after)
        here, there = [0], [0]
        done = 0
        for match in re.finditer(f"{re.escape(whole)}|{re.escape(IMAGE_TOKEN)}", text):
            if match[0] == whole:
                continue
            begin = there[-1] + len(text[done : match.start()].encode())
            end = begin + len(IMAGE_TOKEN)
            put_in = here[-1] - there[-1]
            there += [begin, begin, end, end]
            here += [begin + put_in, begin + put_in + before]
            here += [end + put_in + before, end + put_in + before + after]
            done = match.end()
        rest = len(text[done:].encode())
        there.append(there[-1] + rest)
        here.append(here[-1] + rest)
        return cls(tags(text), np.array(here), np.array(there))

    def original_ends(self, ends: ByteEnds) -> ByteEnds:
        """Byte ends of tokens of ``text`` in the original [T]; inserted bytes cover nothing."""
        return np.rint(np.interp(ends, self.here, self.there)).astype(np.int64)


class MegatronTokenizerVision(MegatronTokenizerText):
    """A text tokenizer whose vocabulary holds an image token.

    ``<image>`` in a text or in a message becomes its id, with the tags of the image tag type around
    it; other special tokens are parsed as in a ``MegatronTokenizerText``. In a null tokenizer,
    whose vocabulary is numbers, its id is -200.

    Args:
        path: As for ``MegatronTokenizerText``.
        config: As for ``MegatronTokenizerText``.
        special_tokens: Names to add to the vocabulary; ``<image>`` is always added. Existing ones
            keep their ids.
        image_tag_type: Tags around each image: ``nvlm`` (``<Image>``), ``internvl`` (``<img>``) or
            none. Each is one id where the vocabulary has it as a special token.
        force_system_message: Replace the system message by the prompt format's own.
        options: As for ``MegatronTokenizerText``.

    Raises:
        ConfigError: As for ``MegatronTokenizerText``, the image tag type is unknown, or the prompt
            format has no system message to force.
        TokenizerError: As for ``MegatronTokenizerText``.
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
        self.image_tag_type = image_tag_type
        self.force_system_message = force_system_message
        self._tags = image_tags(image_tag_type)
        self.apply_image_tag = self._tags
        names = [*(options.pop("additional_special_tokens", None) or ()), *special_tokens]
        if library_of(config.get("library")).library == "null":
            if image_tag_type:
                raise TokenizerError(
                    "a null tokenizer, whose texts are numbers, has no tags for images",
                    got=repr(image_tag_type),
                    fix="leave image_tag_type out",
                    where="image_tag_type",
                )
            names = [name for name in names if name != IMAGE_TOKEN]
            options = {"add_eod": True, **options}
            options["placeholders"] = {IMAGE_TOKEN: DEFAULT_IMAGE_TOKEN_INDEX}
        else:
            names = [*names, IMAGE_TOKEN]
        options["additional_special_tokens"] = tuple(dict.fromkeys(names))
        super().__init__(path, config, **options)

    def _set_prompt_format(self, given: str | None) -> None:
        super()._set_prompt_format(given)
        if self.prompt_config is not None:
            self.prompt_config = replace(
                self.prompt_config,
                force_system_message=self.force_system_message,
                validate_no_image_in_assistant=True,
            )

    @property
    def mode(self) -> str:
        return "multimodal"

    @property
    def image_token_id(self) -> int:
        """Id of ``<image>``."""
        return self.token_to_id(IMAGE_TOKEN)

    # Text and ids.

    @property
    def _read(self) -> ParseSpecial:
        """Special tokens that are parsed in a text."""
        tagged = (self._tags.before, IMAGE_TOKEN, self._tags.after)
        return True if self.parse_special_tokens else frozenset(filter(None, tagged))

    def _tagged(self, text: str) -> str:
        # Checked before tags are inserted, so that errors name places in the original.
        utf8(text)
        return self._tags(text)

    def text_to_ids(self, text: str) -> list[int]:
        """Ids of ``text`` with tags around its images."""
        return self._tokenizer.text_to_ids(self._tagged(text), parse_special=self._read)

    def text_to_ids_batch(self, texts: Sequence[str]) -> list[IdArray]:
        """``text_to_ids`` of many texts, in parallel inside the library where it can."""
        tagged = [self._tagged(text) for text in checked_texts(texts)]
        return self._tokenizer.text_to_ids_batch(tagged, parse_special=self._read)

    def text_to_flat_ids(self, texts: Sequence[str]) -> tuple[IdArray, ByteEnds]:
        """Ids [N] of all texts, and the offsets [D + 1] of each text's ids."""
        tagged = [self._tagged(text) for text in checked_texts(texts)]
        return self._tokenizer.text_to_flat_ids(tagged, parse_special=self._read)

    def encode_with_byte_ends(
        self, text: str, *, parse_special: bool | None = None
    ) -> tuple[IdArray, ByteEnds]:
        """Ids [T] of ``text``, and their byte ends [T] in ``text.encode()``.

        Inserted image tags cover nothing.
        """
        utf8(text)
        tagged = TaggedText.of(text, self._tags)
        ids, ends = self._tokenizer.encode_with_byte_ends(
            tagged.text, parse_special=parse_special or self._read
        )
        return ids, tagged.original_ends(ends)

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        """Index of the character of ``text`` in which each token begins [T]."""
        encoded_ids, ends = self.encode_with_byte_ends(text)
        if encoded_ids.tolist() != integers(ids).tolist():
            return super().offsets(ids, text)
        return characters_of(character_starts(utf8(text)), ends)

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of ``ids``; -200 is an image, and other negative ids (padding) are dropped."""
        image = self.image_token_id
        mapped = [image if i == DEFAULT_IMAGE_TOKEN_INDEX else i for i in integers(ids).tolist()]
        shown = [i for i in mapped if i >= 0 or i == image]
        return super().detokenize(shown, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Conversation,
        chat_template: str | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **options: Any,
    ) -> Any:
        """As for a ``MegatronTokenizerText``, with images in the messages."""
        messages = enumerate(checked_messages(conversation))
        return super().apply_chat_template(
            [with_images(message, i, self._tags) for i, message in messages],
            chat_template,
            tokenize=tokenize,
            add_generation_prompt=add_generation_prompt,
            **options,
        )

    # Vocabulary.

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int]:
        """Id of a token or ids of several; a null tokenizer takes several in one string.

        Raises:
            TokenizerError: The vocabulary lacks a token.
        """
        if isinstance(tokens, str) and self.library == "null" and len(tokens.split()) != 1:
            tokens = tokens.split()
        try:
            if isinstance(tokens, str):
                return self.token_to_id(tokens.strip() if self.library == "null" else tokens)
            return [self.token_to_id(token) for token in tokens]
        except KeyError as error:
            raise TokenizerError(
                "the vocabulary has no such token",
                got=repr(error.args[0]),
                fix="add it to special_tokens",
            ) from None

    def get_special_tokens(self) -> dict[str, int]:
        """Id of every control token by its name."""
        named = [i for i in range(self.vocab_size) if self.is_control(i) and self.id_to_token(i)]
        ids = [*named, *({self.image_token_id} - set(named))]
        return {self.id_to_token(token_id): token_id for token_id in ids}

    # Identity.

    def constructor_options(self) -> dict[str, Any]:
        # The library's additional special tokens contain the names to add already.
        return super().constructor_options() | {
            "special_tokens": (),
            "image_tag_type": self.image_tag_type,
            "force_system_message": self.force_system_message,
        }

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """Key of Megatron's dataset cache."""
        identifiers = super().unique_identifiers
        identifiers["image_tag_type"] = self.image_tag_type
        if self.force_system_message:
            identifiers["force_system_message"] = "True"
        return identifiers

"""A text with tags around its images, and where its bytes are in the text without them.

Shape letters: T tokens, K positions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.conversation import IMAGE_TOKEN, ImageTags
from megatron_ext.tokenizers.token_ids import ByteEnds


@dataclass(frozen=True, eq=False)
class TaggedText:
    """What ``ImageTags`` makes of a text."""

    text: str
    """The text with its tags."""
    here: NDArray[np.int64]
    """[K] positions in its bytes, ascending; what is between two was there or was put in."""
    there: NDArray[np.int64]
    """[K] the same positions in the bytes of the original."""

    @classmethod
    def of(cls, text: str, tags: ImageTags) -> TaggedText:
        """``text`` with ``tags`` around each image; those that are there already stay."""
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
        """Where tokens of ``text`` end in the original [T]; what was put in covers nothing."""
        return np.rint(np.interp(ends, self.here, self.there)).astype(np.int64)

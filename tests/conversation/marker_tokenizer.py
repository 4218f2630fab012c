"""A tokenizer of bytes that knows all markers of a template as control tokens."""

import re
from collections.abc import Sequence

from tests.conversation.byte_tokenizer import ByteTokenizer

_MARKER = re.compile(
    "|".join(
        (
            r"<\|[^|<> {}]+\|>",
            r"<｜[^｜<> {}]+｜>",
            r"</?[\w:]+>",
            r"\[/?[A-Z_]{3,}\]",
            r"\]~!?b[\]\[]",
            r"\[e~\[",
        )
    )
)
"""What looks like a marker in the source of a template."""

_ROLES = ("<s>", "</s>", "<unk>", "<pad>")


class MarkerTokenizer(ByteTokenizer):
    """``ByteTokenizer`` whose control tokens are what looks like markers in a template.

    Args:
        source: A template, which becomes the tokenizer's own.
        markers: More names of control tokens, which the template puts together.
    """

    def __init__(self, source: str, markers: Sequence[str] = ()) -> None:
        names = sorted({*_MARKER.findall(source), *markers, *_ROLES})
        super().__init__(source, control_tokens=names)

"""A tokenizer whose pieces a test chooses: the longest piece that fits comes first."""

import numpy as np

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.token_bytes import utf8
from tests.projection.greedy_tokenizer import GreedyTokenizer


class PieceTokenizer(GreedyTokenizer):
    """Id 0 is the unknown token, for a character that no piece begins with.

    Args:
        pieces: Text or bytes of the ids from 1 on.
        refused: A text that holds it is refused.
        skips: White space alone gives no token.
    """

    unk_id = 0

    def __init__(self, *pieces, refused=None, skips=False):
        super().__init__([b"", *(p.encode() if isinstance(p, str) else p for p in pieces)])
        self.refused = refused
        self.skips = skips

    def text_to_ids(self, text):
        return self.encode_with_byte_ends(text)[0].tolist()

    def text_to_flat_ids(self, texts):
        rows = [self.encode_with_byte_ends(text)[0] for text in texts]
        ids = np.concatenate([np.zeros(0, np.int32), *rows])
        return ids, np.cumsum([0, *map(len, rows)])

    def encode_with_byte_ends(self, text, *, parse_special=False):
        raw = utf8(text)
        if self.refused is not None and self.refused in text:
            raise TokenizerError(f"the text holds {self.refused}")
        ids, ends, at = [], [], 0
        while at < len(raw) and not (self.skips and text.isspace()):
            token_id, stop = self._longest(raw, at)
            if stop is None:
                stop = at + 1
                while stop < len(raw) and raw[stop] & 0xC0 == 0x80:
                    stop += 1
            ids.append(token_id)
            ends.append(stop)
            at = stop
        return np.array(ids, np.int32), np.array(ends, np.int64)

    def token_bytes(self, token_id):
        return super().token_bytes(token_id) or None

    def id_to_token(self, token_id):
        return super().id_to_token(token_id) or "<unk>"

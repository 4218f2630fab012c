"""A tokenizer whose pieces a test chooses: the longest piece that fits comes first."""

import hashlib
from itertools import accumulate

import numpy as np

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.token_bytes import utf8


class PieceTokenizer:
    """Id 0 is the unknown token, for a character that no piece begins with.

    Args:
        pieces: Text or bytes of the ids from 1 on.
        refused: A text that holds it is refused.
        skips: White space alone gives no token.
    """

    bos_id = eos_id = pad_id = None
    unk_id = 0

    def __init__(self, *pieces, refused=None, skips=False):
        self.pieces = [b"", *(p.encode() if isinstance(p, str) else p for p in pieces)]
        self.refused = refused
        self.skips = skips

    @property
    def vocab_size(self):
        return len(self.pieces)

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
        ids, widths, at = [], [], 0
        while at < len(raw) and not (self.skips and text.isspace()):
            fitting = [i for i, p in enumerate(self.pieces) if p and raw.startswith(p, at)]
            best = max(fitting, key=lambda i: len(self.pieces[i]), default=0)
            width = len(self.pieces[best])
            if not best:
                width = 1
                while at + width < len(raw) and raw[at + width] & 0xC0 == 0x80:
                    width += 1
            ids.append(best)
            widths.append(width)
            at += width
        return np.array(ids, np.int32), np.array(list(accumulate(widths)), np.int64)

    def byte_ends(self, ids):
        return np.cumsum([len(self.pieces[i]) for i in ids])

    def token_bytes(self, token_id):
        return self.pieces[token_id] or None

    def token_to_id(self, token):
        return self.pieces.index(token.encode())

    def id_to_token(self, token_id):
        return self.pieces[token_id].decode(errors="replace") or "<unk>"

    def fingerprint(self):
        return hashlib.sha256(repr(self.pieces).encode()).hexdigest()

"""A tokenizer small enough to read: longest match from the left over a list of tokens."""

import hashlib

import numpy as np


class GreedyTokenizer:
    """A ``ByteTokenizer``. Ids in the order of ``tokens``; a str is a control token of that name.

    Of ids with equal bytes it emits the last. A byte that its tokens cannot spell becomes the
    unknown id if it has one. A dummy prefix is a space before every text.
    """

    bos_id = eos_id = pad_id = unk_id = None

    def __init__(self, tokens, *, dummy_prefix=False, **control_names):
        self._tokens = list(tokens)
        self._emitted = {token: i for i, token in enumerate(tokens) if isinstance(token, bytes)}
        self._prefix = b" " if dummy_prefix else b""
        for role, name in control_names.items():
            setattr(self, f"{role}_id", self._tokens.index(name))

    @property
    def vocab_size(self):
        return len(self._tokens)

    def text_to_ids(self, text):
        raw, ids, at = self._prefix + text.encode(), [], 0
        while at < len(raw):
            token_id, stop = self._longest(raw, at)
            ids.append(token_id)
            at = stop or at + 1
        return [token_id for token_id in ids if token_id is not None]

    def _longest(self, raw, at):
        """Id and end of the longest token at a place; the unknown id and None where none fits."""
        stops = (stop for stop in range(len(raw), at, -1) if raw[at:stop] in self._emitted)
        stop = next(stops, None)
        return (self.unk_id if stop is None else self._emitted[raw[at:stop]]), stop

    def text_to_ids_batch(self, texts):
        return [np.array(self.text_to_ids(text), np.int32) for text in texts]

    def ids_to_text(self, ids, *, skip_special_tokens=False):
        joined = b"".join(self.token_bytes(i) or b"" for i in ids)
        return joined.removeprefix(self._prefix).decode(errors="replace")

    def encode_with_byte_ends(self, text, *, parse_special=False):
        ids = self.text_to_ids(text)
        return np.array(ids, np.int32), self.byte_ends(ids)

    def token_bytes(self, token_id):
        token = self._tokens[token_id]
        return token if isinstance(token, bytes) else None

    def byte_ends(self, ids):
        ends = np.cumsum([len(self.token_bytes(i) or b"") for i in ids], dtype=np.int64)
        return np.maximum(ends - len(self._prefix), 0)

    def token_to_id(self, token):
        return {self.id_to_token(i): i for i in range(self.vocab_size)}[token]

    def id_to_token(self, token_id):
        token = self._tokens[token_id]
        return token if isinstance(token, str) else token.decode(errors="backslashreplace")

    def fingerprint(self):
        return hashlib.sha256(repr(self._tokens).encode()).hexdigest()


def every_byte():
    return [bytes([byte]) for byte in range(256)]

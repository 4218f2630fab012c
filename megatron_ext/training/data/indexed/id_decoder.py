"""Ids of one tokenizer to the text that they stand for. D documents, N ids."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.token_bytes import TokenBytes
from megatron_ext.tokenizers.token_ids import IdArray

RawIds = NDArray[np.integer[Any]]


class Measured(NamedTuple):
    """What documents hold without what begins and ends them."""

    sizes: NDArray[np.int64]
    """[D] bytes."""

    has_content: NDArray[np.bool_]
    """[D] whether there is a byte or a control token in it."""


class IdDecoder:
    """Decodes documents, by the bytes of each id.

    A BOS that begins a document and an EOD that ends it are no part of it: a run puts its own. The
    space that a SentencePiece vocabulary puts before every text is left out, as decoding does.

    Args:
        tokenizer: What made the ids. It can be sent to another process with this.
    """

    def __init__(self, tokenizer: MegatronTokenizerText) -> None:
        self.tokenizer = tokenizer

    def content(self, ids: IdArray) -> IdArray:
        """``ids`` [N] of a document without the BOS that begins it and the EOD that ends it."""
        bos, eod = self.tokenizer.bos_id, self.tokenizer.eod
        if bos is not None and len(ids) and ids[0] == bos:
            ids = ids[1:]
        if eod is not None and len(ids) and ids[-1] == eod:
            ids = ids[:-1]
        return ids

    def text(self, content: IdArray) -> str:
        """The text that a document's ``content`` [N] spells.

        Raises:
            TokenizerError: A control token is among it, or its bytes are no UTF-8; said is which.
        """
        controls = np.flatnonzero(self._is_control[content])
        if len(controls):
            token_id = int(content[controls[0]])
            raise TokenizerError(
                "the document holds a control token",
                got=f"{self.tokenizer.id_to_token(token_id)!r}, id {token_id}, as its token "
                f"{controls[0] + 1}",
                expected="ids of text, and at most an EOD behind them",
            )
        spelled = self._table.join(content).tobytes()
        if len(content) and self._begins_with_own_space(content[:1])[0]:
            spelled = spelled[1:]
        try:
            return spelled.decode()
        except UnicodeDecodeError as error:
            raise TokenizerError(
                "the ids of the document spell no UTF-8",
                got=f"0x{spelled[error.start]:02x} at byte {error.start} of {len(spelled)}",
            ) from None

    def first_unknown(self, ids: RawIds) -> int | None:
        """Where in ``ids`` the first one is that the vocabulary does not have, if any is."""
        is_unknown = (ids < 0) | (ids >= len(self._table))
        return int(is_unknown.argmax()) if is_unknown.any() else None

    def measure(self, ids: RawIds, bounds: NDArray[np.int64]) -> Measured:
        """The documents between ``bounds`` [D + 1] of ``ids`` [N], which are all known."""
        begins, ends = bounds[:-1].copy(), bounds[1:].copy()
        for token_id, edges, shift in (
            (self.tokenizer.bos_id, begins, 1),
            (self.tokenizer.eod, ends, -1),
        ):
            filled = np.flatnonzero(begins < ends)
            at = edges[filled] - (shift < 0)
            if token_id is not None:
                edges[filled[ids[at] == token_id]] += shift
        sizes = _sums(self._table.lengths[ids], begins, ends)
        filled = np.flatnonzero(begins < ends)
        sizes[filled] -= self._begins_with_own_space(ids[begins[filled]])
        has_control = _sums(self._is_control[ids], begins, ends) > 0
        return Measured(sizes, (sizes > 0) | has_control)

    def _begins_with_own_space(self, first: RawIds) -> NDArray[np.bool_]:
        """Whether texts that begin with these ids begin with a space that is not theirs."""
        return self._table.starts_with_space[first] & self._puts_space

    @cached_property
    def _puts_space(self) -> bool:
        spaced = np.flatnonzero(self._table.starts_with_space)
        if not len(spaced):
            return False
        first = int(spaced[0])
        return int(self.tokenizer.byte_ends([first])[0]) < int(self._table.lengths[first])

    @cached_property
    def _table(self) -> TokenBytes:
        return TokenBytes.of(self.tokenizer)

    @cached_property
    def _is_control(self) -> NDArray[np.bool_]:
        """[V] ids that no ordinary text gives."""
        ids = range(self.tokenizer.vocab_size)
        return np.fromiter(map(self.tokenizer.is_control, ids), np.bool_, len(ids))

    def __getstate__(self) -> dict[str, Any]:
        # Quicker to make again than to send.
        return {"tokenizer": self.tokenizer}


def _sums(
    values: NDArray[Any], begins: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.int64]:
    """[D] sum of ``values`` [N] from each of ``begins`` to its end."""
    totals = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
    sums: NDArray[np.int64] = totals[ends] - totals[begins]
    return sums

"""Encoder of batches: by gigatoken where it is proven equal to the library, else by the library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_ext.errors import MissingDependencyError, TokenizerError
from megatron_ext.tokenizers.config import Engine
from megatron_ext.tokenizers.engine.gigatoken_engine import (
    FlatIds,
    GigatokenEngine,
    flat_ids,
    interleave,
)
from megatron_ext.tokenizers.engine.proof import Reference, Unproven, prove
from megatron_ext.tokenizers.token_bytes import TokenBytes, utf8

_WORTH_BUILDING = 1 << 20
"""Bytes of text after which ``auto`` builds the engine, which takes about a second."""


class FastEncoder:
    """Encoder of batches of text in which special tokens are ordinary text.

    An adapter of a library makes it with two of its own methods, so that copies in other processes
    rebuild their engine there:

        FastEncoder(
            engine,
            build=self._build_engine,     # () -> huggingface_engine(self._text_only.to_str(), file)
            reference=self._encode_batch,
            table=self._table,
            pieces=self._pieces,
            where=file,
        )

    The engine is built at the first batch; with ``auto``, when enough text has come for it to pay.
    It is then proven against the library (``proof``). Texts with unproven characters go to the
    library.

    Args:
        choice: ``reference`` never uses the engine, ``gigatoken`` always, ``auto`` where it can.
        build: Builds the engine, or raises the reason why it cannot be built.
        reference: Encodes texts with the library itself.
        table: Bytes of each id.
        pieces: Display string of each id.
        where: The file of the tokenizer, for errors.
    """

    def __init__(
        self,
        choice: Engine,
        *,
        build: Callable[[], GigatokenEngine],
        reference: Reference,
        table: TokenBytes,
        pieces: Sequence[str],
        where: object,
    ) -> None:
        self._choice = choice
        self._build = build
        self._reference = reference
        self._table = table
        self._pieces = pieces
        self._where = where
        self._engine: GigatokenEngine | None = None
        self._unproven: Unproven | None = None
        self._refusal: str | None = None
        self._seen_bytes = 0

    @property
    def refusal(self) -> str | None:
        """Reason why ``auto`` does not use the engine, in one line; None where it may."""
        return self._refusal

    @property
    def is_fast(self) -> bool:
        """Whether the engine is built, proven and in use."""
        return self._engine is not None

    @property
    def unproven(self) -> Unproven | None:
        """Characters and names that send a text to the library; None before the proof."""
        return self._unproven

    def encode_batch(self, texts: Sequence[str]) -> FlatIds:
        """Concatenated ids of D texts [N] int32, and their offsets [D + 1] int64.

        Raises:
            TokenizerError: A text holds a lone surrogate; or the engine was asked for by name and
                cannot be used.
            MissingDependencyError: The engine was asked for by name and is not installed.
        """
        documents = [utf8(text) for text in texts]
        return self.encode_documents(texts, documents, self._reference)

    def encode_documents(
        self, texts: Sequence[str], documents: Sequence[bytes], reference: Reference
    ) -> FlatIds:
        """``encode_batch`` of texts whose UTF-8 has been computed already.

        Args:
            reference: Encodes texts with the library itself.
        """
        engine = self._engine_for(sum(map(len, documents)))
        if engine is None:
            return flat_ids(reference(texts))
        assert self._unproven is not None
        aside = self._unproven.texts_with(texts)
        if not aside:
            return engine.encode(documents)
        apart = set(aside)
        return interleave(
            engine.encode([raw for i, raw in enumerate(documents) if i not in apart]),
            flat_ids(reference([texts[i] for i in aside])),
            aside,
        )

    def prepare(self) -> None:
        """Build and prove the engine now, for example before a fork, unless it is not to be used.

        Raises:
            TokenizerError: It was asked for by name and cannot be used.
            MissingDependencyError: It was asked for by name and is not installed.
        """
        if self._choice == "reference" or self._refusal is not None or self._engine is not None:
            return
        try:
            engine = self._build()
            if self._unproven is None:
                self._unproven = prove(
                    engine, self._reference, self._table, self._pieces, self._where
                )
            self._engine = engine
        except (TokenizerError, MissingDependencyError) as error:
            if self._choice == "gigatoken":
                raise
            self._refusal = str(error)

    def _engine_for(self, size: int) -> GigatokenEngine | None:
        """The engine to encode a batch of ``size`` bytes with; None for the library."""
        self._seen_bytes += size
        is_worn = self._engine is not None and self._engine.is_worn
        if is_worn:
            self._engine = None
        if is_worn or self._choice == "gigatoken" or self._seen_bytes >= _WORTH_BUILDING:
            self.prepare()
        return self._engine

    def __getstate__(self) -> dict[str, Any]:
        # gigatoken's objects cannot be pickled; the proof holds in other processes too.
        return {**self.__dict__, "_engine": None}

"""Errors of one rank inside a collective operation, kept until all ranks are at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

_ALONE: tuple[tuple[Any, str], ...] = (
    (TorchCommonSaveStrategy, "save_common"),
    (FileSystemWriterAsync, "finish"),
    (serialization, "save_config"),
)
"""What rank 0 alone writes while the others go on to the next collective."""


class NotedErrors:
    """While entered, an error of what rank 0 writes alone in a save is kept instead of raised.

    megatron-core 0.16 raises it on rank 0, where the disk is full, say, and leaves the others
    waiting for that rank in their next collective.
    """

    def __init__(self) -> None:
        self._errors: list[Exception] = []
        self._replaced = ExitStack()

    def __enter__(self) -> NotedErrors:
        for owner, name in _ALONE:
            self._replaced.enter_context(_replaced(owner, name, self._noting))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._replaced.close()

    def first(self) -> str | None:
        """What went wrong first."""
        if not self._errors:
            return None
        error = self._errors[0]
        return (str(error).splitlines() or [type(error).__name__])[0][:300]

    @contextmanager
    def catch(self) -> Iterator[None]:
        """Keep an error of this block too."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            self._errors.append(error)

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any, **named: Any) -> Any:
            with self.catch():
                return function(*arguments, **named)
            return None

        return noting


@contextmanager
def _replaced(
    owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    function = getattr(owner, name)
    setattr(owner, name, make(function))
    try:
        yield
    finally:
        setattr(owner, name, function)

"""Limits of what a chat template may do, and the time that it sees. Templates are untrusted code.

A render has a budget of steps, which bounds its time, and of characters, which bounds its memory.
Everything that a template can repeat consumes from it: iterations, calls, filters, and the text
and lists they make. A step is about a microsecond and at most some hundred bytes. Quantities that
no budget can bound, such as the depth of nesting, have limits of their own.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from math import inf
from typing import Any, Final

SOURCE_LENGTH: Final = 2**17
"""Most characters of a template's source; the longest published ones have some 2**14."""
SOURCE_NODES: Final = 2**14
"""Most nodes of a template's syntax tree; the largest published ones have some 2**10."""
NESTING: Final = 100
"""Most levels of expressions and blocks, of data, and of calls of macros."""
INTEGER_BITS: Final = 2048
"""Most bits of an integer."""
NODES_A_STEP: Final = 4
"""Nodes of the syntax tree that count as one step."""

CALL_STEPS: Final = 4
"""Steps of a call of a macro, besides those of its body."""

_STEPS: Final = 2**18
_STEPS_A_MESSAGE: Final = 2**11
_CHARACTERS_A_STEP: Final = 8
_CHARACTERS: Final = 2**23
_COPIES: Final = 32
"""Texts as long as the whole conversation that a template may make."""


_SCALARS: Final = (bool, int, float, type(None))


class TemplateLimitError(Exception):
    """A limit that a template exceeds. The text says which, as a clause to follow "it"."""


class Budget:
    """Steps and characters that a render may still consume.

    Args:
        scope: The template's variables with ``messages``; the budget is extended to their size.
        steps: Number of steps before the extension.
        characters: Number of characters before the extension.
    """

    __slots__ = ("_scope", "_total", "characters", "depth", "steps")

    def __init__(
        self,
        scope: Mapping[str, Any],
        *,
        steps: float,
        characters: float,
    ) -> None:
        self._scope: Mapping[str, Any] | None = scope
        self._total = (steps, characters)
        self.steps = steps
        self.characters = characters
        self.depth = 0

    def extend_or_refuse(self) -> None:
        """Extend the budget to the size of the conversation, once; raise if that is not enough.

        Raises:
            TemplateLimitError: More is consumed than a conversation of this size can need.
        """
        if self._scope is not None:
            # Measured only here, because hardly any render needs it.
            items, characters = _size(self._scope)
            messages = len(self._scope.get("messages", ()))
            more = messages * _STEPS_A_MESSAGE + characters // _CHARACTERS_A_STEP + items
            self._scope = None
            self._total = (self._total[0] + more, self._total[1] + _COPIES * characters)
            self.steps += more
            self.characters += _COPIES * characters
        if self.steps < 0:
            raise TemplateLimitError(f"takes more than {self._total[0]:,} steps")
        if self.characters < 0:
            raise TemplateLimitError(f"makes more than {self._total[1]:,} characters of text")


_BUDGET: ContextVar[Budget] = ContextVar(
    # Text may be joined outside of a render too.
    "budget",
    default=Budget({}, steps=inf, characters=inf),  # noqa: B039 (infinite: never changes)
)


@contextmanager
def bounded(scope: Mapping[str, Any]) -> Iterator[None]:
    """Limit what this thread renders in the block with the variables ``scope``."""
    token = _BUDGET.set(Budget(scope, steps=_STEPS, characters=_CHARACTERS))
    try:
        yield
    finally:
        _BUDGET.reset(token)


def consume(steps: float, characters: float = 0) -> None:
    """Consume from the budget of the running template, before the work is done.

    Raises:
        TemplateLimitError: The budget is exceeded.
    """
    budget = _BUDGET.get()
    budget.steps -= steps
    budget.characters -= characters
    if budget.steps < 0 or budget.characters < 0:
        budget.extend_or_refuse()


def enter_call() -> None:
    """Count a call of a macro or a recursive loop; ``leave_call`` follows.

    Raises:
        TemplateLimitError: Calls are nested too deeply.
    """
    budget = _BUDGET.get()
    if budget.depth >= NESTING:
        raise TemplateLimitError(f"calls macros more than {NESTING} deep")
    budget.depth += 1


def leave_call() -> None:
    """End the call that was entered last."""
    _BUDGET.get().depth -= 1


def consume_reading(*values: object) -> int:
    """Consume the steps of reading all of ``values`` in full depth.

    A list that holds another one twice counts it twice, because a traversal reads it twice.

    Returns:
        About the number of characters that they print.

    Raises:
        TemplateLimitError: The budget is exceeded, or ``values`` are nested too deeply.
    """
    characters = 0
    level: list[object] = list(values)
    for _ in range(NESTING):
        inner: list[object] = []
        for value in level:
            if isinstance(value, (str, bytes)):
                characters += len(value)
                consume(len(value) >> 10)
            elif not isinstance(value, _SCALARS):
                items = _items(value)
                consume(1 + (len(items) >> 3))
                characters += 4 * len(items) + 8
                inner.extend(items)
        characters += 8 * len(level)
        if not inner:
            return characters
        level = inner
    raise TemplateLimitError(f"nests data more than {NESTING} deep")


def _items(value: object) -> list[Any]:
    """Items of a container; empty for other values."""
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)):
        return list(value)
    try:
        # A Jinja namespace prints its attributes, and gives no other access to them.
        attributes = object.__getattribute__(value, "_Namespace__attrs")
    except AttributeError:
        return []
    return list(attributes.values())


def _size(scope: Mapping[str, Any]) -> tuple[int, int]:
    """Number of values and of characters in a template's variables, in full depth."""
    items = characters = 0
    level: list[Any] = list(scope.values())
    while level:
        items += len(level)
        characters += sum(len(value) for value in level if isinstance(value, str))
        containers = (value for value in level if isinstance(value, (Mapping, list, tuple)))
        level = [item for container in containers for item in _items(container)]
    return items, characters


_MOMENT: ContextVar[datetime | None] = ContextVar("moment", default=None)


def template_time() -> datetime:
    """Time that ``strftime_now`` of a template formats."""
    moment = _MOMENT.get()
    return datetime.now() if moment is None else moment


@contextmanager
def stopped_at(moment: datetime | None) -> Iterator[None]:
    """Fix the time of templates that this thread renders in the block; None leaves it running.

    A data set whose templates write the date would otherwise hold several dates, and differ from
    run to run.
    """
    token = _MOMENT.set(moment)
    try:
        yield
    finally:
        _MOMENT.reset(token)

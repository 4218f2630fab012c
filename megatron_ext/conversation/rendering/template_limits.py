"""Limits of what a chat template may do, and the time that it sees. Templates are untrusted code.

A render has a budget of steps, which bounds its time, and of characters, which bounds its memory.
Everything that a template can repeat spends from it: iterations, calls, filters, and the text and
lists they make. A step is about a microsecond and at most some hundred bytes. What no budget can
bound, such as the depth of nesting, has a limit of its own.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from math import inf
from typing import Any, Final

SOURCE_LENGTH: Final = 2**17
"""Characters of a template's source; the longest published ones have some 2**14."""
SOURCE_NODES: Final = 2**14
"""Parts of a template's syntax tree; the largest published ones have some 2**10."""
NESTING: Final = 100
"""Levels of a template's expressions and blocks, of the data it handles, and of calls of macros."""
INTEGER_BITS: Final = 2048
"""Size of an integer."""
NODES_A_STEP: Final = 4
"""Parts of the syntax tree that run in one step."""

CALL_STEPS: Final = 4
"""What calling a macro costs, besides what it does."""

_STEPS: Final = 2**18
_STEPS_A_MESSAGE: Final = 2**11
_CHARACTERS_A_STEP: Final = 8
_CHARACTERS: Final = 2**23
_COPIES: Final = 32
"""How often a template may make text as long as the whole conversation."""


_SCALARS: Final = (bool, int, float, type(None))


class TemplateLimitError(Exception):
    """A template does more than it may. The text says what, to follow "it"."""


class Budget:
    """What a render may still spend.

    Args:
        scope: The template's variables, ``messages`` among them. Large ones extend the budget.
        steps: Steps, before any extension.
        characters: Characters, before any extension.
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

    def overdrawn(self) -> None:
        """Extend the budget to the size of the conversation, once; raise if that is not enough.

        Raises:
            TemplateLimitError: More is spent than a conversation of this size can need.
        """
        if self._scope is not None:
            # Measured here, since hardly any render comes to it.
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
    """Let what this thread renders in the block, with the variables ``scope``, spend a budget."""
    token = _BUDGET.set(Budget(scope, steps=_STEPS, characters=_CHARACTERS))
    try:
        yield
    finally:
        _BUDGET.reset(token)


def spend(steps: float, characters: float = 0) -> None:
    """Take from the budget of the running template; call it before the work is done.

    Raises:
        TemplateLimitError: The budget does not hold as much.
    """
    budget = _BUDGET.get()
    budget.steps -= steps
    budget.characters -= characters
    if budget.steps < 0 or budget.characters < 0:
        budget.overdrawn()


def enter_call() -> None:
    """A macro is called, or a loop calls itself; ``leave_call`` follows.

    Raises:
        TemplateLimitError: There are too many calls within one another.
    """
    budget = _BUDGET.get()
    if budget.depth >= NESTING:
        raise TemplateLimitError(f"calls macros more than {NESTING} deep")
    budget.depth += 1


def leave_call() -> None:
    """The call that was entered last is over."""
    _BUDGET.get().depth -= 1


def spend_on(*values: object) -> int:
    """Spend for reading all of ``values``, as deep as they go.

    A list that holds another one twice counts it twice, as whatever walks through it does.

    Returns:
        The characters that they hold, about as many as they print.

    Raises:
        TemplateLimitError: That is too much, or ``values`` are nested too deeply.
    """
    characters = 0
    level: list[object] = list(values)
    for _ in range(NESTING):
        inner: list[object] = []
        for value in level:
            if isinstance(value, (str, bytes)):
                characters += len(value)
                spend(len(value) >> 10)
            elif not isinstance(value, _SCALARS):
                items = _items(value)
                spend(1 + (len(items) >> 3))
                characters += 4 * len(items) + 8
                inner.extend(items)
        characters += 8 * len(level)
        if not inner:
            return characters
        level = inner
    raise TemplateLimitError(f"nests data more than {NESTING} deep")


def _items(value: object) -> list[Any]:
    """What a container holds; nothing where it is none."""
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)):
        return list(value)
    try:
        # A namespace of Jinja prints what it holds, and answers for no other attribute.
        attributes = object.__getattribute__(value, "_Namespace__attrs")
    except AttributeError:
        return []
    return list(attributes.values())


def _size(scope: Mapping[str, Any]) -> tuple[int, int]:
    """Number of values and of characters in a template's variables, however deep."""
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
    """What ``strftime_now`` of a template writes."""
    moment = _MOMENT.get()
    return datetime.now() if moment is None else moment


@contextmanager
def stopped_at(moment: datetime | None) -> Iterator[None]:
    """Let templates that are rendered in the block, by this thread, see ``moment``; None for now.

    A data set whose templates write the date would otherwise hold several of them, and another run
    would give another.
    """
    token = _MOMENT.set(moment)
    try:
        yield
    finally:
        _MOMENT.reset(token)

"""Limits of what a chat template may do, and the time that it sees. Templates are untrusted code.

A render has a budget of steps, which bounds its time, and of characters, which bounds its memory.
A step is about a microsecond and at most some hundred bytes. It is paid in three places:

* the compiler makes each execution of a block pay for the operations that are written in it;
* ``paid`` runs every filter, test, call and operator. It pays for what these are given, in full
  depth, and for what they give; what is not known to be cheaper pays the square of its size;
* text pays as it is made, piece by piece.

Quantities that no budget can bound, such as the depth of nesting, have limits of their own.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Collection,
    ItemsView,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    ValuesView,
)
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from math import inf
from typing import Any, Final, Literal

SOURCE_LENGTH: Final = 2**17
"""Most characters of a template's source; the longest published ones have some 2**14."""
SOURCE_NODES: Final = 2**13
"""Most nodes of a template's syntax tree; the largest published ones have some 2**10."""
NESTING: Final = 100
"""Most levels of expressions and blocks, of data, and of calls of macros."""
INTEGER_BITS: Final = 2048
"""Most bits of an integer."""
NODES_A_STEP: Final = 2
"""Nodes of the syntax tree that count as one step."""

_STEPS: Final = 2**18
_STEPS_A_MESSAGE: Final = 2**12
_CHARACTERS_A_STEP: Final = 8
_CHARACTERS: Final = 2**23
_COPIES: Final = 32
"""Texts as long as the whole conversation that a template may make."""


_SCALARS: Final = (bool, int, float, type(None))
_CONTAINERS: Final = (list, tuple, Mapping, range, KeysView, ValuesView, ItemsView, set, frozenset)

Cost = Literal["none", "each", "length", "product", "square"]
"""Time of an operation, by the size of what it is given.

``none`` does not depend on it, ``each`` takes the items one by one as they are asked for,
``length`` reads all in full depth, ``product`` reads the first operand as often as the texts among
the others are long, and ``square`` can do anything else. Numbers count by their value in it.
"""


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

    def __init__(self, scope: Mapping[str, Any], steps: float, characters: float) -> None:
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
            items, characters = _walk(self._scope.values(), lambda steps: None)
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


# Text may be joined outside of a render too.
_BUDGET: ContextVar[Budget] = ContextVar("budget", default=Budget({}, inf, inf))  # noqa: B039


@contextmanager
def bounded(scope: Mapping[str, Any]) -> Iterator[None]:
    """Limit what this thread renders in the block with the variables ``scope``."""
    token = _BUDGET.set(Budget(scope, _STEPS, _CHARACTERS))
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


def nested(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Result of a call of a macro, a recursive loop or another function of a template.

    Raises:
        TemplateLimitError: Calls are nested too deeply.
    """
    budget = _BUDGET.get()
    if budget.depth >= NESTING:
        raise TemplateLimitError(f"calls macros more than {NESTING} deep")
    budget.depth += 1
    try:
        return function(*args, **kwargs)
    finally:
        budget.depth -= 1


def pay(cost: Cost, operands: Sequence[Any]) -> None:
    """Consume what an operation costs that is given ``operands``.

    Raises:
        TemplateLimitError: The budget is exceeded, or operands are nested too deeply.
    """
    consume(1 + (len(operands) >> 2))
    if cost == "none" or not operands:
        return
    if cost == "each":
        # A text and what is computed lazily consume as their items are taken.
        first = operands[0]
        consume(len(first) if isinstance(first, _CONTAINERS) else 0)
        return
    if cost != "square" and all(isinstance(value, str) for value in operands):
        size = sum([len(value) for value in operands])
        consume(size >> 9)
    else:
        size = consume_reading(*operands)
    if cost == "length":
        return
    texts = sum(len(value) for value in operands[1:] if isinstance(value, (str, bytes)))
    if cost == "product":
        consume(size * texts >> 12)
        return
    widths = sum(abs(value) for value in operands[1:] if isinstance(value, int))
    consume((size + widths) ** 2 >> 12, size * texts + widths)


def consumed(value: Any) -> Any:
    """``value``, a result, once its size is consumed; refuses integers that are too large."""
    kind = type(value)
    if kind is int:
        check_bits(value.bit_length())
    elif isinstance(value, (str, bytes)):
        consume(1, len(value))
    elif isinstance(value, (list, tuple, dict)):
        consume(1 + (len(value) >> 3))
    return value


def check_bits(bits: int) -> None:
    """Refuse an integer of so many bits if they are too many."""
    if bits > INTEGER_BITS:
        raise TemplateLimitError(f"makes an integer of more than {INTEGER_BITS:,} bits")


def consume_reading(*values: object) -> int:
    """Consume the steps of reading all of ``values`` in full depth.

    A list that holds another one twice counts it twice, because a traversal reads it twice.

    Returns:
        About the number of characters that they print.

    Raises:
        TemplateLimitError: The budget is exceeded, or ``values`` are nested too deeply.
    """
    count, characters = _walk(values, consume)
    return characters + 12 * count


def _walk(values: Collection[object], pay_for: Callable[[int], None]) -> tuple[int, int]:
    """Number of values and of characters of ``values``, in full depth."""
    count = characters = 0
    level: Collection[object] = values
    for _ in range(NESTING):
        count += len(level)
        inner: list[object] = []
        for value in level:
            if isinstance(value, (str, bytes)):
                size = len(value)
                characters += size
                if size >= 512:
                    pay_for(size >> 9)
            elif not isinstance(value, _SCALARS):
                items = _items(value)
                pay_for(1 + (len(items) >> 1))
                inner.extend(items)
                if isinstance(value, Mapping):
                    pay_for(len(items) >> 1)
                    inner.extend(value.values())
        if not inner:
            return count, characters
        level = inner
    raise TemplateLimitError(f"nests data more than {NESTING} deep")


def _items(value: object) -> Collection[object]:
    """Items of a container, keys of a mapping; none of other values."""
    if isinstance(value, _CONTAINERS):
        return value
    try:
        # A Jinja namespace prints its attributes, and gives no other access to them.
        return list(object.__getattribute__(value, "_Namespace__attrs").values())
    except AttributeError:
        return ()


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

"""Sandbox in which chat templates run, extended to keep provenance and to enforce limits.

It offers what transformers offers to templates, within limits. It is imported when the first
template is rendered, because it needs Jinja. Provenance is kept in three ways:

* the compiler (``ProvenanceCompiler``) marks every constant as template text, and the turns;
* outputs, macros and set blocks are joined by ``join_turns``;
* filters and calls that return plain text are settled: from one place, of the template, or of
  unknown source.

What a template may do and what it costs is in ``operations``; a source that is too large or too
deep is refused when it is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from types import BuiltinMethodType, MethodType
from typing import Any, Final, NoReturn

from jinja2 import nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace

from megatron_ext.conversation.rendering.jinja_compiler import ProvenanceCompiler
from megatron_ext.conversation.rendering.operations import (
    FILTERS,
    FRAME_ARGUMENTS,
    MAPPING,
    is_allowed,
    paid_filter,
    paid_test,
    pay_method,
)
from megatron_ext.conversation.rendering.provenance import TEMPLATE
from megatron_ext.conversation.rendering.template_limits import (
    NESTING,
    SOURCE_LENGTH,
    SOURCE_NODES,
    consume,
    consume_reading,
    consumed,
    nested,
    pay,
    template_time,
)
from megatron_ext.conversation.rendering.tracked_data import (
    NO_CONTENT,
    JsonStyle,
    TrackedDict,
    TrackedMessage,
    provenance_of,
    settled,
    text_of,
    to_json,
)
from megatron_ext.conversation.rendering.tracked_text import (
    EMPTY,
    TrackedText,
    add,
    as_tracked,
    format_braces,
    join,
    multiply,
    power,
    remainder,
    subtract,
    track,
)
from megatron_ext.conversation.rendering.turn_joiner import (
    GENERATION_BEGINS,
    GENERATION_ENDS,
    PROGRESS,
    GenerationMark,
    TurnMark,
    join_turns,
)

_OTHER_FILES: Final = (nodes.Extends, nodes.FromImport, nodes.Import, nodes.Include)
_TIME_FORMAT_LENGTH: Final = 256
_WIDE_TIME: Final = re.compile(r"%[^a-zA-Z%]*\d")
_CALL_STEPS: Final = 4
"""Steps of a call, besides those of what it runs."""


class GenerationBlocks(Extension):
    """``{% generation %}`` blocks of text that the assistant generates, as in transformers."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        _refuse_jumps(body)
        return [
            _generation_mark(True, line),
            # As in transformers, variables set in the block are local to it.
            nodes.Scope(body, lineno=line),
            _generation_mark(False, line),
        ]


def _generation_mark(opens: bool, line: int) -> nodes.Node:
    method = nodes.EnvironmentAttribute("generation")
    call = nodes.Call(method, [nodes.Const(opens)], [], None, None)
    return nodes.Output([call], lineno=line)


def _refuse_jumps(body: list[nodes.Node]) -> None:
    """Refuse to leave a block by a jump of the loop around it: it would never end."""
    for node in body:
        if isinstance(node, (nodes.Break, nodes.Continue)):
            raise TemplateSyntaxError("a loop goes on within a generation block", node.lineno)
        if not isinstance(node, nodes.For):
            _refuse_jumps(list(node.iter_child_nodes()))


class ProvenanceEnvironment(ImmutableSandboxedEnvironment):
    """The environment of transformers' chat templates, with provenance and bounds."""

    code_generator_class = ProvenanceCompiler
    concat = staticmethod(join_turns)
    intercepted_binops = frozenset({"-", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlocks, loopcontrols],
            finalize=_printed,
            # The optimizer would evaluate constants outside of a render and its step limit.
            optimized=False,
        )
        filters = {**self.filters, **FILTERS}
        self.filters.update({name: paid_filter(name, run) for name, run in filters.items()})
        tests: dict[str, Any] = self.tests
        tests["none"] = _is_none
        tests.update({name: paid_test(name, run) for name, run in tests.items()})
        self.binop_table.update({"-": subtract, "*": multiply, "**": power, "%": remainder})
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        # Random words in any number are of no use to a conversation.
        del self.globals["lipsum"]

    # Reading a template.

    def compile(self, source: Any, *args: Any, **kwargs: Any) -> Any:
        """Jinja's ``compile``, with one type of error for sources that are too large or deep."""
        if isinstance(source, str) and len(source) > SOURCE_LENGTH:
            raise TemplateSyntaxError(f"{len(source):,} characters of at most {SOURCE_LENGTH:,}", 1)
        try:
            return super().compile(source, *args, **kwargs)
        except TemplateSyntaxError:
            raise
        except (RecursionError, MemoryError) as error:
            raise TemplateSyntaxError("blocks or expressions nested too deeply", 1) from error
        except (SyntaxError, ValueError, OverflowError) as error:
            # Python cannot compile it: too many nested blocks, or numbers of too many digits.
            raise TemplateSyntaxError(str(error), 1) from error

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        level: list[nodes.Node] = [tree]
        count = 0
        for _ in range(NESTING):
            count += len(level)
            if count > SOURCE_NODES:
                raise TemplateSyntaxError(f"more than {SOURCE_NODES:,} parts", level[0].lineno)
            for node in level:
                if isinstance(node, _OTHER_FILES):
                    what = type(node).__name__.lower()
                    raise TemplateSyntaxError(f"{what}: a chat template is one file", node.lineno)
            inner = [child for node in level for child in node.iter_child_nodes()]
            if not inner:
                return tree
            level = inner
        raise TemplateSyntaxError(
            f"blocks or expressions nested more than {NESTING} deep", level[0].lineno
        )

    # What compiled templates call.

    @staticmethod
    def template_text(text: str) -> TrackedText:
        """A constant text of the template."""
        return track(text, TEMPLATE)

    @staticmethod
    def concat_values(values: Iterable[object]) -> TrackedText:
        """``a ~ b``: the printed values, concatenated."""
        return join([text_of(value, TEMPLATE) for value in values])

    @staticmethod
    def add_values(values: tuple[Any, ...]) -> Any:
        """``a + b + c``: texts are joined in one call, not pairwise."""
        for value in values:
            if not isinstance(value, str):
                break
        else:
            return join(values)
        total, *rest = values
        for value in rest:
            if isinstance(total, str) and isinstance(value, TrackedDict):
                # Arguments of a call, for a template that takes them as JSON in a text.
                value = to_json(value, JsonStyle(), TEMPLATE)
            total = add(total, value)
        return total

    @staticmethod
    def consume(steps: int) -> None:
        """Consume the steps of one execution of a block."""
        consume(steps)

    @staticmethod
    def turn_begins(context: Context, loop: int, steps: int, value: object) -> str:
        """A mark that a loop has reached a message; empty where it loops over other values."""
        consume(steps)
        if not isinstance(value, TrackedMessage):
            return EMPTY
        message = provenance_of(value).message
        context.parent[PROGRESS].move(loop, message)
        return TurnMark(loop, message)

    @staticmethod
    def turns_end(context: Context, loop: int) -> str:
        """A mark that a loop has ended."""
        context.parent[PROGRESS].move(loop, None)
        return TurnMark(loop, None)

    @staticmethod
    def generation(opens: bool) -> GenerationMark:
        """A mark that a ``{% generation %}`` block begins or ends."""
        return GENERATION_BEGINS if opens else GENERATION_ENDS

    @staticmethod
    def test_begins(steps: int) -> bool:
        """True; a loop is about to test an item."""
        consume(steps)
        return True

    @staticmethod
    def read(value: Any) -> Any:
        """A value that is compared with another, or the key of a mapping."""
        if isinstance(value, str):
            if len(value) >= 512:
                consume(len(value) >> 9)
        elif value is not None and not isinstance(value, (int, float)):
            consume_reading(value)
        return value

    @staticmethod
    def searched(values: Any) -> Any:
        """What is searched for a constant, which is compared with each item alone."""
        if isinstance(values, str):
            consume(len(values) >> 9)
        elif not isinstance(values, dict):
            pay("each", (values,))
        return values

    @staticmethod
    def sliced(value: Any, *bounds: Any) -> Any:
        """``value[start:stop:step]``."""
        for bound in bounds:
            if bound is not None and not isinstance(bound, int):
                raise TypeError("slice indices must be integers or None")
        return consumed(value[slice(*bounds)])

    # What templates ask for. Compiled templates call ``attribute`` and ``item``, and have paid.

    def getattr(self, obj: Any, attribute: str) -> Any:
        """``obj.attribute``, asked for by a filter or a format string."""
        consume(2)
        return self.attribute(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """``obj[argument]``, asked for by a filter or a format string, which may compare it."""
        consume(2)
        return self.read(self.item(obj, argument))

    def attribute(self, obj: Any, attribute: str) -> Any:
        """``obj.attribute``; of a mapping an allowed method, else the item of that name."""
        if isinstance(obj, dict) and attribute not in MAPPING:
            if attribute in obj:
                return obj[attribute]
            if hasattr(dict, attribute):
                return self.unsafe_undefined(obj, attribute)
            return self.undefined(obj=obj, name=attribute)
        if type(obj) is Namespace and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        if type(obj) is not TrackedText and isinstance(obj, str):
            obj = as_tracked(str.__str__(obj))
        return super().getattr(obj, attribute)

    def item(self, obj: Any, argument: Any) -> Any:
        """``obj[argument]``; where there is no such item, the attribute."""
        if isinstance(argument, str):
            if isinstance(obj, TrackedDict) and argument in obj:
                return obj[argument]
        elif not isinstance(argument, int):
            consume_reading(argument)
        if type(obj) is not TrackedText and isinstance(obj, str):
            obj = as_tracked(str.__str__(obj))
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may read the attribute."""
        return is_allowed(obj, attr)

    # What templates call.

    def call(self, __context: Context, __function: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(__function, Macro):
            consume(_CALL_STEPS + len(args) + len(kwargs))
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return nested(__function, __context.eval_ctx, *args, **kwargs)
        if isinstance(__function, (MethodType, BuiltinMethodType)):
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            inputs = [__function.__self__, *args, *kwargs.values()]
            pay_method(__function.__name__, inputs)
            result = __function(*args, **kwargs)
        else:
            # A function, a class, a loop or a block.
            named = [value for name, value in kwargs.items() if name not in FRAME_ARGUMENTS]
            consume(_CALL_STEPS + len(named))
            inputs = [*args, *named]
            pay("length", args if __function is Namespace else inputs)
            result = nested(super().call, __context, __function, *args, **kwargs)
        if isinstance(result, str) and not isinstance(result, TrackedText):
            result = as_tracked(settled(str.__str__(result), inputs))
        return consumed(result)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        checked = super().wrap_str_format(value)
        if checked is None:
            return None
        form = as_tracked(value.__self__)

        def format_tracked(*args: Any, **kwargs: Any) -> str:
            if value.__name__ == "format_map":
                (kwargs,), args = args, ()
            return format_braces(form, args, kwargs, SandboxedFormatter(self))

        return format_tracked


def _is_none(value: object) -> bool:
    return value is None or value is NO_CONTENT


def _printed(value: object) -> str:
    return text_of(value, TEMPLATE)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str.__str__(text_of(message, TEMPLATE)))


def _strftime_now(form: str) -> str:
    if len(form) > _TIME_FORMAT_LENGTH:
        raise ValueError(f"a time format of more than {_TIME_FORMAT_LENGTH} characters")
    if _WIDE_TIME.search(form):
        raise ValueError("a time format with a width")
    return template_time().strftime(form)

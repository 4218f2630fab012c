"""The sandbox in which chat templates run, taught to keep where text came from.

It offers what transformers offers to templates. It is imported when the first template is rendered,
because it needs Jinja. How provenance survives:

* the compiler (``ProvenanceCompiler``) marks every constant as template text, and the turns;
* outputs, macros and set blocks are joined by ``join_turns``;
* filters and calls that return plain text are settled: from one place, of the template, or of
  unknown source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, Final, NoReturn

from jinja2.environment import Environment
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, EvalContext, Node
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from markupsafe import Markup

from megatron_ext.conversation.jinja_compiler import ProvenanceCompiler
from megatron_ext.conversation.provenance import TEMPLATE, in_generation, merged
from megatron_ext.conversation.template_clock import template_time
from megatron_ext.conversation.tracked_data import TrackedMessage, provenance_of, text_of
from megatron_ext.conversation.tracked_filters import FILTERS
from megatron_ext.conversation.tracked_format import format_braces
from megatron_ext.conversation.tracked_sources import settled
from megatron_ext.conversation.tracked_text import TrackedText, as_tracked, join, track
from megatron_ext.conversation.turn_joiner import PROGRESS, TurnMark, join_turns

_FRAME_ARGUMENTS: Final = ("caller", "_loop_vars", "_block_vars")
"""What compiled templates pass to every call beside the template's own arguments."""


class GenerationBlocks(Extension):
    """``{% generation %}``: what the assistant generates, as transformers reads it."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_generated")
        return CallBlock(call, [], [], body).set_lineno(line)

    def _generated(self, caller: Macro) -> TrackedText:
        text = as_tracked(caller())
        runs = ((length, in_generation(provenance)) for length, provenance in text.runs)
        return TrackedText(text, tuple(merged(runs)))


class ProvenanceEnvironment(ImmutableSandboxedEnvironment):
    """The environment of transformers' chat templates, with provenance."""

    code_generator_class = ProvenanceCompiler
    concat = staticmethod(join_turns)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlocks, loopcontrols],
            finalize=_printed,
        )
        self.literals = _Literals()
        filters = {**self.filters, **FILTERS}
        self.filters = {name: _settling(function) for name, function in filters.items()}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    # What compiled templates call.

    @staticmethod
    def concat_values(values: Iterable[object]) -> TrackedText:
        """``a ~ b``: the values as they print, one after another."""
        return join([text_of(value, TEMPLATE) for value in values])

    @staticmethod
    def turn_begins(context: Context, loop: int, value: object) -> str:
        """A mark that a loop has come to a message; nothing where it loops over other things."""
        if not isinstance(value, TrackedMessage):
            return ""
        message = provenance_of(value).message
        context.parent[PROGRESS].move(loop, message)
        return TurnMark(loop, message)

    @staticmethod
    def turns_end(context: Context, loop: int) -> str:
        """A mark that a loop is over."""
        context.parent[PROGRESS].move(loop, None)
        return TurnMark(loop, None)

    # What templates call.

    def call(self, __context: Context, __function: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().call(__context, __function, *args, **kwargs)
        if type(result) is not str:
            return result
        named = [value for name, value in kwargs.items() if name not in _FRAME_ARGUMENTS]
        return settled(result, [getattr(__function, "__self__", ""), *args, *named])

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        checked = super().wrap_str_format(value)
        if checked is None or not isinstance(value.__self__, TrackedText):
            return checked
        form: TrackedText = value.__self__

        def format_tracked(*args: Any, **kwargs: Any) -> str:
            if value.__name__ == "format_map":
                (kwargs,), args = args, ()
            return format_braces(form, args, kwargs, SandboxedFormatter(self))

        return format_tracked


class _Literals(dict[str, TrackedText]):
    """Constants of templates."""

    def __missing__(self, text: str) -> TrackedText:
        return self.setdefault(text, track(text, TEMPLATE))


def _settling(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that says where its plain results come from."""

    @wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if type(result) is not str and not isinstance(result, Markup):
            return result
        inputs = [arg for arg in args if not isinstance(arg, (Environment, EvalContext, Context))]
        return settled(str.__str__(result), [*inputs, *kwargs.values()])

    return filtered


def _printed(value: object) -> str:
    return text_of(value, TEMPLATE)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str.__str__(str(message)))


def _strftime_now(form: str) -> str:
    return template_time().strftime(form)

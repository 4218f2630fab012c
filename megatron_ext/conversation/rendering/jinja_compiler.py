"""Jinja's compiler with provenance and a step limit, and the attributes that a template may read.

The generated code calls methods of ``ProvenanceEnvironment``. Jinja's sandbox refuses attributes
that are known to be dangerous; here all are refused that are not listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.utils import Cycler, Namespace
from markupsafe import Markup

from megatron_ext.conversation.rendering.template_limits import NODES_A_STEP

_CHEAP: Final = (nodes.Const, nodes.Compare, nodes.Not, nodes.Test, nodes.Sub, nodes.Mod)
"""Expressions whose values are never long texts or lists, and constants."""


class ProvenanceCompiler(CodeGenerator):
    """Marks template text and turns, and makes everything that repeats consume steps.

    Texts joined with ``+`` or ``~`` keep their provenance, and are joined in one call.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loops = 0
        self._texts: dict[str, str] = {}
        self._prologues: dict[int, Callable[[Frame], None]] = {}

    # Constants.

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        for block in node.find_all(nodes.Block):
            self._begin_with(block.body, self._steps_prologue(block.body))
        super().visit_Template(node, frame)
        for text, name in self._texts.items():
            self.writeline(f"{name} = environment.template_text({text!r})")

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        self.write(self._constant(node.as_const(frame.eval_ctx)))

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(self._constant(node.data))

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._constant("".join(group))

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        # Other constant expressions are evaluated by the render, within its step limit.
        if not isinstance(node, (nodes.Const, nodes.TemplateData)):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def _constant(self, value: Any) -> str:
        """Code for a constant; a text becomes a variable of the compiled module."""
        if isinstance(value, str):
            return self._texts.setdefault(str.__str__(value), f"text_{len(self._texts)}")
        # The parser makes no other constants; these print as their Python code.
        return str(value) if isinstance(value, float) else repr(value)

    # Expressions.

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self._write_call("concat_values", node.nodes, frame)

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        operands = [node.right]
        left = node.left
        while isinstance(left, nodes.Add):
            operands.append(left.right)
            left = left.left
        self._write_call("add_values", [left, *reversed(operands)], frame)

    def _write_call(self, method: str, operands: Sequence[nodes.Expr], frame: Frame) -> None:
        self.write(f"environment.{method}((")
        for operand in operands:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        is_search = any(operand.op in ("in", "notin") for operand in node.ops)
        is_limited = is_search or not any(isinstance(operand, _CHEAP) for operand in operands)
        expressions: list[nodes.Compare | nodes.Operand] = [node, *node.ops]
        for expression in expressions:
            if is_limited and not isinstance(expression.expr, (*_CHEAP, nodes.List, nodes.Tuple)):
                expression.expr = _call("read", expression.expr)
        super().visit_Compare(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        for item in node.items:
            if not isinstance(item.key, _CHEAP):
                item.key = _call("read", item.key)
        super().visit_Dict(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.sliced(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        if not isinstance(node.node, nodes.EnvironmentAttribute):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        # Only the compiler itself makes such a call: the sandbox need not check it.
        self.write(f"environment.{node.node.name}(")
        for argument in node.args:
            self.visit(argument, frame)
        self.write(")")

    # Output.

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:
        node.nodes = list(_printed(node.nodes))
        super().visit_Output(node, frame)

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_pre(node, frame, finalize)
        else:
            self.write(finalize.src)

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_post(node, frame, finalize)
        else:
            self.write(")")

    # Blocks that can be run again and again.

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        prologue = self._prologues.pop(id(nodes), None)
        if prologue is not None:
            prologue(frame)
        super().blockvisit(nodes, frame)

    def macro_body(self, node: nodes.Macro | nodes.CallBlock, frame: Frame) -> Any:
        self._begin_with(node.body, self._steps_prologue(node.body))
        return super().macro_body(node, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        if node.test is not None:
            node.iter = _call("tested", node.iter)
        if not isinstance(node.target, nodes.Name):
            self._begin_with(node.body, self._steps_prologue(node.body))
            super().visit_For(node, frame)
            return
        self._loops += 1
        loop, name, steps = self._loops, node.target.name, _steps(node.body)

        def begin_turn(inner: Frame) -> None:
            value = inner.symbols.ref(name)
            self.simple_write(f"environment.turn_begins(context, {loop}, {steps}, {value})", inner)

        self._begin_with(node.body, begin_turn)
        super().visit_For(node, frame)
        self.simple_write(f"environment.turns_end(context, {loop})", frame)

    def _begin_with(self, body: list[nodes.Node], prologue: Callable[[Frame], None]) -> None:
        self._prologues[id(body)] = prologue

    def _steps_prologue(self, body: list[nodes.Node]) -> Callable[[Frame], None]:
        steps = _steps(body)
        return lambda frame: self.writeline(f"environment.consume({steps})")


def _printed(expressions: Iterable[nodes.Expr]) -> Iterator[nodes.Expr]:
    """Operands of ``{{ a ~ b }}`` as separate outputs, which print the same."""
    for expression in expressions:
        if isinstance(expression, nodes.Concat):
            yield from _printed(expression.nodes)
        else:
            yield expression


def _call(method: str, argument: nodes.Node) -> nodes.Call:
    """A call of a method of the environment."""
    return nodes.Call(nodes.EnvironmentAttribute(method), [argument], [], None, None)


def _steps(body: Iterable[nodes.Node]) -> int:
    """Steps of one execution of a block, with nested blocks counted once."""
    count = 0
    level = list(body)
    while level:
        count += len(level)
        level = [child for node in level for child in node.iter_child_nodes()]
    return 1 + count // NODES_A_STEP


MAPPING: Final = frozenset({"copy", "get", "items", "keys", "values"})
TEXT: Final = frozenset(
    {
        *("capitalize", "casefold", "lower", "swapcase", "title", "upper"),
        *("center", "expandtabs", "ljust", "rjust", "zfill"),
        *("count", "endswith", "find", "index", "rfind", "rindex", "startswith"),
        *("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower"),
        *("isnumeric", "isprintable", "isspace", "istitle", "isupper"),
        *("join", "partition", "rpartition", "rsplit", "split", "splitlines"),
        *("lstrip", "removeprefix", "removesuffix", "replace", "rstrip", "strip"),
        *("encode", "format", "format_map"),
    }
)
LOOP: Final = frozenset(
    {
        *("changed", "cycle", "depth", "depth0", "first", "index", "index0", "last", "length"),
        *("nextitem", "previtem", "revindex", "revindex0"),
    }
)
_SEQUENCE: Final = frozenset({"copy", "count", "index"})

_ATTRIBUTES: Final[dict[type, frozenset[str]]] = {
    Markup: TEXT,
    str: TEXT,
    bytes: frozenset({"decode"}),
    dict: MAPPING,
    list: _SEQUENCE,
    tuple: _SEQUENCE | {"grouper", "list"},
    range: _SEQUENCE | {"start", "stop", "step"},
    float: frozenset({"is_integer"}),
    LoopContext: LOOP,
    Macro: frozenset({"arguments", "caller", "catch_kwargs", "catch_varargs", "name"}),
    Cycler: frozenset({"current", "next", "reset"}),
}


class _OfType(dict[type, frozenset[str]]):
    """Attributes that a template may read of each type: those listed for it or a base."""

    def __missing__(self, kind: type) -> frozenset[str]:
        listed = (_ATTRIBUTES[base] for base in kind.__mro__ if base in _ATTRIBUTES)
        return self.setdefault(kind, next(listed, frozenset()))


_OF_TYPE: Final = _OfType()


def is_allowed(value: object, name: str) -> bool:
    """Whether a template may read an attribute that ``value`` has."""
    if name.startswith("_"):
        return False
    if value is dict:
        return name == "fromkeys"
    # Namespaces hold values that the template has set; undefined values raise by themselves.
    return isinstance(value, (Namespace, Undefined)) or name in _OF_TYPE[type(value)]

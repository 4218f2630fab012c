"""Jinja's compiler with provenance and limits.

The generated code calls methods of ``ProvenanceEnvironment``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame

from megatron_ext.conversation.rendering.template_limits import INTEGER_BITS, NODES_A_STEP

_CHEAP: Final = (nodes.Const, nodes.Compare, nodes.Not, nodes.Test)
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
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, int) and value.bit_length() > INTEGER_BITS:
            self.fail(f"an integer of more than {INTEGER_BITS:,} bits", node.lineno)
        self.write(self._constant(value))

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
        expressions: list[nodes.Compare | nodes.Operand] = [node, *node.ops]
        is_search = any(operand.op in ("in", "notin") for operand in node.ops)
        if is_search and len(expressions) == 2 and _is_cheap(node.expr):
            if not _is_cheap(node.ops[0].expr):
                node.ops[0].expr = _call("searched", node.ops[0].expr)
        elif is_search or not any(_is_cheap(expression.expr) for expression in expressions):
            for expression in expressions:
                if not _is_cheap(expression.expr):
                    expression.expr = _call("read", expression.expr)
        super().visit_Compare(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        for item in node.items:
            if not _is_cheap(item.key):
                item.key = _call("read", item.key)
        super().visit_Dict(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        bounds = [node.arg]
        if isinstance(node.arg, nodes.Slice):
            empty = nodes.Const(None)
            bounds = [bound or empty for bound in (node.arg.start, node.arg.stop, node.arg.step)]
        self.write(f"environment.{'item' if bounds[0] is node.arg else 'sliced'}(")
        for number, part in enumerate([node.node, *bounds]):
            self.write(", " if number else "")
            self.visit(part, frame)
        self.write(")")

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:
        self.write("environment.attribute(")
        self.visit(node.node, frame)
        self.write(f", {node.attr!r})")

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
        parts = [*node.args, *node.defaults, *node.body]
        self._begin_with(node.body, self._steps_prologue(parts))
        return super().macro_body(node, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        if node.test is not None:
            # Items that the condition leaves out never reach the body.
            begun = _call("test_begins", nodes.Const(_steps([node.test])))
            node.test = nodes.And(begun, node.test)
        if not isinstance(node.target, nodes.Name):
            self._begin_with(node.body, self._steps_prologue([node.target, *node.body]))
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

    def _steps_prologue(self, body: Iterable[nodes.Node]) -> Callable[[Frame], None]:
        steps = _steps(body)
        return lambda frame: self.writeline(f"environment.consume({steps})")


def _printed(expressions: Iterable[nodes.Expr]) -> Iterator[nodes.Expr]:
    """Operands of ``{{ a ~ b }}`` as separate outputs, which print the same."""
    for expression in expressions:
        if isinstance(expression, nodes.Concat):
            yield from _printed(expression.nodes)
        else:
            yield expression


def _is_cheap(node: nodes.Node) -> bool:
    """Whether a value is never a long text or list; so is a list of such as are written."""
    if isinstance(node, (nodes.List, nodes.Tuple)):
        return all(_is_cheap(item) for item in node.items)
    return isinstance(node, _CHEAP)


def _call(method: str, argument: nodes.Node) -> nodes.Call:
    """A call of a method of the environment."""
    return nodes.Call(nodes.EnvironmentAttribute(method), [argument], [], None, None)


def _steps(body: Iterable[nodes.Node]) -> int:
    """Steps of one execution of a block, without those of nested ones that pay by themselves."""
    count = 0
    level = list(body)
    while level:
        # A piece of output is also joined with the others.
        count += len(level) + sum(len(n.nodes) for n in level if isinstance(n, nodes.Output))
        level = [
            child
            for node in level
            for child in node.iter_child_nodes(_BODY if isinstance(node, _PAYING) else None)
        ]
    return 1 + count // NODES_A_STEP


_PAYING: Final = (nodes.Block, nodes.CallBlock, nodes.For, nodes.Macro)
_BODY: Final = ("body",)

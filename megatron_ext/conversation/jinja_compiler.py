"""Jinja's compiler, changed so that a template's output knows where it came from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame


class ProvenanceCompiler(CodeGenerator):
    """Marks constants as template text, joins with ``~`` by provenance, and marks turns.

    The code it writes calls ``literals``, ``concat_values``, ``turn_begins`` and ``turns_end`` of
    the environment.
    """

    _loops = 0

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        self.write(_constant(node.as_const(frame.eval_ctx)))

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(_constant(node.data))

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return _constant("".join(group))

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat_values((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        if not isinstance(node.node, nodes.EnvironmentAttribute):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        # Only the compiler itself makes such a call: the sandbox need not check it.
        self.write(f"environment.{node.node.name}(")
        for argument in node.args:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        if not isinstance(node.target, nodes.Name):
            super().visit_For(node, frame)
            return
        self._loops += 1
        loop = self._loops
        arguments = [
            nodes.ContextReference(),
            nodes.Const(loop),
            nodes.Name(node.target.name, "load"),
        ]
        begins = nodes.EnvironmentAttribute("turn_begins")
        mark = nodes.Output([nodes.Call(begins, arguments, [], None, None)])
        node.body.insert(0, mark.set_lineno(node.lineno).set_environment(self.environment))
        super().visit_For(node, frame)
        self.simple_write(f"environment.turns_end(context, {loop})", frame)


def _constant(value: Any) -> str:
    """Code for a constant, whose texts are template text."""
    if isinstance(value, str):
        return f"environment.literals[{str.__str__(value)!r}]"
    if isinstance(value, list):
        return f"[{', '.join(map(_constant, value))}]"
    if isinstance(value, tuple):
        return f"({''.join(f'{_constant(item)}, ' for item in value)})"
    if isinstance(value, dict):
        rows = (f"{_constant(key)}: {_constant(item)}" for key, item in value.items())
        return f"{{{', '.join(rows)}}}"
    # Jinja folds no other constants than these, whose Python code is what they print.
    return str(value) if isinstance(value, float) else repr(value)

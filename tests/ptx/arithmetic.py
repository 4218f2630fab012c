"""Instructions of arithmetic, as Python of the values of all threads."""

from collections.abc import Callable

import numpy as np

from tests.ptx.code import FLOATS, Code, UnknownInstruction, size_of, word_of
from tests.ptx.program import Instruction

Rule = Callable[[Code, Instruction], None]
RULES: dict[str, Rule] = {}
"""What becomes of an instruction, by the first part of its name."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enter a rule for instructions."""

    def entered(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return entered


def unknown(instruction: Instruction) -> UnknownInstruction:
    """The error of an instruction with no rule."""
    return UnknownInstruction(f"the machine does not know {instruction}")


def _expect(instruction: Instruction, *parts: str) -> None:
    if not {*instruction.name[1:-1]} <= {*parts}:
        raise unknown(instruction)


def _flushing(instruction: Instruction, *values: str) -> list[str]:
    is_flushing = "ftz" in instruction.name
    return [f"flushed({value})" if is_flushing else value for value in values]


_INFIX = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^", "div": "/"}


@rule("add", "sub", "mul", "div", "rem", "and", "or", "xor")
def _binary(code: Code, each: Instruction) -> None:
    name, kind = each.name[0], each.name[-1]
    out, a, b = each.operands
    if "f32" in each.name[:-1] and kind in ("f16", "bf16"):
        code.give(out, f"{code.value(a, kind)} {_INFIX[name]} {code.value(b, 'f32')}", "f32")
        return
    if kind in FLOATS:
        _expect(each, "rn", "ftz", "full", "approx")
        a, b = _flushing(each, code.value(a, kind), code.value(b, kind))
        (value,) = _flushing(each, f"({a} {_INFIX[name]} {b})")
    elif name in ("div", "rem"):
        value = f"quotient({code.value(a, kind)}, {code.value(b, kind)}, {name == 'rem'})"
    elif each.name[1] == "wide":
        return _wide(code, each)
    else:
        _expect(each, "lo")
        value = f"{code.value(a, kind)} {_INFIX[name]} {code.value(b, kind)}"
    code.give(out, value, kind)


@rule("mad")
def _wide(code: Code, each: Instruction) -> None:
    kind, (out, a, b, *c) = each.name[-1], each.operands
    _expect(each, "wide", "lo")
    values = f"{code.value(a, kind)}, {code.value(b, kind)}"
    if each.name[1] == "wide":
        kind = f"{kind[0]}{16 * size_of(kind)}"
    value = f"multiply({values}, dtype={word_of(kind)})"
    code.give(out, value + (f" + {code.value(c[0], kind)}" if c else ""), kind)


@rule("fma")
def _fma(code: Code, each: Instruction) -> None:
    kind, (out, *values) = each.name[-1], each.operands
    _expect(each, "rn", "ftz")
    if kind not in ("f32", "f32x2"):
        raise unknown(each)
    given = _flushing(each, *(code.value(x, kind) for x in values))
    (value,) = _flushing(each, f"fused({', '.join(given)})")
    code.give(out, value, kind)


@rule("ex2")
def _power(code: Code, each: Instruction) -> None:
    out, x = each.operands
    _expect(each, "approx", "ftz")
    (x,) = _flushing(each, code.value(x, each.name[-1]))
    (value,) = _flushing(each, f"exp2({x})")
    code.give(out, value, each.name[-1])


@rule("abs", "neg", "not")
def _unary(code: Code, each: Instruction) -> None:
    kind, (out, x) = each.name[-1], each.operands
    how = {"abs": "abs({})", "neg": "-{}", "not": "~{}"}[each.name[0]]
    _expect(each, "ftz")
    (x,) = _flushing(each, code.value(x, kind))
    code.give(out, how.format(x), kind)


@rule("min", "max")
def _extreme(code: Code, each: Instruction) -> None:
    kind, (out, *given) = each.name[-1], each.operands
    _expect(each, "NaN", "ftz")
    # Without .NaN, the number of a NaN and a number.
    function = each.name[0] + "imum" if kind[0] != "f" or "NaN" in each.name else f"f{each.name[0]}"
    first, *others = _flushing(each, *(code.value(x, kind) for x in given))
    for other in others:
        first = f"{function}({first}, {other})"
    code.give(out, first, kind)


_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_COMPARISONS |= {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_OF_FLOATS = {
    "ne": "({0} < {1}) | ({0} > {1})",
    "equ": "~(({0} < {1}) | ({0} > {1}))",
    "neu": "{0} != {1}",
    "ltu": "~({0} >= {1})",
    "leu": "~({0} > {1})",
    "gtu": "~({0} <= {1})",
    "geu": "~({0} < {1})",
    "num": "~(isnan({0}) | isnan({1}))",
    "nan": "isnan({0}) | isnan({1})",
}
"""Comparisons that differ from those of numbers where one is NaN."""


@rule("setp")
def _compare(code: Code, each: Instruction) -> None:
    kind, how, (out, a, b) = each.name[-1], each.name[1], each.operands
    if {*each.name[2:-1]} - {"ftz"}:
        raise unknown(each)
    values = _flushing(each, code.value(a, kind), code.value(b, kind))
    if kind in (*FLOATS, "bf16") and how in _OF_FLOATS:
        code.give(out, _OF_FLOATS[how].format(*values), "pred")
    else:
        code.give(out, f"{values[0]} {_COMPARISONS[how]} {values[1]}", "pred")


@rule("selp")
def _select(code: Code, each: Instruction) -> None:
    kind, (out, a, b, p) = f"b{8 * size_of(each.name[-1])}", each.operands
    values = code.value(a, kind), code.value(b, kind)
    code.give(out, f"where({code.value(p, 'pred')}, {', '.join(values)})", kind)


@rule("shl", "shr")
def _shift(code: Code, each: Instruction) -> None:
    kind, (out, x, count) = each.name[-1], each.operands
    is_left = each.name[0] == "shl"
    value = code.value(x, kind)
    if count.isdigit() and int(count) < 8 * size_of(kind):
        code.give(out, f"{value} {'<<' if is_left else '>>'} {code.value(count, kind)}", kind)
    else:
        code.give(out, f"shifted({value}, {code.value(count, 'u32')}, {is_left})", kind)


@rule("bfe")
def _field(code: Code, each: Instruction) -> None:
    kind, (out, x, start, length) = each.name[-1], each.operands
    if not (start.isdigit() and length.isdigit()):
        raise unknown(each)
    code.give(out, f"field({code.value(x, kind)}, {start}, {length})", kind)


@rule("prmt")
def _permute(code: Code, each: Instruction) -> None:
    if len(each.name) != 2:
        raise unknown(each)
    out, *given = each.operands
    code.give(out, f"permuted({', '.join(code.value(x, 'b32') for x in given)})", "b32")


@rule("popc")
def _count(code: Code, each: Instruction) -> None:
    out, x = each.operands
    code.give(out, f"bitwise_count({code.value(x, each.name[-1])}).astype(u4)", "u32")


@rule("mov")
def _move(code: Code, each: Instruction) -> None:
    kind, (out, x) = each.name[-1], each.operands
    if out.startswith("{"):
        return _unpack(code, kind, out, x)
    if x.startswith("{"):
        return _pack(code, kind, out, x)
    value = code.value(x, kind if kind == "pred" else f"b{8 * size_of(kind)}")
    held = code.constants.get(value)
    if isinstance(held, np.generic):
        value = code.constant(np.full(code.program.threads, held))
    code.give(out, value, kind if kind == "pred" else f"b{8 * size_of(kind)}")


def _unpack(code: Code, kind: str, out: str, x: str) -> None:
    parts = out.strip("{} ").replace(",", " ").split()
    size = size_of(kind) // len(parts)
    value = code.value(x, f"b{8 * size_of(kind)}")
    code.add(f"whole = {value}")
    for place, part in enumerate(parts):
        code.give(part, f"(whole >> {8 * size * place}).astype(u{size})", f"b{8 * size}")


def _pack(code: Code, kind: str, out: str, x: str) -> None:
    parts = x.strip("{} ").replace(",", " ").split()
    size, wide = size_of(kind) // len(parts), size_of(kind)
    terms = [
        f"({code.value(part, f'b{8 * size}')}.astype(u{wide}) << {8 * size * place})"
        for place, part in enumerate(parts)
    ]
    code.give(out, " | ".join(terms), f"b{8 * wide}")


_ROUNDINGS = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


@rule("cvt")
def _convert(code: Code, each: Instruction) -> None:
    *how, to, kind = each.name[1:]
    out, *given = each.operands
    (rounding,) = [part for part in how if part[0] == "r"] or [""]
    if {*how} - {"rn", "ftz", *_ROUNDINGS}:
        raise unknown(each)
    if to in ("bf16x2", "f16x2") and kind == "f32" and rounding == "rn":
        return _convert_two(code, each, to.removesuffix("x2"))
    value = code.value(given[0], kind)
    floats = (*FLOATS, "bf16")
    if kind in floats and to not in floats:
        value = f"to_integer({value}, {word_of(to)}, {rounding!r})"
    elif to in floats:
        if rounding not in ("rn", "") and to != kind:
            raise unknown(each)
        value = f"{_ROUNDINGS.get(rounding, '')}({value})"
        value = f"{value}.astype({FLOATS.get(to, 'f4')})"
        (value,) = _flushing(each, value)
    else:
        value = f"{value}.astype({word_of(to)})"
    code.give(out, value, to)


def _convert_two(code: Code, each: Instruction, to: str) -> None:
    out, upper, lower = each.operands
    halves = []
    for x in (upper, lower):
        value = code.value(x, "f32")
        bits = f"to_bf16({value})" if to == "bf16" else f"{value}.astype(f2).view(u2)"
        halves.append(f"{bits}.astype(u4)")
    code.give(out, f"({halves[0]} << 16) | {halves[1]}", "b32")

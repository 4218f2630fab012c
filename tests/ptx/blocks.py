"""A block of a kernel as a function of Python, and where threads that go different ways meet."""

from typing import Any, Final

import numpy as np

from tests.ptx import communication, values
from tests.ptx.arithmetic import RULES, unknown
from tests.ptx.code import Code, size_of
from tests.ptx.program import Instruction, Program

assert communication, "its rules are entered as it is imported"
_FUNCTIONS = """where multiply exp2 abs minimum maximum fmin fmax isnan
    bitwise_count bitwise_or bitwise_and bitwise_xor add rint trunc floor ceil"""
_NAMES: Final = {name: getattr(np, name) for name in _FUNCTIONS.split()}
_NAMES |= {
    f"{kind}{size}": np.dtype(f"{kind}{size}").type for kind in "iu" for size in (1, 2, 4, 8)
}
_NAMES |= {f"f{size}": np.dtype(f"f{size}").type for size in (2, 4, 8)}
_NAMES |= {name: value for name, value in vars(values).items() if callable(value)}
END: Final = 1 << 30
"""In the place of a block's number: the thread is done."""


class BlockFunction:
    """A block as a function of the machine, its registers, and the threads that are there."""

    def __init__(self, program: Program, number: int, *, masked: bool) -> None:
        self.code = Code(program, masked)
        self.condition, self.name = "None", f"<block {number} of {program.name}>"
        self.goes_to: int | None = None
        for each in program.blocks[number].instructions:
            self.code.begin(each)
            if each.name[0] in ("bra", "ret", "exit"):
                self.goes_to = END if each.name[0] != "bra" else program.labels[each.operands[0]]
                self.condition = self.code.mask() if each.guard else "None"
            elif each.name[0] in RULES:
                RULES[each.name[0]](self.code, each)
            else:
                raise unknown(each)

    def compile(self, read_elsewhere: set[str]) -> None:
        """Make ``run``, which keeps what other blocks read and returns who takes the branch."""
        code = self.code
        heads = [f"{name} = registers[{name!r}]" for name in sorted(code.exposed)]
        kept = sorted(code.defined & read_elsewhere)
        tails = [f"registers[{name!r}] = {name}" for name in kept]
        lines = [*heads, *code.lines, *tails, f"return {self.condition}"]
        source = "\n ".join(["def run(machine, registers, active):", *lines])
        space: dict[str, Any] = {**_NAMES, **code.constants}
        exec(compile(source, self.name, "exec"), space)
        self.run, self._first = space["run"], 2 + len(heads)

    def instruction(self, error: BaseException) -> Instruction | None:
        """The instruction that failed."""
        trace, found = error.__traceback__, -1
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self.name:
                found = trace.tb_lineno - self._first
            trace = trace.tb_next
        is_one = 0 <= found < len(self.code.instructions)
        return self.code.instructions[found] if is_one else None


class Registers(dict):
    """Registers by name; one that nothing was written to is full of NaN."""

    def __init__(self, program: Program) -> None:
        types = {name.lstrip("%"): kind for name, kind in program.registers.items()}
        self._types, self._threads = types, program.threads

    def __missing__(self, name: str) -> np.ndarray:
        kind = self._types.get(name) or self._types[name.rstrip("0123456789")]
        if kind == "pred":
            return np.zeros(self._threads, np.bool_)
        return np.full(self._threads, ~np.dtype(f"u{size_of(kind)}").type(0))


def meetings(branches: list[int | None], always: set[int]) -> list[int]:
    """For each block the first that all ways from it come to.

    Args:
        branches: Where each block's branch goes to, if it has one.
        always: Blocks whose branch every thread takes.
    """
    count = len(branches)
    ways = [
        {place for place in (None if number in always else number + 1, branch) if place is not None}
        for number, branch in enumerate(branches)
    ]
    later = [{*range(count), END} for _ in range(count)]
    before = None
    while before != later:
        before = [*later]
        for number in reversed(range(count)):
            of_ways = [{way} | (later[way] if way < count else set()) for way in ways[number]]
            later[number] = set.intersection(*of_ways) if of_ways else {END}
    # The first has all others behind it.
    sizes = {number: len(later[number]) for number in range(count)} | {END: 0}
    return [max(each, key=sizes.__getitem__) for each in later]

"""Python of a block: names, constants and assignments that its instructions become."""

import re
import struct

import numpy as np

from tests.ptx.program import Instruction, Program

FLOATS = {"f16": "f2", "f32": "f4", "f64": "f8", "f32x2": "f4"}
"""NumPy types of what registers hold; one of 64 bits may hold two."""


class UnknownInstruction(NotImplementedError):
    """An instruction that the machine does not know."""


def size_of(kind: str) -> int:
    """Bytes of a type."""
    return 8 if kind == "f32x2" else int(kind.lstrip("bfsu")) // 8


def word_of(kind: str) -> str:
    """The NumPy type of integers of a type's bits."""
    return f"{'i' if kind[0] == 's' else 'u'}{size_of(kind)}"


def dtype_of(kind: str) -> str:
    """The NumPy type of values of a type."""
    return FLOATS.get(kind) or word_of(kind)


class Code:
    """Lines of a function of all threads' registers, and the instruction of each.

    A register is an array of unsigned words, or of booleans, that is never written to: an
    instruction makes another.
    """

    def __init__(self, program: Program, masked: bool) -> None:
        """``masked``: some threads are elsewhere, and ``active`` says which are here."""
        self.program, self.masked = program, masked
        self.lines: list[str] = []
        self.instructions: list[Instruction] = []
        self.constants: dict[str, object] = {}
        self._names: dict[object, str] = {}
        self.defined: set[str] = set()
        self.exposed: set[str] = set()
        """Registers that are read before they are written."""
        self._now: Instruction | None = None

    def begin(self, instruction: Instruction) -> None:
        """Begin the lines of an instruction."""
        self._now = instruction

    def add(self, line: str) -> None:
        """Add a line of the instruction."""
        assert self._now is not None
        self.lines.append(line)
        self.instructions.append(self._now)

    def mask(self) -> str:
        """The threads that take part: a name, or None."""
        assert self._now is not None
        guard = self._now.guard
        if guard is None:
            return "active" if self.masked else "None"
        value = ("~" if self._now.negated else "") + self.register(guard)
        return f"(active & {value})" if self.masked else f"({value})"

    def register(self, name: str) -> str:
        """The variable of a register that is read."""
        variable = _variable(name)
        if variable not in self.defined:
            self.exposed.add(variable)
        return variable

    def constant(self, value: object) -> str:
        """The name of a constant."""
        held = np.asarray(value)
        key = held.dtype, held.shape, held.tobytes()
        if key not in self._names:
            self._names[key] = f"k{len(self._names)}"
            self.constants[self._names[key]] = value
        return self._names[key]

    def value(self, operand: str, kind: str) -> str:
        """An operand, as an expression of the NumPy type of ``kind``."""
        if operand in self.program.shared:
            return self.constant(np.uint32(0))
        if operand[0] != "%" and operand not in self.program.registers:
            return self._immediate(operand, kind)
        if (special := _SPECIAL.get(operand)) is not None:
            return f"machine.{special}"
        if "." in operand:
            raise UnknownInstruction(f"the machine does not know {operand}: {self._now}")
        name, held = self.register(operand), self.program.register_type(operand)
        if kind == "pred":
            return name
        if kind == "bf16":
            return f"from_bf16({name})"
        if size_of(held) != size_of(kind):
            assert size_of(held) > size_of(kind), str(self._now)
            name = f"{name}.astype(u{size_of(kind)})"
        return name if kind[0] in "bu" else f"{name}.view({dtype_of(kind)})"

    def give(self, operand: str, value: str, kind: str) -> None:
        """Assign an expression of the NumPy type of ``kind`` to a register."""
        if operand == "_":
            return
        held = self.program.register_type(operand)
        if kind == "bf16":
            value = f"to_bf16({value})"
        elif kind != "pred":
            wide = size_of(held)
            if wide > size_of(kind):
                value = f"({value}).astype({'i' if kind[0] == 's' else 'u'}{wide})"
            assert wide >= size_of(kind), str(self._now)
            if kind[0] in "fs":
                value = f"({value}).view(u{wide})"
        mask = self.mask()
        if mask != "None":
            value = f"where({mask}, {value}, {self.register(operand)})"
        variable = _variable(operand)
        self.defined.add(variable)
        self.add(f"{variable} = {value}")

    def address(self, operand: str, size: int) -> str:
        """An operand ``[register + offset]`` as unsigned words of ``size`` bytes."""
        base, _, offset = operand.strip("[] ").replace(" ", "").partition("+")
        word = {4: np.uint32, 8: np.uint64}[size]
        shift = int(offset or "0", 0) % (1 << 8 * size)
        if base in self.program.shared:
            return self.constant(np.full(self.program.threads, shift, word))
        name = self.value(base, f"u{8 * size}")
        return f"({name} + {self.constant(word(shift))})" if shift else name

    def _immediate(self, text: str, kind: str) -> str:
        if kind == "pred":
            return self.constant(np.full(self.program.threads, int(text, 0) != 0))
        if match := re.fullmatch(r"0([fd])([0-9a-fA-F]+)", text):
            bits = bytes.fromhex(match[2])
            number = struct.unpack(">f" if match[1] == "f" else ">d", bits)[0]
            if kind in FLOATS:
                return self.constant(np.dtype(FLOATS[kind]).type(number))
            return self.constant({4: np.uint32, 8: np.uint64}[len(bits)](int(match[2], 16)))
        size = size_of("u16" if kind == "bf16" else kind)
        number = int(text.rstrip("U"), 0) % (1 << 8 * size)
        word = np.dtype(f"u{size}").type(number)
        if kind == "bf16":
            return f"from_bf16({self.constant(word)})"
        return self.constant(word if kind[0] in "bu" else word.view(dtype_of(kind)))


_SPECIAL = {
    f"%{name}.{axis}": f"{name}_{axis}"
    for name in ("tid", "ntid", "ctaid", "nctaid")
    for axis in "xyz"
} | {"%laneid": "laneid"}


def _variable(name: str) -> str:
    return re.sub(r"\W", "_", name.lstrip("%"))

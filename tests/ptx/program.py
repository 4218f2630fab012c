"""A kernel in PTX: its parameters, registers, and blocks of instructions."""

import re
from dataclasses import dataclass, field
from pathlib import Path

_OPERAND = re.compile(r"\[[^\]]*\]|\{[^}]*\}|[^,\s]+")
_STATEMENT = re.compile(r"(?:@(!?)([%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+([^;]+);")
_PARAMETER = re.compile(r"\.param\s+\.(\w+)\s+(?:\.[a-z]+\s+(?:\d+\s+)?)*(\w+)")
_SHARED = re.compile(r"\.shared\s+(?:\.align\s+\d+\s+)?\.b8\s+([\w$]+)\[(\d*)\]")


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction, and where it stands."""

    guard: str | None
    """Register of the predicate without which a thread leaves it out."""

    negated: bool
    """Whether it is left out with the predicate instead."""

    name: tuple[str, ...]
    """Its parts between dots: ``("add", "s32")``."""

    operands: tuple[str, ...]

    place: str
    """Line of the PTX and, where it is known, of the kernel."""

    def __str__(self) -> str:
        guard = f"@{'!' * self.negated}{self.guard} " if self.guard else ""
        return f"{guard}{'.'.join(self.name)} {', '.join(self.operands)} ({self.place})"


@dataclass(slots=True)
class Block:
    """Instructions of which threads that begin with one run all."""

    instructions: list[Instruction] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel."""

    name: str
    threads: int
    parameters: dict[str, str]
    """Types by name, in order."""

    registers: dict[str, str]
    """Types by name, or by prefix of a numbered one."""

    shared: dict[str, int]
    """Bytes of shared memory by name; 0 where the launch says."""

    blocks: list[Block]
    labels: dict[str, int]
    """Numbers of blocks that begin with a label."""

    def register_type(self, name: str) -> str:
        """The declared type of a register, as ``b32``."""
        return self.registers.get(name) or self.registers[name.rstrip("0123456789")]


def parsed(text: str) -> Program:
    """The only kernel of a module, compiled for a known number of threads."""
    head, _, rest = text.partition(".entry")
    assert text.count(".entry") == 1, "needs one kernel"
    assert ".func" not in text, "the machine calls no function"
    title, _, body = rest.partition("{")
    files = {
        number: Path(name).name
        for number, name in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', text, re.MULTILINE)
    }
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", title)
    assert threads, "needs a number of threads"
    registers = {}
    for kind, names in _REGISTERS.findall(body):
        for name in names.split(","):
            registers[name.strip().partition("<")[0]] = kind
    shared = {name: int(size or 0) for name, size in _SHARED.findall(head + body)}
    first = head.count("\n") + title.count("\n") + 1
    blocks, labels = _blocks(_statements(body, first, files))
    parameters = {name: kind for kind, name in _PARAMETER.findall(title)}
    name = title.split("(")[0].strip()
    return Program(name, int(threads[1]), parameters, registers, shared, blocks, labels)


def _statements(body: str, first: int, files: dict[str, str]) -> list[str | Instruction]:
    """Labels and instructions, in order."""
    found: list[str | Instruction] = []
    source = ""
    for number, line in enumerate(body.splitlines(), first):
        line = line.split("//")[0].strip()
        if line.startswith(".loc"):
            _, file, row, *_ = line.split()
            source = f", {files.get(file, '?')}:{row}"
        if line == "}":
            break
        for statement in filter(None, map(str.strip, line.split(";"))):
            if re.fullmatch(r"[$\w]+:", statement):
                found.append(statement[:-1])
            elif not statement.startswith("."):
                found.append(_instruction(statement, f"line {number}{source}"))
    return found


def _instruction(statement: str, place: str) -> Instruction:
    match = _STATEMENT.fullmatch(statement)
    assert match, f"not an instruction: {statement!r}, {place}"
    negated, guard, name, operands = match.groups()
    parts = tuple(part for part in re.split(r"[.:]+", name) if part)
    return Instruction(guard, bool(negated), parts, tuple(_OPERAND.findall(operands)), place)


def _blocks(statements: list[str | Instruction]) -> tuple[list[Block], dict[str, int]]:
    targets = {each.operands[0] for each in statements if _is(each, "bra")}
    blocks, labels = [Block()], {}
    for each in statements:
        if isinstance(each, str):
            if each in targets:
                if blocks[-1].instructions:
                    blocks.append(Block())
                labels[each] = len(blocks) - 1
            continue
        blocks[-1].instructions.append(each)
        if _is(each, "bra", "ret", "exit"):
            blocks.append(Block())
    if not blocks[-1].instructions:
        blocks.pop()
    return blocks, labels


def _is(statement: str | Instruction, *names: str) -> bool:
    return isinstance(statement, Instruction) and statement.name[0] in names

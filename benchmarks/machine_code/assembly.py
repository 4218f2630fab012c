"""What an assembler and a disassembler say of a compiled kernel: resources, loops, loads."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final, NamedTuple

_INSTRUCTION: Final = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.MULTILINE)
_BRANCH: Final = re.compile(r"\bBRA\b.*?(0x[0-9a-f]+)")
_PREDICATE: Final = re.compile(r"^@!?U?P\w+\s+")
_AHEAD: Final = re.compile(r"^LDGSTS\.\S*128")
_WIDE: Final = re.compile(r"^(LDG\.\S*128|LDGSTS\.\S*128)")

_PROCESSOR: Final = {80: 164, 90: 228, 100: 228}
"""KiB of shared memory of a multiprocessor; all have 65,536 registers and 64 warps."""


class Loop(NamedTuple):
    """A backward branch and what it repeats."""

    instructions: int
    wide_loads: int
    """Loads of 128 bits, to registers or to shared memory."""

    is_ahead: bool
    """Whether it loads to shared memory what later iterations need."""

    height: int
    """1 where it has no loop inside."""

    is_inside: bool
    """Whether a loop of height 2 or less has it inside."""


def resources(ptxas: Path, ptx: str) -> dict[str, int]:
    """Registers and bytes spilled, as the assembler reports them."""
    target = re.search(r"\.target (sm_\w+)", ptx)
    assert target, "PTX names its target"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [ptxas, "-v", f"--gpu-name={target[1]}", source, "-o", Path(folder, "cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = {
        "registers": r"Used (\d+) registers",
        "spill_store_bytes": r"(\d+) bytes spill stores",
        "spill_load_bytes": r"(\d+) bytes spill loads",
    }
    return {
        name: int(match[1]) if (match := re.search(pattern, said)) else 0
        for name, pattern in found.items()
    }


def occupancy(arch: int, registers: int, warps: int, shared: int) -> float:
    """Share of a multiprocessor's 64 warps that are resident at once."""
    # Registers are given out to warps by 256; a block takes 1 KiB of shared memory besides its own.
    of_registers = 65536 // (-(-registers * 32 // 256) * 256 * warps)
    of_memory = _PROCESSOR[arch] * 1024 // (shared + 1024)
    return min(of_registers, of_memory, 64 // warps, 32) * warps / 64


def instructions(cuobjdump: Path, cubin: bytes) -> list[tuple[int, str]]:
    """Address and text of each SASS instruction."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [cuobjdump, "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [
        (int(address, 16), _PREDICATE.sub("", instruction))
        for address, instruction in _INSTRUCTION.findall(text)
    ]


def loops(listing: list[tuple[int, str]]) -> list[Loop]:
    """Loops in the order of their ends; that of a trap after the code is none."""
    place = {address: index for index, (address, _) in enumerate(listing)}
    found: list[tuple[int, int, int]] = []
    for end, (_, text) in enumerate(listing):
        branch = _BRANCH.search(text)
        begin = place.get(int(branch[1], 16)) if branch else None
        if begin is not None and begin < end:
            inner = [height for first, last, height in found if begin <= first and last <= end]
            found.append((begin, end, 1 + max(inner, default=0)))
    return [_loop(listing, found, one) for one in found]


def _loop(
    listing: list[tuple[int, str]], found: list[tuple[int, int, int]], one: tuple[int, int, int]
) -> Loop:
    begin, end, height = one
    inside = [instruction for _, instruction in listing[begin : end + 1]]
    around = [
        other
        for other in found
        if other != one and other[0] <= begin and end <= other[1] and other[2] <= 2
    ]
    return Loop(
        instructions=len(inside),
        wide_loads=sum(map(bool, map(_WIDE.match, inside))),
        is_ahead=any(map(_AHEAD.match, inside)),
        height=height,
        is_inside=bool(around),
    )


def passes(repeated: list[Loop]) -> list[Loop]:
    """Loops over the columns of a row.

    Those that load ahead of time, if any: others read what is left of a row, or of several. Else
    those with wide loads and at most a loop over rows inside.
    """
    ahead = [loop for loop in repeated if loop.is_ahead and loop.height == 1]
    if ahead:
        return ahead
    wide = [loop for loop in repeated if loop.wide_loads and loop.height <= 2]
    return [loop for loop in wide if not loop.is_inside]


def counted(
    listing: list[tuple[int, str]],
    columns: int,
    *,
    has_parts: bool = False,
) -> dict[str, Any]:
    """Instructions a column of all passes over a row, or of the whole code where there is none.

    A kernel without a loop over columns is counted as a whole: each instruction once, whether or
    not it is executed. That shows a change, and is no number of what a column costs.

    Args:
        columns: Columns of a thread in one iteration.
        has_parts: Each loop goes over a part of the columns: the longest counts, not their sum.
    """
    repeated = loops(listing)
    lengths = [loop.instructions / columns for loop in passes(repeated)]
    whole = max(lengths, default=0) if has_parts else sum(lengths)
    return {
        "instructions": len(listing),
        "loops": [loop._asdict() for loop in repeated],
        "passes": [round(length, 1) for length in lengths],
        "counted": "passes" if lengths else "whole code",
        "instructions_a_column": round(whole or len(listing) / columns, 1),
        "wide_loads": sum(bool(_WIDE.match(text)) for _, text in listing),
        "barriers": sum(text.startswith("BAR") for _, text in listing),
    }

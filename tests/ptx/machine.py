"""A machine that runs a kernel in PTX: one program after the other, all threads of it together."""

import itertools
from typing import Any

import numpy as np

from tests.ptx.blocks import END, BlockFunction, Registers, meetings
from tests.ptx.code import size_of
from tests.ptx.memory import Memory, SharedMemory
from tests.ptx.program import Program
from tests.ptx.region import AccessError, Clock, Region


class Machine:
    """What runs one kernel."""

    def __init__(self, program: Program) -> None:
        self._program = program
        count = len(program.blocks)
        self._blocks = [BlockFunction(program, number, masked=False) for number in range(count)]
        self._exposed = {name for block in self._blocks for name in block.code.exposed}
        self._meetings = meetings(
            [block.goes_to for block in self._blocks],
            {
                number
                for number, block in enumerate(self._blocks)
                if block.goes_to is not None and block.condition == "None"
            },
        )
        self._functions: dict[tuple[int, bool], BlockFunction] = {}
        threads = np.arange(program.threads, dtype=np.uint32)
        self.tid_x, self.laneid = threads, threads % 32
        self.tid_y = self.tid_z = np.zeros_like(threads)
        self.ntid_x, self.ntid_y = np.full_like(threads, program.threads), np.ones_like(threads)
        self.ntid_z = self.ntid_y
        widths = [
            size_of(each.name[-1]) if each.name[0] in ("ld", "st", "atom", "red") else 2
            for block in program.blocks
            for each in block.instructions
            if "shared" in each.name and each.name[0] != "cp"
        ]
        self._granule = min([4, *widths])

    def launch(
        self,
        grid: tuple[int, int, int],
        arguments: list[Any],
        tensors: list[tuple[int, np.ndarray, int]],
        shared: int = 0,
        *,
        backwards: bool = False,
    ) -> None:
        """Run all programs of a grid.

        Args:
            grid: Number of programs along each axis.
            arguments: A number for each parameter.
            tensors: Address and bytes of each storage that the kernel may access, and the size of
                its elements.
            shared: Bytes of shared memory.
            backwards: Run the last program first.

        Raises:
            AccessError: An access is out of bounds, not aligned, or not ordered by a barrier.
        """
        clock = Clock(self._program.threads)
        regions = [
            Region(base, held, size, clock, f"the tensor at {base:#x}")
            for base, held, size in tensors
        ]
        self._clock, self.tensors = clock, Memory(regions, clock)
        size = max([shared, *self._program.shared.values()])
        self.shared = SharedMemory(size, self._granule, clock)
        given = zip(self._program.parameters.items(), arguments, strict=True)
        self.parameters = {name: self._filled(kind, value) for (name, kind), value in given}
        threads = np.ones_like(self.tid_x)
        self.nctaid_x, self.nctaid_y, self.nctaid_z = (threads * count for count in grid)
        programs = list(itertools.product(*map(range, reversed(grid))))
        for z, y, x in reversed(programs) if backwards else programs:
            self.ctaid_x, self.ctaid_y, self.ctaid_z = threads * x, threads * y, threads * z
            clock.begin()
            self.shared.begin()
            with np.errstate(all="ignore"):
                self._run(Registers(self._program), 0, END, None, (x, y, z))

    def _filled(self, kind: str, value: Any) -> np.ndarray:
        size = size_of(kind)
        if isinstance(value, float):
            word = np.dtype(f"f{size}").type(value).view(f"u{size}")
        else:
            word = np.dtype(f"u{size}").type(int(value) % (1 << 8 * size))
        return np.full(self._program.threads, word)

    def _run(
        self,
        registers: Registers,
        number: int,
        stop: int,
        active: np.ndarray | None,
        place: tuple[int, ...],
    ) -> None:
        """Run threads from one block to another.

        Those that go different ways meet where all ways do, as the assembler has them.
        """
        while number != stop:
            block = self._function(number, masked=active is not None)
            taken = self._step(block, registers, active, place)
            if block.goes_to is None:
                number += 1
                continue
            here = np.True_ if active is None else active
            left = np.False_ if taken is None else here & ~taken
            if not np.any(left):
                number = block.goes_to
            elif not taken.any():
                number += 1
            else:
                meeting = self._meetings[number]
                self._run(registers, block.goes_to, meeting, taken, place)
                self._run(registers, number + 1, meeting, left, place)
                number = meeting

    def _step(self, block: BlockFunction, registers: Registers, active: Any, place: Any) -> Any:
        try:
            return block.run(self, registers, active)
        except AccessError as error:
            where = f"{block.instruction(error)}, program {place} of {self._program.name}"
            raise AccessError(f"{error}: {where}") from error
        except Exception as error:
            error.add_note(f"in {block.instruction(error)} of {self._program.name}")
            raise

    def _function(self, number: int, *, masked: bool) -> BlockFunction:
        key = number, masked
        if key not in self._functions:
            block = BlockFunction(self._program, number, masked=True) if masked else None
            self._functions[key] = block or self._blocks[number]
            self._functions[key].compile(self._exposed)
        return self._functions[key]

    def wait(self, active: np.ndarray | None) -> None:
        """Have all threads of the program wait for each other."""
        if active is not None:
            raise AccessError("not all threads come to a barrier")
        self._clock.wait()

    def meet(self, active: np.ndarray | None, members: np.ndarray | None = None) -> None:
        """Have the lanes of each warp be at one instruction."""
        if (
            active is not None
            and (active.reshape(-1, 32).any(1) & ~active.reshape(-1, 32).all(1)).any()
        ):
            raise AccessError("not all lanes come to an instruction of the whole warp")
        if members is not None and (members != 0xFFFFFFFF).any():
            raise NotImplementedError("an instruction of some lanes of a warp")

    def copy(
        self,
        target: np.ndarray,
        source: np.ndarray,
        mask: np.ndarray | None,
        size: int,
        read: np.ndarray | None = None,
    ) -> None:
        """Begin to copy ``size`` bytes a thread to shared memory, zeros where none is read."""
        is_read = mask
        if read is not None:
            read = np.broadcast_to(read, target.shape)
            assert np.isin(read, (0, size)).all(), "a copy of some bytes"
            is_read = read > 0 if mask is None else mask & (read > 0)
        values = self.tensors.load(source, is_read, 4, size // 4)
        self.shared.copy(target, mask, values)

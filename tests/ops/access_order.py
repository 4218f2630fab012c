"""Loads and stores of interpreted kernels that a GPU may make in another order.

The interpreter runs one program after the other, and all threads of a program together. On a GPU
programs run side by side, and threads wait for each other at barriers alone.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Access(NamedTuple):
    """Elements of a tensor that a program loads or stores at once."""

    is_store: bool
    program: int

    period: int
    """Number of the program's barriers before it."""

    addresses: np.ndarray

    places: np.ndarray
    """Place of each element in its tensor."""

    shape: tuple[int, ...]
    line: str


class AccessOrder:
    """Conflicts in the launches from ``watch`` on.

    What a thread stores, no other program may load or store, nor may another thread of its program
    without a barrier in between. The thread may load it before: it is taken for the one that has
    the same place of a tensor of the same shape.
    """

    def __init__(self):
        self.conflicts = set()
        """Kernel, line of a store, and line of a load or store at odds with it."""
        self._accesses = []
        self._program = self._period = 0

    def watch(self, monkeypatch):
        """Record what the interpreter loads and stores."""
        from triton.runtime import interpreter

        builder = type(interpreter.interpreter_builder)
        load, store = builder.create_masked_load, builder.create_masked_store
        begin, launch = builder.set_grid_idx, interpreter.GridExecutor.__call__

        def begin_program(self_, *index):
            self._program, self._period = self._program + 1, 0
            begin(self_, *index)

        def wait(_):
            self._period += 1

        def noted_load(self_, pointers, mask, *others):
            self._note(False, pointers.data, mask.data)
            return load(self_, pointers, mask, *others)

        def noted_store(self_, pointers, value, mask, *others):
            self._note(True, pointers.data, mask.data)
            return store(self_, pointers, value, mask, *others)

        def checked_launch(executor, *given, **named):
            self._accesses.clear()
            launch(executor, *given, **named)
            self.conflicts |= {(executor.fn.__name__, *lines) for lines in self._found()}

        monkeypatch.setattr(builder, "set_grid_idx", begin_program)
        monkeypatch.setattr(builder, "create_barrier", wait)
        monkeypatch.setattr(builder, "create_masked_load", noted_load)
        monkeypatch.setattr(builder, "create_masked_store", noted_store)
        monkeypatch.setattr(interpreter.GridExecutor, "__call__", checked_launch)

    def _note(self, is_store, pointers, mask):
        places = np.flatnonzero(np.broadcast_to(mask, pointers.shape))
        addresses = pointers.reshape(-1)[places].astype(np.int64)
        self._accesses.append(
            Access(
                is_store,
                self._program,
                self._period,
                addresses,
                places,
                pointers.shape,
                _line(sys._getframe(2)),
            )
        )

    def _found(self):
        """Lines of each conflict of a launch."""
        stored = [each.addresses for each in self._accesses if each.is_store]
        stored = np.unique(np.concatenate(stored)) if stored else np.empty(0, np.int64)
        if not len(stored):
            return
        shapes = sorted({each.shape for each in self._accesses})
        columns = []
        for number, each in enumerate(self._accesses):
            slot = np.searchsorted(stored[:-1], each.addresses)
            kept = stored[slot] == each.addresses
            thread = each.places[kept] * len(shapes) + shapes.index(each.shape)
            same = (each.program, each.period, number, not each.is_store)
            columns.append([slot[kept], thread, *(np.full_like(thread, x) for x in same)])
        address, thread, program, period, number, is_load = map(
            np.concatenate, zip(*columns, strict=True)
        )
        order, first = _first_stores(address, is_load, number)
        is_other = program[order] != program[first]
        yield from self._lines(number, first[is_other], order[is_other])
        order, first = _first_stores(address, is_load, number, program, period)
        is_other = thread[order] != thread[first]
        is_late = (is_load[order] == 1) & (number[order] > number[first])
        is_bad = (is_load[first] == 0) & (is_other | is_late)
        yield from self._lines(number, first[is_bad], order[is_bad])

    def _lines(self, number, stores, others):
        for pair in {(int(number[a]), int(number[b])) for a, b in zip(stores, others, strict=True)}:
            yield tuple(self._accesses[each].line for each in pair)


def _first_stores(address, is_load, number, *more):
    """An order by address and ``more``, and of each element the first in it with the same ones: a
    store, if there is any."""
    keys = (address, *more)
    order = np.lexsort((number, is_load, *keys))
    begins = np.ones(len(order), dtype=np.bool_)
    begins[1:] = np.any([key[order][1:] != key[order][:-1] for key in keys], axis=0)
    return order, order[np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))]


def _line(frame):
    """Where in a kernel or device function a frame was called from."""
    while "triton" in Path(frame.f_code.co_filename).parts:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"

"""Where all ranks of a run are, as one line for a person; R ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from torch._C._distributed_c10d import PrefixStore, Store

HEARTBEAT_S: Final = 2.0
_SHOWN: Final = 12
"""Groups of ranks that one line has room for."""


@dataclass(frozen=True, slots=True)
class RankState:
    """What one rank says of itself."""

    beat: int
    """Grows while the rank lives."""

    phase: str
    iteration: int
    place: str
    """Innermost line of Python that its main thread is at."""

    error: str | None = None
    """Why it ends."""


class RankBoard:
    """What each rank says, in the store that the ranks met at.

    Args:
        store: A connection of its own: one that another thread waits on would have to wait too.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        self._store = PrefixStore("megatron_ext/ranks", store)
        self.rank = rank
        self.world_size = world_size

    def write(self, state: RankState) -> None:
        """Say how this rank is."""
        self._store.set(str(self.rank), json.dumps(asdict(state)))

    def report(self) -> str:
        """Where the ranks are; takes as long as a living rank needs to show that it lives.

        ``ranks 0-6: in updating, iteration 12, at ...; rank 7: no sign of life since ...``
        """
        before = self._read()
        time.sleep(2.5 * HEARTBEAT_S)
        after = self._read()
        lines: dict[str, list[int]] = {}
        for rank, (old, new) in enumerate(zip(before, after, strict=True)):
            lines.setdefault(_line(old, new), []).append(rank)
        # Who waits for whom: the smallest groups are the likeliest to be the cause.
        grouped = sorted(lines.items(), key=lambda item: (len(item[1]), item[1]))
        shown = [f"{_ranks(ranks)}: {line}" for line, ranks in grouped[:_SHOWN]]
        left_out = len(grouped) - len(shown)
        return "; ".join([*shown, *([f"{left_out} more"] if left_out else [])])

    def _read(self) -> list[RankState | None]:
        keys = [str(rank) for rank in range(self.world_size)]
        return [self._read_one(key) for key in keys]

    def _read_one(self, key: str) -> RankState | None:
        # A ``get`` of what is not there would wait for it.
        if not self._store.check([key]):
            return None
        values: dict[str, Any] = json.loads(self._store.get(key))
        return RankState(**values)


def first_line(error: BaseException) -> str:
    """What kind of error, and the first line of what it says."""
    text = (str(error).splitlines() or [""])[0][:300]
    return f"{type(error).__name__}: {text}"


def _line(old: RankState | None, new: RankState | None) -> str:
    if new is None:
        return "has not started"
    where = f"{new.phase}, iteration {new.iteration}, at {new.place}"
    if new.error is not None:
        return f"ended in {new.phase}, iteration {new.iteration}: {new.error}"
    if old is not None and old.beat == new.beat:
        return f"no sign of life since {where}"
    return where


def _ranks(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"

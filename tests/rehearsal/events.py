"""What a device would have been asked for, with the line that asked."""

import re
import sys
from collections import Counter
from typing import Final, Literal, NamedTuple

Kind = Literal["wait", "upload", "pinned upload", "launch", "kernel", "mismatch"]
"""``wait``: the host waits for the device. ``upload``: a copy from pageable memory, for which it
waits too; ``pinned upload``: one that goes on beside it. ``launch``: an operation of torch that
runs something on the device; ``kernel``: a launch of ours. ``mismatch``: a tensor of the host where
one of the device is needed."""

_ROOT: Final = re.compile(r".*/megatron(_ext)?/")


class Event(NamedTuple):
    kind: Kind

    what: str
    """Operation, and shapes where they say more."""

    place: str
    """``file:line function``, the innermost of ours or of megatron-core."""


class Events:
    """A count of the events since ``clear``, where the record is on."""

    def __init__(self) -> None:
        self.counts: Counter[Event] = Counter()
        self.is_on = True

    def add(self, kind: Kind, what: str) -> None:
        """Count one more."""
        if self.is_on:
            self.counts[
                Event(kind, what, _place() if kind not in ("launch", "kernel") else "")
            ] += 1

    def clear(self) -> None:
        """Forget all."""
        self.counts.clear()

    def number(self, *kinds: Kind) -> int:
        """Number of events of these kinds."""
        return sum(count for event, count in self.counts.items() if event.kind in kinds)

    def lines(self, *kinds: Kind) -> list[str]:
        """Readable lines of these kinds, most frequent first."""
        return [
            f"{count} x {event.kind}: {event.what} at {event.place}"
            for event, count in self.counts.most_common()
            if event.kind in kinds
        ]


def _place() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/tests/" not in name and (root := _ROOT.match(name)):
            return f"{name[root.end() :]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "the test"

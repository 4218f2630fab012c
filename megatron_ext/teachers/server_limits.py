"""``ServerLimits``: what one student, and all of them, may take of a teacher's server."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Final

_PARTS: Final = 4
"""Tensors of a microbatch: tokens, positions, labels and bounds."""
_DESCRIPTORS: Final = 5
"""File descriptors of a student: its socket and its shared memory."""
_OWN_DESCRIPTORS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Sizes, numbers and times; a student that goes beyond one of them is disconnected."""

    length: int = 1 << 20
    """Positions of a row: the teacher's sequence length."""

    rows: int = 4096
    """Rows of a microbatch."""

    microbatches: int = 8192
    """Microbatches of a request."""

    tokens: int = 1 << 22
    """Positions of a request."""

    header_bytes: int = 4 << 20
    """Bytes of a frame's header."""

    queued: int = 256
    """Requests of one student that wait."""

    queued_bytes: int = 1 << 30
    """Bytes of one student's requests that wait."""

    all_queued_bytes: int = 4 << 30
    """Bytes of all requests that wait."""

    unread_bytes: int = 256 << 20
    """Bytes of answers that one student has not read, from which on its requests wait."""

    all_unread_bytes: int = 4 << 30
    """The same of all students: then those wait that have not read everything."""

    heads: int = 4
    """Times that one student may ask for the head."""

    students: int = 512
    """Students at a time; fewer where the process may open few files."""

    strangers: int = 64
    """Connections without a call; the oldest beyond are closed."""

    handshake_s: float = 10.0
    """Seconds from a connection to its call, and from the call to ``ready``."""

    frame_s: float = 60.0
    """Seconds from the first bytes of a frame to its last."""

    @property
    def frame_bytes(self) -> int:
        """Bytes of the tensors of a frame."""
        return _PARTS * 8 * self.tokens + 8 * self.microbatches

    @property
    def frame_tensors(self) -> int:
        """Tensors of a frame."""
        return _PARTS * self.microbatches

    @property
    def most_strangers(self) -> int:
        """``strangers``, or fewer where the process may open few files."""
        return max(4, min(self.strangers, _open_files() // 8))

    @property
    def most_students(self) -> int:
        """``students``, or fewer where the process may open few files."""
        room = _open_files() - _OWN_DESCRIPTORS - self.most_strangers
        return max(2, min(self.students, room // _DESCRIPTORS))


def _open_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft

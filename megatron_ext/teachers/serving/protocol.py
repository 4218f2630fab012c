"""The kinds of frames between a student and a teacher's server.

The server speaks first, once both have shown that they know the key: ``hello``. A student that
means this teacher says ``ready``, then asks ``request`` and ``head``, which come back as ``answer``
and ``head``, in order. An answer in shared memory is copied, and its memory ``returned``. A server
that has to leave says ``error`` with the reason, a student ``bye``.
"""

from __future__ import annotations

from typing import Final

PROTOCOL: Final = 1
"""Changes whenever a student and a server of different versions would misunderstand each other."""

HELLO: Final = "hello"
READY: Final = "ready"
REQUEST: Final = "request"
ANSWER: Final = "answer"
RETURNED: Final = "returned"
HEAD: Final = "head"
ERROR: Final = "error"
BYE: Final = "bye"

"""The kinds of frames between a student and a teacher's server.

A student asks who is there by an action, ``hello``. It then opens a stream, on which the server
says ``offers`` first and ``beat`` every second, and is ``ready`` once it has chosen how targets
come. It asks ``request`` and ``head``, which come back as ``answer`` and ``head``, in order. An
answer in shared memory is copied, and its memory ``returned``. A server that has to leave says
``error`` with the reason, a student ``bye``.
"""

from __future__ import annotations

from typing import Final

PROTOCOL: Final = 2
"""Changes whenever a student and a server of different versions would misunderstand each other."""

HELLO: Final = "hello"
OFFERS: Final = "offers"
READY: Final = "ready"
REQUEST: Final = "request"
ANSWER: Final = "answer"
RETURNED: Final = "returned"
HEAD: Final = "head"
BEAT: Final = "beat"
ERROR: Final = "error"
BYE: Final = "bye"

BEAT_S: Final = 1.0
"""How often a server says that it lives, whatever else it does."""

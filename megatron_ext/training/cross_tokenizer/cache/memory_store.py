"""Records by key in memory, those used last."""

from __future__ import annotations

from collections import OrderedDict


class MemoryStore:
    """Bytes by key, of one process. A copy that is sent to another process is empty.

    Args:
        max_bytes: Size of all records; a new one takes the place of those longest not asked for.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._records: OrderedDict[bytes, bytes] = OrderedDict()
        self._bytes = 0

    def get(self, key: bytes) -> bytes | None:
        """The record of ``key``; None where there is none."""
        record = self._records.get(key)
        if record is not None:
            self._records.move_to_end(key)
        return record

    def refresh(self) -> None:
        """No other process adds records."""

    def add(self, key: bytes, record: bytes) -> None:
        """Keep a record, unless it is larger than all may be."""
        if len(record) > self._max_bytes:
            return
        self._bytes += len(record) - len(self._records.pop(key, b""))
        self._records[key] = record
        while self._bytes > self._max_bytes:
            self._bytes -= len(self._records.popitem(last=False)[1])

    def __reduce__(self) -> tuple[object, ...]:
        return MemoryStore, (self._max_bytes,)

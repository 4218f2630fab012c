"""The progress of a run, its speed and the time that is left."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from types import TracebackType

from megatron_ext.extras import needed_packages

_FORMAT = "{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}, {remaining} left]{postfix}"
_SECONDS_BETWEEN_LOG_LINES = 30.0


@dataclass(frozen=True, slots=True)
class Progress:
    """What happened since the last one."""

    size: int
    """Bytes of input read."""

    text_bytes: int
    documents: int
    bad: int


class ProgressBar:
    """A bar over the bytes of the input, with the speed in bytes of text.

    On a terminal it is drawn in place; into a log it writes a line every half minute.

    Args:
        total: Bytes of input.
        done: Those that an earlier run has read.
    """

    def __init__(self, *, total: int, done: int) -> None:
        with needed_packages("the progress bar"):
            from tqdm import tqdm
        self._bar = tqdm(
            total=total,
            initial=done,
            unit="B",
            unit_scale=True,
            bar_format=_FORMAT,
            mininterval=0.2 if sys.stderr.isatty() else _SECONDS_BETWEEN_LOG_LINES,
        )
        self._start = time.monotonic()
        self._text_bytes = 0
        self._documents = 0
        self._bad = 0

    def add(self, progress: Progress) -> None:
        """Count what was done."""
        self._text_bytes += progress.text_bytes
        self._documents += progress.documents
        self._bad += progress.bad
        self._bar.set_postfix_str(self._summary(), refresh=False)
        self._bar.update(progress.size)

    def _summary(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        bad = f", {self._bad:,} bad" if self._bad else ""
        speed = self._text_bytes / seconds / 1e6
        return f"{speed:.1f} MB/s of text, {self._documents:,} documents{bad}"

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()

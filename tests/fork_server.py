"""Processes that begin with the imports done."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext
from typing import Final

_PRELOADED: Final = ["megatron_ext.training.distill", "tests.fork_server_modules"]
"""What most processes of tests need: importing megatron-core takes seconds."""


def fork_server() -> ForkServerContext:
    """The one server that a test process forks from; whoever comes first starts it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context

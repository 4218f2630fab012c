"""Processes that begin with the imports done."""

import multiprocessing

_PRELOADED = ["megatron_ext.training.distill", "tests.fork_server_modules"]
"""What most processes of tests need: importing megatron-core takes seconds."""


def fork_server():
    """The one server that a test process forks from; whoever comes first starts it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context

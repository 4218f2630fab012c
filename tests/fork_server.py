"""Processes that begin with the imports done: importing megatron-core takes seconds."""

import multiprocessing


def fork_server():
    """The one server that a test process forks from; whoever comes first starts it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fork_server_modules"])
    return context

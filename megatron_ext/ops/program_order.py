"""Programs of one launch that wait for others of it, in Triton.

A program that waits only for lower tickets always gets on: tickets are drawn as programs start, so
that a lower one is running or has ended. What a program stored before it arrived is seen by all
that have waited for it.
"""

import triton
import triton.language as tl


@triton.jit
def ticket_of(counter_ptr):
    """Number of this program in the order in which those of the launch have started, from 0."""
    return tl.atomic_add(counter_ptr, 1, sem="relaxed")


@triton.jit
def arrive(counter_ptr):
    """Say that this program is done with what others wait for; how many were before it."""
    # All threads' stores come before the one thread that counts.
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
    tl.debug_barrier()
    return before


@triton.jit
def wait_for(counter_ptr, count):
    """Wait until ``count`` programs have arrived."""
    arrived = tl.atomic_add(counter_ptr, 0, sem="acquire")
    while arrived < count:
        arrived = tl.atomic_add(counter_ptr, 0, sem="acquire")
    tl.debug_barrier()

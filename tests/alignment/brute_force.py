"""The chunks of two tokenizations by their definition, over sets of bytes."""

import numpy as np


def brute_force_chunks(student_ends, teacher_ends):
    """Token sets of each chunk: tokens that share bytes belong together, directly or not.

    A group is a chunk when both of its sides are the same set of bytes.
    """
    groups = []
    for side, ends in enumerate((student_ends, teacher_ends)):
        start = 0
        for token, end in enumerate(ends):
            group = ([set(), set()], [set(), set()])
            group[0][side].add(token)
            group[1][side].update(range(start, end))
            start = max(start, end)
            if not group[1][side]:
                continue
            touching = [other for other in groups if other[1][1 - side] & group[1][side]]
            for other in touching:
                groups.remove(other)
                for which in (0, 1):
                    for s in (0, 1):
                        group[which][s].update(other[which][s])
            groups.append(group)
    groups = [group for group in groups if group[1][0] == group[1][1]]
    return [tuple(group[0]) for group in sorted(groups, key=lambda group: min(group[0][0]))]


def chunks_of(alignment):
    """Token sets of each chunk by chunk id."""
    return [
        tuple(
            set(np.flatnonzero(ids == chunk).tolist())
            for ids in (alignment.student_chunk_id, alignment.teacher_chunk_id)
        )
        for chunk in range(alignment.chunk_count)
    ]

"""The chunks of two tokenizations by their definition, over sets of bytes."""

import numpy as np

from megatron_ext.constants import NO_CHUNK


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


def assert_spans_of_chunks(alignment):
    """Spans ascend, and each starts and ends with a token of its chunk."""
    for spans, ids in (
        (alignment.student_spans, alignment.student_chunk_id),
        (alignment.teacher_spans, alignment.teacher_chunk_id),
    ):
        assert spans.shape == (alignment.chunk_count, 2)
        assert (spans[:, 0] < spans[:, 1]).all()
        assert (spans[1:, 0] >= spans[:-1, 1]).all()
        for chunk, (start, stop) in enumerate(spans.tolist()):
            assert ids[start] == ids[stop - 1] == chunk
            assert set(ids[start:stop].tolist()) <= {chunk, NO_CHUNK}


def brute_force_segments(student, teacher, pairs):
    """Groups of tokens that share places of ranges, where both sides fill the same places.

    ``pairs`` are ranges of bytes ``[[start, stop], [start, stop]]`` that correspond byte for byte.
    """
    pairs, groups = _joined(pairs), []
    for side, ends in enumerate((student, teacher)):
        start = 0
        for token, end in enumerate(ends.tolist()):
            places = {
                (index, byte - ranges[side][0])
                for index, ranges in enumerate(pairs)
                for byte in range(start, end)
                if ranges[side][0] <= byte < ranges[side][1]
            }
            whole = len(places) == end - start and len({index for index, _ in places}) == 1
            start = end
            if not places:
                continue
            # A token that is not wholly inside one range spoils the group of what it touches.
            group = [[set(), set()], [set(), set()], whole]
            group[0][side].add(token)
            group[1][side] |= places
            for other in [other for other in groups if other[1][1 - side] & places]:
                groups.remove(other)
                group[2] &= other[2]
                for which in (0, 1):
                    for s in (0, 1):
                        group[which][s] |= other[which][s]
            groups.append(group)
    groups = [group for group in groups if group[2] and group[1][0] == group[1][1]]
    return [tuple(group[0]) for group in sorted(groups, key=lambda group: min(group[0][0]))]


def _joined(pairs):
    """Ranges that touch on both sides as one."""
    merged = []
    for own, other in pairs:
        if merged and merged[-1][0][1] == own[0] and merged[-1][1][1] == other[0]:
            merged[-1] = [[merged[-1][0][0], own[1]], [merged[-1][1][0], other[1]]]
        else:
            merged.append([own, other])
    return merged


def assert_swapped(forward, backward):
    """Spans and ids of the sides have changed places."""
    for name in ("spans", "chunk_id"):
        for own, other in (("student", "teacher"), ("teacher", "student")):
            first, second = getattr(forward, f"{own}_{name}"), getattr(backward, f"{other}_{name}")
            assert np.array_equal(first, second)

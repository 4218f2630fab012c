"""Projections like those of real pairs: exact pairs, spelled tokens, tokens without a row."""

import numpy as np

from megatron_ext.projection import SparseProjection


def random_pair(seed, *, students=90, teachers=120, common=50, popular=4):
    """``common`` exact pairs; half of the other student tokens spelled by 2 or 3 teacher tokens,
    one of them among the ``popular`` ones; the rest empty."""
    generator = np.random.default_rng(seed)
    student_ids = generator.permutation(students)
    teacher_ids = generator.permutation(teachers)
    rows = student_ids[:common].tolist()
    columns = teacher_ids[:common].tolist()
    weights = [1.0] * common
    is_exact_row = np.zeros(students, dtype=np.bool_)
    is_exact_row[rows] = True
    for student in student_ids[common : (common + students) // 2].tolist():
        count = int(generator.integers(1, 3))
        spelled = {int(teacher_ids[generator.integers(popular)])}
        spelled |= set(generator.choice(teachers - teachers // 4, count).tolist())
        rows += [student] * len(spelled)
        columns += sorted(spelled)
        weights += (0.9 * 0.1 ** np.arange(len(spelled))).tolist()
    return SparseProjection.from_entries(
        rows,
        columns,
        weights,
        (students, teachers),
        {"student_fingerprint": f"s{seed}", "teacher_fingerprint": f"t{seed}", "method": "none"},
        is_exact_row=is_exact_row,
    )

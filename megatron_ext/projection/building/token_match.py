"""Which teacher token is a student token. V vocabularies Vs and Vt."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_ext.projection.building.speller import Speller

NO_MATCH: Final = -1


def match_ordinary_tokens(student: Speller, teacher: Speller) -> NDArray[np.int64]:
    """Teacher id [Vs] with the same bytes as each student id, ``NO_MATCH`` where it has none."""
    ids = (teacher.id_of(token) if token else None for token in student.tokens)
    return np.fromiter(
        (NO_MATCH if token_id is None else token_id for token_id in ids),
        dtype=np.int64,
        count=len(student.tokens),
    )


def emitted_tokens(speller: Speller) -> NDArray[np.bool_]:
    """[V] ids that have bytes, and of several ids with the same bytes only the emitted one."""
    emitted = np.zeros(len(speller.tokens), dtype=np.bool_)
    emitted[list(speller.emitted_ids)] = True
    return emitted

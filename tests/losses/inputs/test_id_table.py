from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.losses import IdTable
from megatron_ext.projection.layout import VocabularyOrder

ORDER = VocabularyOrder(ids=np.array([3, 0, 2, 1, 4, 5]), vocab_size=4, rank_count=2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_ids_are_looked_up_and_what_is_no_id_stays(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 1, 2, 3], [IGNORE_INDEX, -1, 5, 3]], dtype=dtype)
    places = IdTable.of(ORDER).places_of(ids)
    assert places.dtype == dtype
    assert places.tolist() == [[1, 3, 2, 0], [IGNORE_INDEX, -1, 5, 0]]
    assert ids.tolist()[0] == [0, 1, 2, 3]


def test_no_ids_have_no_places() -> None:
    assert IdTable.of(ORDER).places_of(torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3)

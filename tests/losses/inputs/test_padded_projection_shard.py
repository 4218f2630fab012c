"""A projection that is padded to the models' heads, cut to the columns of a rank."""

import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses import ProjectionShard
from megatron_ext.projection import SparseProjection


def test_padding_of_a_projection_changes_nothing_of_a_shard():
    projection = SparseProjection.from_entries([0, 1, 1, 2], [2, 0, 1, 3], [1, 1, 3, 1], (3, 5))
    shards = {
        "student_shard": VocabShard(start=2, stop=4, vocab_size=3),
        "teacher_shard": VocabShard(start=3, stop=6, vocab_size=5),
    }
    plain = ProjectionShard.from_projection(projection, **shards)
    padded = ProjectionShard.from_projection(projection.padded(8, 8), **shards)
    assert plain.weight.to_dense().tolist() == [[0, 0, 0, 1, 0], [0, 0, 0, 0, 0]]
    for name in ("weight", "weight_transposed", "row_mass", "reachable"):
        left, right = (getattr(shard, name) for shard in (plain, padded))
        left, right = (t.to_dense() if t.layout == torch.sparse_csr else t for t in (left, right))
        assert torch.equal(left, right)

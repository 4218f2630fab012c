"""What finished runs came to, and how far the same run may be off under another layout."""

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_ext.training.metrics import read_metrics, without_measurements

# fp32 sums in another order.
LOSS_TOLERANCE = 1e-5

# The same, a few ulps in each gradient, which AdamW turns into at most a small share of one step of
# size lr = 1e-3 where a gradient is itself near rounding.
PARAMETER_TOLERANCE = 2e-5

# megatron-core takes each tensor's norm with torch.norm, whose fp32 sum over a vocabulary's rows is
# off by some 1e-5 on the CPU; a shard, being shorter, is off by less.
GRADIENT_NORM_TOLERANCE = 1e-4


def tensors_of(run, iteration=2):
    """Those of a checkpoint by name, whole, the optimizer's too; without any process group."""
    reader = FileSystemReader(str(run / "checkpoints" / f"iter_{iteration:07d}"))
    stored = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(it.size, dtype=it.properties.dtype)
        for name, it in stored.items()
        if isinstance(it, TensorStorageMetadata)
    }
    load(state, storage_reader=reader)
    return state


def weights_of(run, iteration=2):
    """The tensors of a checkpoint that are not the optimizer's."""
    tensors = tensors_of(run, iteration)
    return {name: it for name, it in tensors.items() if not name.startswith("optimizer")}


def assert_same_weights(run, expected, iteration=2):
    """To rounding; vocabularies may be padded to different numbers of rows."""
    ours, theirs = weights_of(run, iteration), weights_of(expected, iteration)
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        rows = min(len(weight), len(ours[name]))
        torch.testing.assert_close(
            ours[name][:rows], weight[:rows], rtol=0, atol=PARAMETER_TOLERANCE, msg=name
        )


def assert_identical(run, expected, iteration=2):
    """Metrics but for what time took, and every tensor of a checkpoint, bit for bit."""
    ours, theirs = (map(without_measurements, read_metrics(path)) for path in (run, expected))
    assert [*ours] == [*theirs]
    found, whole = tensors_of(run, iteration), tensors_of(expected, iteration)
    assert found.keys() == whole.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, whole[name]), name


def assert_same_numbers(rows, expected, names, *, exact=()):
    """To rounding, of rows of metrics; ``grad_norm`` is compared everywhere."""
    assert len(rows) == len(expected)
    for row, its in zip(rows, expected, strict=True):
        for name in exact:
            assert row.get(name) == its.get(name), name
        for name in names:
            if its[name] is None:
                assert row[name] is None, name
            else:
                assert row[name] == pytest.approx(its[name], rel=LOSS_TOLERANCE), name
        assert row["grad_norm"] == pytest.approx(its["grad_norm"], rel=GRADIENT_NORM_TOLERANCE)

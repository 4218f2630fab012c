"""Two processes share memory only where one reads what the other wrote."""

import inspect
import json
import threading
import time
from unittest.mock import patch

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from megatron_ext.teachers import channels as cuda_ipc
from megatron_ext.teachers.channels import (
    FLIGHT,
    ChannelOffers,
    OpenSegments,
    SegmentRing,
    SharedMemoryChannel,
    choose,
)
from tests.teachers.stand_in_teacher import CPU, HIDDEN

MIB = 1 << 20


def test_shared_memory_is_chosen_where_its_bytes_can_be_read():
    offers = ChannelOffers(HIDDEN, CPU)
    assert list(offers.values) == ["shared_memory"]
    assert choose(json.loads(json.dumps(offers.values)), CPU) == "shared_memory"


@pytest.mark.parametrize(
    "change",
    [
        lambda its: its.update(content="00" * 64),
        lambda its: its["segment"].update(descriptor=100_000),
        lambda its: its["segment"].update(size=32),
        lambda its: its["segment"].pop("process"),
        lambda its: its.update(segment=None),
    ],
    ids=["other bytes", "no such memory", "another size", "no process", "nothing"],
)
def test_what_cannot_be_read_goes_through_the_connection(change):
    offers = ChannelOffers(HIDDEN, CPU)
    change(offers.values["shared_memory"])
    assert choose(offers.values, CPU) == FLIGHT
    assert choose({}, CPU) == FLIGHT


def test_a_ring_has_two_segments_and_waits_for_one_to_come_back():
    channel = SharedMemoryChannel()
    ring, there = SegmentRing(channel, CPU, timeout_s=30), OpenSegments(channel, CPU)
    lent = [ring.take(10), ring.take(MIB)]
    for its in lent:
        its.segment.memory[:10].fill_(its.number + 1)
        values = {"numbers": ring.numbers, "description": its.segment.description}
        assert there.memory(its.number, values)[:10].tolist() == [its.number + 1] * 10
    returned = threading.Timer(0.3, ring.give_back, (lent[0].number,))
    returned.start()
    started = time.monotonic()
    assert ring.take(20).number == lent[0].number
    assert time.monotonic() - started > 0.2
    # What is too small makes room, and the other side forgets it.
    ring.give_back(lent[0].number)
    larger = ring.take(5 * MIB)
    assert larger.segment.memory.numel() >= 5 * MIB
    assert ring.numbers == [lent[1].number, larger.number]
    with pytest.raises(KeyError):
        there.memory(lent[0].number, {"numbers": ring.numbers})


def test_a_ring_that_gets_nothing_back_gives_up_and_one_that_is_closed_at_once():
    ring = SegmentRing(SharedMemoryChannel(), CPU, timeout_s=0.2)
    ring.take(1)
    ring.take(1)
    with pytest.raises(OSError, match="does not give memory back"):
        ring.take(1)
    ring = SegmentRing(SharedMemoryChannel(), CPU, timeout_s=60)
    ring.take(1)
    ring.take(1)
    closed = threading.Timer(0.2, ring.close)
    closed.start()
    with pytest.raises(OSError, match="does not give memory back"):
        ring.take(1)


def test_handles_of_a_gpu_travel_as_plain_values_in_the_order_that_torch_takes():
    # No GPU here: what torch gives for one, and what it is given back.
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    given = dict.fromkeys(names, None) | {
        "tensor_cls": torch.Tensor,
        "tensor_size": (6,),
        "tensor_stride": (1,),
        "tensor_offset": 0,
        "storage_cls": torch.storage.TypedStorage,
        "dtype": torch.uint8,
        "storage_device": 1,
        "storage_handle": b"\x00handle",
        "storage_size_bytes": 6,
        "storage_offset_bytes": 512,
        "requires_grad": False,
        "ref_counter_handle": b"counter",
        "ref_counter_offset": 3,
        "event_handle": b"event\xff",
        "event_sync_required": True,
    }
    assert list(given) == names
    # The other process sees the same GPU as its second.
    uuids = {torch.device("cpu"): "GPU-b", 0: "GPU-a", 1: "GPU-b"}
    with (
        patch.object(cuda_ipc, "reduce_tensor", lambda _: (None, tuple(given.values()))),
        patch.object(cuda_ipc, "rebuild_cuda_tensor", lambda *values: values),
        patch.object(cuda_ipc, "_identity", uuids.__getitem__),
        patch.object(torch.cuda, "device_count", return_value=2),
    ):
        channel = cuda_ipc.CudaIpcChannel()
        description = json.loads(json.dumps(channel.create(6, CPU).description))
        assert channel.open(description, CPU) == tuple(given.values())
        with pytest.raises(OSError, match="does not see the device"):
            channel.open({**description, "device": "GPU-c"}, CPU)

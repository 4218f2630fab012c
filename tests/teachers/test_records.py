"""Targets of tokens come back from their records, to the precision of the form."""

import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pyarrow
import pytest
import torch

from megatron_ext.errors import DistributedError, LossError
from megatron_ext.teachers.base import TokenRows
from megatron_ext.teachers.flight import Frame, empty, from_bytes, receive, to_bytes, to_chunks
from megatron_ext.teachers.formed_targets import from_records, to_records
from megatron_ext.teachers.messages import Request
from megatron_ext.teachers.server_limits import ServerLimits
from megatron_ext.teachers.target_form import TargetForm, pack_ids, packed_width, unpack_ids

VOCAB = 262_144
LABEL = TargetForm(kind="label", precision="fp32", count=0, vocab_size=VOCAB)
TOPK = TargetForm(kind="topk", precision="fp16", count=64, vocab_size=VOCAB)
HIDDEN = TargetForm(kind="hidden", precision="bf16", count=12, vocab_size=VOCAB)


def top_k(rows, *, precision="fp32"):
    logits = torch.randn(rows, 300, generator=torch.Generator().manual_seed(1)) * 4
    top = logits.topk(10)
    peak = top.values[:, :1]
    form = TargetForm(kind="topk", precision=precision, count=10, vocab_size=300)
    return form, {
        "topk_ids": top.indices,
        "topk_logits": top.values - peak,
        "log_normaliser": (logits - peak).logsumexp(dim=-1),
        "label_log_probs": logits.log_softmax(dim=-1)[:, 7],
    }


def test_a_top_k_in_fp32_comes_back_bit_for_bit():
    form, fields = top_k(40)
    records = to_records(fields, form)
    assert records.shape == (40, form.bytes_per_token)
    found = from_records(records, form)
    ids, order = fields["topk_ids"].sort(dim=-1)
    assert torch.equal(found["topk_ids"], ids)
    assert torch.equal(found["topk_logits"], fields["topk_logits"].gather(-1, order))
    for name in ("log_normaliser", "label_log_probs"):
        assert torch.equal(found[name], fields[name])


@pytest.mark.parametrize(("precision", "digits"), [("fp16", 11), ("bf16", 8)])
def test_a_rounded_top_k_keeps_the_mass_of_all_other_tokens(precision, digits):
    form, fields = top_k(40, precision=precision)
    found = from_records(to_records(fields, form), form)
    exact, kept = (
        (f["topk_logits"].double(), f["log_normaliser"].double()) for f in (fields, found)
    )
    rest = [1 - (logits - norm[:, None]).exp().sum(dim=-1) for logits, norm in (exact, kept)]
    # A mass relative to the rounded total, which differs by the rounding of the numbers.
    torch.testing.assert_close(rest[1], rest[0], rtol=2.0**-digits * 8, atol=1e-6)
    order = fields["topk_ids"].argsort(dim=-1)
    torch.testing.assert_close(kept[0], exact[0].gather(-1, order), rtol=2.0**-digits, atol=0)


def test_hidden_states_are_rounded_once():
    hidden = torch.randn(6, HIDDEN.count)
    found = from_records(to_records({"hidden": hidden}, HIDDEN), HIDDEN)["hidden"]
    assert torch.equal(found, hidden.bfloat16())


def test_what_a_precision_cannot_hold_is_refused():
    form = dataclasses.replace(HIDDEN, precision="fp16")
    with pytest.raises(LossError, match="wider precision"):
        to_records({"hidden": torch.full((1, HIDDEN.count), 1e6)}, form)


def test_the_bytes_of_a_token_are_those_of_its_parts():
    assert LABEL.bytes_per_token == 8
    assert TOPK.bytes_per_token == 112 + 64 * 2 + 4 + 4
    assert HIDDEN.bytes_per_token == 2 * HIDDEN.count


TENSORS = {
    "ids": torch.arange(12, dtype=torch.int32).view(3, 4),
    "turned": torch.randn(5, 7).t(),
    "half": torch.randn(3, 2).half(),
    "brain": torch.randn(9).bfloat16(),
    "none": torch.empty(0, 4),
    "one": torch.tensor(7),
    "flags": torch.tensor([True, False]),
    "large": torch.randint(256, ((9 << 20) + 3,), dtype=torch.uint8),
}
FRAME = Frame("answer", {"number": 3, "name": "größe", "list": [1, None]}, TENSORS)


def test_a_frame_comes_back_from_its_bytes():
    assert_same(from_bytes(to_bytes(FRAME)))


def test_a_frame_comes_back_from_its_chunks_and_their_bytes_are_told():
    stored = [
        SimpleNamespace(data=batch, app_metadata=pyarrow.py_buffer(metadata))
        for batch, metadata in to_chunks(FRAME)
    ]
    assert len(stored) > len(TENSORS)
    heard = []
    reader = SimpleNamespace(read_chunk=iter(stored).__next__)
    assert_same(receive(reader, on_bytes=heard.append, allocate=empty))
    content = sum(tensor.nbytes for tensor in TENSORS.values())
    assert content < sum(heard) < content + 1000


@pytest.mark.parametrize(
    "header",
    [
        b"GET / HTTP/1.1",
        b"[]",
        json.dumps({"kind": "x", "values": {}}).encode(),
        json.dumps({"kind": "x", "values": {}, "tensors": [["a", "object", [1]]]}).encode(),
        json.dumps({"kind": "x", "values": {}, "tensors": [["a", "uint8", [-1]]]}).encode(),
        json.dumps({"kind": "x", "values": 3, "tensors": []}).encode(),
    ],
    ids=["another protocol", "no object", "no tensors", "a dtype", "a shape", "values"],
)
def test_what_is_no_frame_is_refused(header):
    content = len(header).to_bytes(8, "little") + header
    with pytest.raises(DistributedError, match="is not a frame"):
        from_bytes(content)


def test_a_tensor_that_ends_early_is_no_frame():
    with pytest.raises(DistributedError, match="is not a frame"):
        from_bytes(to_bytes(FRAME)[:-1])


def assert_same(found):
    assert (found.kind, found.values) == (FRAME.kind, FRAME.values)
    assert list(found.tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert found.tensors[name].shape == tensor.shape
        assert torch.equal(found.tensors[name], tensor)


@pytest.mark.parametrize(
    ("vocab_size", "count"),
    [
        (1, 1),
        (7, 7),
        (100, 99),
        (32_000, 1),
        (131_073, 32),
        (151_936, 64),
        (262_144, 64),
        (262_144, 1024),
        (1_000_003, 50),
    ],
)
def test_ids_come_back_whatever_the_vocabulary(vocab_size, count):
    rng = np.random.default_rng(vocab_size + count)
    rows = [np.sort(rng.choice(vocab_size, count, replace=False)) for _ in range(20)]
    rows += [np.arange(count), np.arange(vocab_size - count, vocab_size)]
    ids = np.stack(rows).astype(np.int64)
    packed = pack_ids(ids, vocab_size)
    assert packed.shape == (len(ids), packed_width(count, vocab_size))
    assert np.array_equal(unpack_ids(packed, count, vocab_size), ids)


def test_an_id_of_64_in_262144_takes_14_bits():
    assert packed_width(64, 262_144) * 8 == 64 * 14
    for count in (1, 16, 64, 300):
        bound = math.ceil(count * (2 + math.log2(262_144 / count)) / 8) + 2
        assert packed_width(count, 262_144) <= bound


@pytest.mark.parametrize("behind", [3, 2000])
def test_a_row_may_be_as_long_as_the_text_and_its_padding(behind):
    positions = torch.arange(50 + behind)[None]
    rows = TokenRows(
        tokens=positions % 7, position_ids=positions, labels=positions % 7, cu_seqlens=None
    )
    frame = Request(0, [rows]).to_frame("topk")
    limits = ServerLimits(length=50)
    if behind == 3:
        # Context parallelism pads rows to lengths that it divides.
        assert torch.equal(Request.of(frame, "topk", limits).rows[0].tokens, rows.tokens)
    else:
        with pytest.raises(DistributedError, match="positions of a row"):
            Request.of(frame, "topk", limits)

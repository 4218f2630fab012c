"""Targets of tokens come back from their records, to the precision of the form."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_ext.errors import LossError
from megatron_ext.teachers.formed_targets import from_records, to_records
from megatron_ext.teachers.target_form import TargetForm

VOCAB = 262_144
LABEL = TargetForm(kind="label", precision="fp32", count=0, vocab_size=VOCAB)
TOPK = TargetForm(kind="topk", precision="fp16", count=64, vocab_size=VOCAB)
HIDDEN = TargetForm(kind="hidden", precision="bf16", count=12, vocab_size=VOCAB)


def top_k(rows: int, *, precision: str = "fp32") -> tuple[TargetForm, dict[str, torch.Tensor]]:
    """Of random logits over a vocabulary of 300."""
    logits = torch.randn(rows, 300, generator=torch.Generator().manual_seed(1)) * 4
    top = logits.topk(10)
    peak = top.values[:, :1]
    form = TargetForm(kind="topk", precision=precision, count=10, vocab_size=300)  # type: ignore[arg-type]
    return form, {
        "topk_ids": top.indices,
        "topk_logits": top.values - peak,
        "log_normaliser": (logits - peak).logsumexp(dim=-1),
        "label_log_probs": logits.log_softmax(dim=-1)[:, 7],
    }


def test_a_top_k_in_fp32_comes_back_bit_for_bit() -> None:
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
def test_a_rounded_top_k_keeps_the_mass_of_all_other_tokens(precision: str, digits: int) -> None:
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


def test_hidden_states_are_rounded_once() -> None:
    hidden = torch.randn(6, HIDDEN.count)
    found = from_records(to_records({"hidden": hidden}, HIDDEN), HIDDEN)["hidden"]
    assert torch.equal(found, hidden.bfloat16())


def test_what_a_precision_cannot_hold_is_refused() -> None:
    form = dataclasses.replace(HIDDEN, precision="fp16")
    with pytest.raises(LossError, match="wider precision"):
        to_records({"hidden": torch.full((1, HIDDEN.count), 1e6)}, form)


def test_the_bytes_of_a_token_are_those_of_its_parts() -> None:
    assert LABEL.bytes_per_token == 8
    assert TOPK.bytes_per_token == 112 + 64 * 2 + 4 + 4
    assert HIDDEN.bytes_per_token == 2 * HIDDEN.count

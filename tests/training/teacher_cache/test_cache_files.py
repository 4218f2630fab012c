"""Records come back from a cache as they were written, and no other cache's are taken for them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext.errors import CheckpointError, ConfigError, DataError, LossError
from megatron_ext.training.teacher_cache.files.form import CacheForm
from megatron_ext.training.teacher_cache.files.manifest import Manifest
from megatron_ext.training.teacher_cache.files.records import from_records, to_records
from megatron_ext.training.teacher_cache.files.shard_file import Window, write_shard
from megatron_ext.training.teacher_cache.files.target_cache import TargetCache

VOCAB = 262_144
LABEL = CacheForm(kind="label", precision="fp32", count=0, vocab_size=VOCAB)
TOPK = CacheForm(kind="topk", precision="fp16", count=64, vocab_size=VOCAB)
HIDDEN = CacheForm(kind="hidden", precision="bf16", count=12, vocab_size=VOCAB)
LENGTHS = ((5, 1), (9,), (), (3, 30))
"""Tokens of the windows of each file."""


def top_k(rows: int, *, precision: str = "fp32") -> tuple[CacheForm, dict[str, torch.Tensor]]:
    """Of random logits over a vocabulary of 300."""
    logits = torch.randn(rows, 300, generator=torch.Generator().manual_seed(1)) * 4
    top = logits.topk(10)
    peak = top.values[:, :1]
    form = CacheForm(kind="topk", precision=precision, count=10, vocab_size=300)  # type: ignore[arg-type]
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


@pytest.mark.parametrize("form", [LABEL, TOPK, HIDDEN], ids=lambda form: form.kind)
def test_files_have_the_bytes_that_the_formula_says_and_give_every_window_back(
    form: CacheForm, tmp_path: Path
) -> None:
    manifest, windows = write_cache(tmp_path, form)
    sizes = [(tmp_path / name).stat().st_size for name in manifest.shards]
    tokens, count = sum(map(sum, LENGTHS)), sum(map(len, LENGTHS))
    assert sum(sizes) == manifest.size == 64 * 4 + 24 * count + form.bytes_per_token * tokens
    cache = TargetCache(tmp_path)
    for window in reversed(windows):
        assert np.array_equal(cache.records(window.key, len(window.records)), window.records)
    with pytest.raises(DataError, match="no targets of a window"):
        cache.records(b"\xff" * 16, 5)


def test_the_bytes_of_a_token_are_those_of_its_parts() -> None:
    assert LABEL.bytes_per_token == 8
    assert TOPK.bytes_per_token == 112 + 64 * 2 + 4 + 4
    assert HIDDEN.bytes_per_token == 2 * HIDDEN.count


@pytest.mark.parametrize("left", [0, 40, 64, 70, -1])
def test_a_file_that_is_cut_off_is_refused(left: int, tmp_path: Path) -> None:
    manifest, _ = write_cache(tmp_path, LABEL)
    path = tmp_path / manifest.shards[1]
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(CheckpointError, match=f"{path.name}.*cache-teacher again"):
        TargetCache(tmp_path)


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    manifest, _ = write_cache(tmp_path, LABEL)
    (tmp_path / manifest.shards[3]).unlink()
    with pytest.raises(CheckpointError, match=manifest.shards[3]):
        TargetCache(tmp_path)


def test_a_file_of_another_cache_is_refused(tmp_path: Path) -> None:
    manifest, _ = write_cache(tmp_path / "own", LABEL)
    write_cache(tmp_path / "other", LABEL, weights="other")
    name = manifest.shards[0]
    (tmp_path / "own" / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(CheckpointError, match="of another cache"):
        TargetCache(tmp_path / "own")


def test_bytes_that_changed_are_noticed_where_they_are_read(tmp_path: Path) -> None:
    manifest, windows = write_cache(tmp_path, TOPK)
    path = tmp_path / manifest.shards[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    cache = TargetCache(tmp_path)
    assert len(cache.records(windows[0].key, 5)) == 5
    with pytest.raises(CheckpointError, match="damaged"):
        cache.records(windows[1].key, 1)


def test_a_cache_that_is_not_finished_is_refused(tmp_path: Path) -> None:
    manifest, _ = write_cache(tmp_path, LABEL)
    dataclasses.replace(manifest, is_complete=False).save(tmp_path)
    with pytest.raises(CheckpointError, match="not finished; got 4 of 4 files"):
        TargetCache(tmp_path)
    with pytest.raises(ConfigError, match="there is no cache of a teacher"):
        TargetCache(tmp_path / "elsewhere")


def test_what_a_cache_is_of_is_compared_key_by_key(tmp_path: Path) -> None:
    manifest, _ = write_cache(tmp_path, LABEL)
    own = dict(manifest.identity)
    manifest.check_same(own | {"data": ["b"]}, tmp_path)
    with pytest.raises(ConfigError, match="another data; got b, c"):
        manifest.check_same(own | {"data": ["b", "c"]}, tmp_path)
    with pytest.raises(ConfigError, match="another weights"):
        manifest.check_same(own | {"weights": "other"}, tmp_path)


def write_cache(
    folder: Path, form: CacheForm, *, weights: str = "own"
) -> tuple[Manifest, list[Window]]:
    """A finished cache of random records in four files."""
    rng = np.random.default_rng(3)
    manifest = Manifest(
        form=form,
        identity={"weights": weights, "data": ["a", "b"]},
        shards=tuple(f"targets-{number}.bin" for number in range(len(LENGTHS))),
        block_bytes=1,
    )
    written = []
    for name, lengths in zip(manifest.shards, LENGTHS, strict=True):
        windows = [
            Window(rng.bytes(16), rng.integers(256, size=(n, form.bytes_per_token), dtype=np.uint8))
            for n in lengths
        ]
        write_shard(
            folder / name,
            windows,
            bytes_per_token=form.bytes_per_token,
            digest=manifest.digest,
        )
        written += windows
    manifest = manifest.completed(
        windows=len(written), tokens=sum(len(window.records) for window in written)
    )
    manifest.save(folder)
    return manifest, written

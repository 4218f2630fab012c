"""Records come back from a cache as they were written, and no other cache's are taken for them."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_ext.errors import CheckpointError, ConfigError, DataError
from megatron_ext.teachers.target_form import TargetForm
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.training.configuration.config import ModelConfig
from megatron_ext.training.teachers.identity import server_identity
from megatron_ext.training.teachers.shard_file import Window, write_shard
from megatron_ext.training.teachers.target_cache import Manifest, TargetCache

VOCAB = 262_144
LABEL = TargetForm(kind="label", precision="fp32", count=0, vocab_size=VOCAB)
TOPK = TargetForm(kind="topk", precision="fp16", count=64, vocab_size=VOCAB)
HIDDEN = TargetForm(kind="hidden", precision="bf16", count=12, vocab_size=VOCAB)
TOKENIZERS = {"teacher tokenizer": "t", "other tokenizers": ["s"]}
LENGTHS = ((5, 1), (9,), (), (3, 30))
"""Tokens of the windows of each file."""


@pytest.mark.parametrize("form", [LABEL, TOPK, HIDDEN], ids=lambda form: form.kind)
def test_files_have_the_bytes_that_the_formula_says_and_give_every_window_back(form, tmp_path):
    manifest, windows = write_cache(tmp_path, form)
    sizes = [(tmp_path / name).stat().st_size for name in manifest.shards]
    tokens, count = sum(map(sum, LENGTHS)), sum(map(len, LENGTHS))
    assert sum(sizes) == manifest.size == 64 * 4 + 24 * count + form.bytes_per_token * tokens
    cache = TargetCache(tmp_path)
    for window in reversed(windows):
        assert np.array_equal(cache.records(window.key, len(window.records)), window.records)
    with pytest.raises(DataError, match="no targets of a window"):
        cache.records(b"\xff" * 16, 5)


@pytest.mark.parametrize("left", [0, 40, 64, 70, -1])
def test_a_file_that_is_cut_off_is_refused(left, tmp_path):
    manifest, _ = write_cache(tmp_path, LABEL)
    path = tmp_path / manifest.shards[1]
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(CheckpointError, match=f"{path.name}.*cache-teacher again"):
        TargetCache(tmp_path)


def test_a_file_that_is_missing_is_refused(tmp_path):
    manifest, _ = write_cache(tmp_path, LABEL)
    (tmp_path / manifest.shards[3]).unlink()
    with pytest.raises(CheckpointError, match=manifest.shards[3]):
        TargetCache(tmp_path)


def test_a_file_of_another_cache_is_refused(tmp_path):
    manifest, _ = write_cache(tmp_path / "own", LABEL)
    write_cache(tmp_path / "other", LABEL, weights="other")
    name = manifest.shards[0]
    (tmp_path / "own" / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(CheckpointError, match="of another cache"):
        TargetCache(tmp_path / "own")


def test_bytes_that_changed_are_noticed_where_they_are_read(tmp_path):
    manifest, windows = write_cache(tmp_path, TOPK)
    path = tmp_path / manifest.shards[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    cache = TargetCache(tmp_path)
    assert len(cache.records(windows[0].key, 5)) == 5
    with pytest.raises(CheckpointError, match="damaged"):
        cache.records(windows[1].key, 1)


def test_a_cache_that_is_not_finished_is_refused(tmp_path):
    manifest, _ = write_cache(tmp_path, LABEL)
    dataclasses.replace(manifest, is_complete=False).save(tmp_path)
    with pytest.raises(CheckpointError, match="not finished; got 4 of 4 files"):
        TargetCache(tmp_path)
    with pytest.raises(ConfigError, match="there is no cache of a teacher"):
        TargetCache(tmp_path / "elsewhere")


def test_what_a_cache_is_of_is_compared_key_by_key(tmp_path):
    manifest, _ = write_cache(tmp_path, LABEL)
    own = dict(manifest.identity)
    manifest.check_same(own | {"data": ["b"]}, tmp_path)
    # More models, of tokenizers that cut the texts already; and one of a tokenizer that does not.
    manifest.check_same(own | {"other tokenizers": ["s", "s", "t"]}, tmp_path)
    with pytest.raises(ConfigError, match="another one of the other tokenizers; got s, u"):
        manifest.check_same(own | {"other tokenizers": ["s", "u"]}, tmp_path)
    with pytest.raises(ConfigError, match="another data; got b, c"):
        manifest.check_same(own | {"data": ["b", "c"]}, tmp_path)
    with pytest.raises(ConfigError, match="another weights"):
        manifest.check_same(own | {"weights": "other"}, tmp_path)


def write_cache(folder, form, *, weights="own"):
    """A finished cache of random records in four files."""
    rng = np.random.default_rng(3)
    manifest = Manifest(
        form=form,
        identity={"weights": weights, "data": ["a", "b"]} | TOKENIZERS,
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
            folder / name, windows, bytes_per_token=form.bytes_per_token, digest=manifest.digest
        )
        written += windows
    manifest = manifest.completed(
        windows=len(written), tokens=sum(len(window.records) for window in written)
    )
    manifest.save(folder)
    return manifest, written


# Recorded before models had settings of linear attention; one that is added changes none of them.
NAMES = {
    None: "5aa2e55e9fc6061b93aece3f68b0754cb65a2180e28e78d0b0e572a4c691d5f9",
    4: "7d5f4c03c0e19cb6eddc62cdcd72ed8b395c71e07e50c1c3f68600574b85909c",
}


@pytest.mark.parametrize("num_experts", NAMES)
def test_models_are_named_as_in_the_caches_of_earlier_versions(num_experts):
    model = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2, num_experts=num_experts)
    teacher = SimpleNamespace(
        config=SimpleNamespace(model=model, weight_precision=None),
        training=SimpleNamespace(precision="fp32"),
    )
    tokenizer = build_tokenizer(TokenizerConfig(library="byte-level"))
    assert server_identity(teacher, tokenizer, "weights")["model"] == NAMES[num_experts]

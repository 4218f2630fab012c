"""No checkpoint of a stranger runs code, and no damage to one of ours is silent."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedObject
from torch.distributed.checkpoint.metadata import Metadata

from megatron_ext.errors import CheckpointError
from megatron_ext.training.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from megatron_ext.training.checkpoints.huggingface_import import lone_process
from megatron_ext.training.checkpoints.manifest import Manifest
from megatron_ext.training.checkpoints.reader import read_index
from tests.hostile.checkpoint_attacks import (
    Case,
    Victim,
    attack_all,
    damage_cases,
    forms,
    payload_cases,
    payloads,
)


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    with lone_process() as groups:
        yield Victim(tmp_path_factory.mktemp("hostile"), groups)


def test_the_payloads_run_where_nothing_stops_them(tmp_path: Path) -> None:
    import pickle

    mark = tmp_path / "ran"
    pickle.loads(payloads(mark)["os.system, protocol 4"])
    assert mark.exists()


@pytest.mark.parametrize("file", [".metadata", "common.pt", ".distcp"])
def test_no_payload_runs(victim: Victim, file: str) -> None:
    cases = [case for case in payload_cases(victim) if case.file.endswith(file)]
    assert len(cases) > 20
    for case in cases:
        kind, text = victim.attack(case)
        assert kind == "refused", (case.kind, case.file, kind, text)
        assert text.isprintable()
        assert len(text) < 1000


@pytest.mark.parametrize("file", [".metadata", "common.pt"])
def test_the_file_and_the_class_are_named(victim: Victim, file: str) -> None:
    content = forms(payloads(victim.mark)["os.system, protocol 2"])
    form = "plain" if file == ".metadata" else "archive"
    _, text = victim.attack(Case("", file, content[form], keeps_manifest=False))
    assert f"iter_0000003/{file}: the file is refused" in text
    assert "posix.system" in text


def test_every_damage_is_found(victim: Victim) -> None:
    for case in damage_cases(victim, random.Random(0), flips=1):
        kind, text = victim.attack(case)
        allowed = ("refused",) if case.keeps_manifest else ("refused", "silent")
        assert kind in allowed, (case.kind, case.file, kind, text)
        assert "\n" not in text


def test_a_missing_common_state_is_said_to_be_missing(victim: Victim) -> None:
    for keeps in (True, False):
        kind, text = victim.attack(Case("", "common.pt", None, keeps_manifest=keeps))
        assert kind == "refused"
        assert "common.pt: a file of the checkpoint is missing" in text


def test_classes_of_an_index_cannot_be_changed(tmp_path: Path) -> None:
    before = dict(vars(Metadata))
    # A class, a state (None, {"__eq__": ...}) of slots, BUILD.
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + name + b"N}(U\x01xK\x01u\x86b.")
    with pytest.raises(CheckpointError, match="a change of Metadata"):
        read_index(Manifest.of(tmp_path))
    assert dict(vars(Metadata)) == before


def test_extra_state_which_transformer_engine_unpickles_is_not_handed_on(
    victim: Victim, tmp_path: Path
) -> None:
    state = {
        name: ShardedObject(f"layer.{name}", torch.ones(3, dtype=torch.uint8), (1,), (0,))
        for name in ("_extra_state", "other")
    }
    path = save_checkpoint(tmp_path, 1, dict(state), groups=victim.groups, keep=1)
    loaded = load_checkpoint(path, dict(state))
    assert loaded["_extra_state"] is None
    assert torch.equal(loaded["other"], torch.ones(3, dtype=torch.uint8))


def test_random_cases_are_counted(victim: Victim) -> None:
    counts = attack_all(victim, 0.5, seed=0)
    assert counts["cases"] > 0
    assert counts["ran_code"] == counts["silent"] == counts["tracebacks"] == 0
    assert not counts["found"]

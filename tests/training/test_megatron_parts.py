"""The installed megatron-core has its private parts where the table says, as they are relied on."""

import inspect
import json
import re
from pathlib import Path

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.training.checkpoints.manifest import Manifest
from megatron_ext.training.checkpoints.reader import FORMAT_FILE, check_format
from megatron_ext.training.megatron_models import megatron_parts
from megatron_ext.training.megatron_models.megatron_parts import (
    MLP_SUBMODULES,
    PARTS,
    RANGE,
    SAVE_OPTIONS,
    Part,
    installed,
    of_release,
    place,
)

ROOT = Path(__file__).parents[2]
RELEASES = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")


@pytest.mark.parametrize("name", PARTS)
def test_the_installed_release_has_a_part_with_the_parameters_that_are_relied_on(name):
    found = place(name)
    if found is None:
        assert of_release(PARTS[name].places) is None
        return
    parameters = inspect.signature(found.value).parameters if callable(found.value) else ()
    missing = [each for each in PARTS[name].parameters if each not in parameters]
    assert not missing, f"megatron-core {installed()}: {found.name} has no {missing}"


def test_a_save_takes_the_options_of_its_release():
    from megatron.core import dist_checkpointing

    parameters = inspect.signature(dist_checkpointing.save).parameters
    assert of_release(SAVE_OPTIONS).keys() <= parameters.keys()
    assert ("async_strategy" in parameters) == ("async_strategy" in of_release(SAVE_OPTIONS))


def test_the_submodules_of_an_mlp_are_those_of_its_spec():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.mlp import MLPSubmodules

    mlp = get_gpt_layer_local_spec().submodules.mlp
    assert isinstance(of_release(MLP_SUBMODULES)(mlp), MLPSubmodules)


@pytest.mark.parametrize("release", [*RELEASES, "0.15.3", "0.20.0rc1", "0.100"])
def test_a_release_has_the_last_value_that_is_not_after_it(release):
    values = {first: first for first in ("0.16", "0.17", "0.19")}
    expected = {"0.15.3": "0.16", "0.16.1": "0.16", "0.17.1": "0.17", "0.18.2": "0.17"}
    assert of_release(values, release) == expected.get(release, "0.19")


def test_a_part_that_is_nowhere_is_named_with_the_releases_that_have_it(monkeypatch):
    moved = Part("the test", {"0.16": "megatron.core.utils:no_such_function"})
    monkeypatch.setattr(megatron_parts, "PARTS", {**PARTS, "moved": moved})
    with pytest.raises(
        ConfigError, match="no_such_function, which is needed for: the test"
    ) as told:
        place("moved")
    assert installed() in str(told.value)
    assert f"expected megatron-core {RANGE}" in str(told.value)


def test_a_torch_whose_ranks_cannot_load_alone_is_refused_from_0_19_on(monkeypatch):
    monkeypatch.setattr(megatron_parts.state_dict_loader, "load", lambda state: None)
    monkeypatch.setattr(megatron_parts, "installed", lambda: "0.18.2")
    megatron_parts.check_torch()
    monkeypatch.setattr(megatron_parts, "installed", lambda: "0.19.2")
    with pytest.raises(ConfigError, match=r"(?s)cannot load.*0\.19\.2, torch .*no_dist"):
        megatron_parts.check_torch()


def test_what_is_replaced_is_put_back_as_it_was():
    found = place("write_bucket")
    before = vars(found.owner)[found.name]
    assert isinstance(before, staticmethod)
    with found.replaced(lambda _: staticmethod(print)):
        assert found.value is print
    assert vars(found.owner)[found.name] is before


@pytest.mark.parametrize("common", [{}, {"common_backend": "torch", "common_backend_version": 1}])
def test_the_format_that_any_release_writes_down_is_read(tmp_path, common):
    written = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, **common}
    (tmp_path / FORMAT_FILE).write_text(json.dumps(written))
    check_format(Manifest.of(tmp_path))


def test_the_range_is_that_of_pyproject():
    bounds = set(
        re.search(r'"megatron-core(.+)"', (ROOT / "pyproject.toml").read_text())[1].split(",")
    )
    assert bounds == set(RANGE.split(","))

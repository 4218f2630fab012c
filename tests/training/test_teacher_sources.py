"""Teachers of their own sources teach the rows of these, and what they teach adds up."""

import pytest

from megatron_ext.data.global_batches import WeightedDataset
from megatron_ext.errors import ConfigError
from megatron_ext.training.configuration.config import LossConfig
from megatron_ext.training.run_sources import routes
from tests.process_group import run_ranks
from tests.training.rank_functions import _train_teacher, _trainer, train_unsaved
from tests.training.tiny_run import changed, objective_run

FILES = ("train.jsonl", "held-out.jsonl")


def config_of(folder, name, sources, **parallel):
    """One or several teachers, all of them the same model."""
    loss = LossConfig(objective="alm", options={"debias": False}, ce_weight=0.0)
    config = objective_run(folder, name, loss, micro_batch_size=1, **parallel)
    train = tuple(part for file in FILES for part in ("1", str(folder / file)))
    teachers = {
        name: changed(config.teacher, sources=tuple(str(folder / file) for file in files))
        for name, files in sources.items()
    }
    return changed(config, teacher=None, teachers=teachers, data={"train": train})


RUNS = {
    "together": {"all": ()},
    "apart": {"a": FILES[:1], "b": FILES[1:]},
    "half": {"all": (), "b": FILES[1:]},
}


def train(rank, folder, names, is_first):
    if is_first:
        _train_teacher(folder)
    return {name: train_unsaved(_trainer(config_of(folder, name, RUNS[name]))) for name in names}


@pytest.fixture(scope="module")
def runs(folder):
    (alone,) = run_ranks(1, train, folder, list(RUNS), True, timeout_s=240)
    return alone


def test_each_row_is_taught_by_the_teacher_of_its_source(runs):
    for whole, apart in zip(runs["together"], runs["apart"], strict=True):
        counts = [apart["compared/a"], apart["compared/b"]]
        assert all(counts)
        assert sum(counts) == whole["compared"]
    whole, apart = runs["together"][0], runs["apart"][0]
    total = apart["kd/a"] * apart["compared/a"] + apart["kd/b"] * apart["compared/b"]
    assert total / whole["compared"] == pytest.approx(whole["kd/all"], rel=1e-5)
    # Each teacher has the mean over its own rows.
    assert apart["kd"] == pytest.approx(apart["kd/a"] + apart["kd/b"], rel=1e-6)


def test_a_teacher_without_sources_teaches_all(runs):
    for whole, half, apart in zip(runs["together"], runs["half"], runs["apart"], strict=True):
        assert half["compared/all"] == whole["compared"]
        assert half["compared/b"] == apart["compared/b"]


SOURCES = [WeightedDataset(1.0, None, ("x",)), WeightedDataset(1.0, None, ("y",))]


def test_sources_are_found_by_their_entries():
    assert routes(SOURCES, {"a": ("x",), "b": ("x", "y"), "c": ()}) == {
        "a": frozenset({0}),
        "b": frozenset({0, 1}),
    }


@pytest.mark.parametrize(
    ("sources", "taught", "match"),
    [
        (SOURCES, {"a": ("z",)}, "does not read"),
        (SOURCES, {"a": ("x",)}, "no teacher teaches"),
        ([WeightedDataset(1.0, None, ("x", "y"))], {"a": ("x",)}, "give each file a weight"),
    ],
)
def test_sources_that_do_not_fit_are_refused(sources, taught, match):
    with pytest.raises(ConfigError, match=match):
        routes(sources, taught)

"""What a run leaves beside its checkpoints, and what it says of the text that it read."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_ext.data.global_batches import Replica
from megatron_ext.projection import SparseProjection
from megatron_ext.projection.nemo.inspection import Inspection
from megatron_ext.projection.nemo.loose_entries import LooseEntries
from megatron_ext.projection.nemo.tokenizer_pair import TokenizerPair
from megatron_ext.tokenizers import build_tokenizer
from megatron_ext.training.configuration.config import LossConfig
from megatron_ext.training.metrics import read_metrics
from megatron_ext.training.run_data import RunData
from megatron_ext.training.run_folder import LEARNED_PROJECTION_FILE
from tests.documents.indexed_files import write_ids
from tests.process_group import run_ranks
from tests.training.rank_functions import _train_teacher, _trainer
from tests.training.tiny_run import SENTENCES, TP2, changed, objective_run, student_run

TILE_ROWS = 31


def leave_results(rank, folder):
    """Runs that learn a projection, measure by tiles, and read ids; what each came to."""
    _train_teacher(folder)
    return {
        "learned": _learn_projection(folder),
        "measured": _measure(folder),
        "ids": _read_ids(folder),
    }


def _learn_projection(folder):
    """Shares after two steps, and those that a run from their file begins with."""
    loss = LossConfig(learned_projection=True, kd_weight=30.0)
    config = changed(objective_run(folder, "learned", loss, **TP2), training={"save_interval": 1})
    trainer = _trainer(config)
    start = _shares(trainer)
    trainer.train()
    file = Path(config.run_dir) / LEARNED_PROJECTION_FILE
    _of(trainer).to_projection().save(folder / f"trained-{dist.get_rank()}.safetensors")
    again = _trainer(changed(config, run_dir=str(folder / "again"), projection=str(file)))
    return {"start": start, "trained": _shares(trainer), "again": _shares(again)}


def _of(trainer):
    return trainer.step.term.constants["teacher"].learned


def _shares(trainer):
    return _of(trainer)._shares().detach().clone()


class _Watched:
    """Cross-entropy that notes of how many positions it has seen logits at once."""

    def __init__(self, objective):
        self._objective = objective
        self.rows = []

    def __call__(self, inputs):
        self.rows.append(inputs.student_logits[..., 0].numel())
        return self._objective(inputs)


def _measure(folder):
    """Held-out bits per byte of one student from whole logits and from tiles; with sequences cut
    over the ranks, too."""
    config = changed(
        student_run(folder, "measured"),
        loss={"linear": True, "linear_tile_rows": TILE_ROWS},
        student={"seq_length": 42},
        teacher={"model": {"seq_length": 54}},
        parallel={**TP2, "sequence_parallel": True},
    )
    trainer = _trainer(config)
    found = {}
    for name, linear in (("tiles", trainer.step.linear), ("whole", None)):
        watched = _Watched(trainer.step.next_token)
        step = replace(trainer.step, linear=linear, next_token=watched)
        measured = replace(trainer, step=step)._validate(trainer.data.held_out)
        found[name] = (measured, watched.rows)
    return found | {"again": _measure_again(trainer)}


def _measure_again(trainer):
    """Scores in turn of a frozen teacher and of one that changes, and how often each was asked."""
    found = {}
    for name in ("frozen", "changing"):
        asked = _Asked(trainer.teachers["teacher"])
        again = replace(trainer, teachers={"teacher": asked})
        if name == "changing":
            again.held_out_scores = {}
        scores = [again._validate(trainer.data.held_out) for _ in range(3)]
        found[name] = (scores, asked.count)
    return found


class _Asked:
    """A teacher that counts the schedules that it has run."""

    def __init__(self, teacher):
        self._teacher = teacher
        self.count = 0

    def targets(self, batches):
        self.count += 1
        return self._teacher.targets(batches)


def _read_ids(folder):
    """The log of a run on the ids at ``ids``, of which some are no text or not the tokenizer's."""
    config = objective_run(folder, "on-ids", LossConfig(objective="next_token"), **TP2)
    _trainer(changed(config, data=on_ids(folder), teacher=None)).train()
    return read_metrics(Path(config.run_dir))


def on_ids(folder):
    """The section ``data`` of that run."""
    train = (str(folder / "ids"),)
    return {"train": train, "indexed_tokenizer": "student", "bad_documents": "skip"}


WHOLE = Replica(0, 1, 2)
SPOILT = 3
"""Document, from 1, that ends within a character."""


@pytest.fixture(scope="module")
def folder(folder):
    tokenizer = build_tokenizer(student_run(folder, "run").tokenizer)
    texts = [[tokenizer.text_to_ids(text)] for text in SENTENCES]
    half = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xe6")
    letters = [i for letter in "dropout" for i in tokenizer.text_to_ids(letter)]
    write_ids(folder / "ids", [*texts[:2], [[*texts[0][0], half]], *texts[2:], [letters]])
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    return run_ranks(2, leave_results, folder, timeout_s=300)


def test_a_learned_projection_is_left_as_a_file_that_has_the_trained_shares(folder, ranks):
    config = student_run(folder, "learned")
    student, teacher = map(build_tokenizer, (config.tokenizer, config.teacher.tokenizer))
    path = folder / "learned" / "learned_projection.safetensors"
    kept = SparseProjection.load(path, student=student, teacher=teacher)
    for rank in range(2):
        assert kept == SparseProjection.load(folder / f"trained-{rank}.safetensors")
        assert torch.equal(ranks[rank]["learned"]["trained"], ranks[0]["learned"]["trained"])
    start = SparseProjection.load(folder / "learned" / "projection.safetensors")
    assert np.array_equal(kept.indices, start.indices)
    assert np.abs(kept.values - start.values).max() > 1e-4
    several = (np.diff(kept.indptr) > 1) & ~kept.is_exact_row
    shares = kept.values[several[kept.entry_rows]]
    assert np.allclose(shares, ranks[0]["learned"]["trained"].numpy(), rtol=1e-6, atol=0)
    # What ``megatron-ext projection inspect`` says of it.
    inspection = Inspection.of(LooseEntries.of(kept), TokenizerPair(student, teacher))
    assert (
        inspection.defects
        == Inspection.of(LooseEntries.of(start), TokenizerPair(student, teacher)).defects
    )


def test_every_checkpoint_has_the_shares_of_its_iteration(folder, ranks):
    first, last = (
        SparseProjection.load(
            folder / f"learned/checkpoints/iter_{iteration:07}/learned_projection.safetensors"
        )
        for iteration in (1, 2)
    )
    assert last == SparseProjection.load(folder / "learned" / "learned_projection.safetensors")
    assert np.array_equal(first.indices, last.indices)
    assert not np.array_equal(first.values, last.values)


def test_a_run_starts_where_the_file_is(ranks):
    for rank in ranks:
        shares = rank["learned"]
        assert torch.allclose(shares["again"], shares["trained"], rtol=1e-6, atol=0)
        assert (shares["again"] - shares["start"]).abs().max() > 1e-4


def test_held_out_text_is_measured_by_tiles_where_the_loss_is(ranks):
    for rank in ranks:
        (tiled, rows_of_tiles), (whole, rows) = (rank["measured"][k] for k in ("tiles", "whole"))
        assert tiled.student == pytest.approx(whole.student, rel=1e-6)
        assert tiled.teachers["teacher"] == pytest.approx(whole.teachers["teacher"], rel=1e-6)
        assert tiled.agreement == whole.agreement
        assert whole.agreement["teacher"][1] > 100
        assert max(rows_of_tiles) == TILE_ROWS < min(rows)
        assert sum(rows_of_tiles) == sum(rows)


def test_a_frozen_teacher_reads_the_held_out_text_once(ranks):
    for rank in ranks:
        (scores, asked), (changing, asked_again) = rank["measured"]["again"].values()
        assert asked_again == 3 * asked
        assert scores == changing == [scores[0]] * 3


def test_documents_of_ids_that_cannot_be_read_and_that_differ_are_in_the_log(folder, ranks):
    (log,) = {json.dumps(rank["ids"]) for rank in ranks}
    rows = json.loads(log)
    quarantine = (folder / "on-ids" / "quarantine.jsonl").read_text().splitlines()
    refused = [json.loads(line) for line in quarantine]
    assert {document["place"] for document in refused} == {f"{folder}/ids.bin:{SPOILT}"}
    assert "spell no UTF-8" in refused[0]["reason"]
    assert rows[-1]["refused_documents"] == len(refused)
    data = on_ids(folder) | {"validation": ()}
    config = changed(student_run(folder, "run"), data=data)
    reader = RunData.read(config, build_tokenizer(config.tokenizer), {}).batches(WHOLE)
    expected = 0
    for row in rows:
        reader.take()
        expected += reader.faults_since_asked().retokenized
        assert row["retokenized_documents"] == expected
    assert expected

"""``transformers.Trainer`` with the loss of a run; needs accelerate, as its trainers do."""

import copy
import itertools
import json

import pytest
import torch

from megatron_ext import CrossTokenizerLoss
from megatron_ext.data.packed_dataset import PackedTextDataset
from megatron_ext.errors import ConfigError, DataError
from tests.training.small_models import TEXTS, model, pair

pytest.importorskip("accelerate")


def trained(folder, *, batch=2, accumulation=1, steps=2, records=None, **options):
    """A trainer after ``steps`` steps of plain gradient descent over texts in their order."""
    from transformers import TrainingArguments

    from megatron_ext import DistillationTrainer

    student, teacher = pair()
    loss = CrossTokenizerLoss(student, teacher, "alm", ce_weight=0.5, max_length=96)
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=accumulation,
        max_steps=steps,
        learning_rate=0.5,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = DistillationTrainer(
        model(student),
        args=args,
        teacher=options.pop("teacher", None) or model(teacher, seed=1, extra_rows=6),
        loss=loss,
        train_dataset=[{"text": text} for text in TEXTS] if records is None else records,
        eval_dataset=[{"text": text} for text in TEXTS[:3]],
        **options,
    )
    trainer.train()
    return trainer


def test_the_step_does_not_depend_on_how_its_batch_is_cut(tmp_path):
    whole = trained(tmp_path / "whole", batch=6)
    cut = trained(tmp_path / "cut", batch=2, accumulation=3)
    for name in ("loss", "kd", "ce", "ce/accuracy"):
        values = [[row[name] for row in t.state.log_history if name in row] for t in (whole, cut)]
        assert len(values[0]) == 2
        assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-4)
    for one, other in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_step_is_one_of_gradient_descent_on_the_loss(tmp_path):
    trainer = trained(tmp_path, batch=6, steps=1)
    student, teacher = (each.vocab_size for each in pair())
    ours, theirs = model(pair()[0]), model(pair()[1], seed=1, extra_rows=6)
    assert (ours.config.vocab_size, theirs.config.vocab_size) == (student, teacher + 6)
    batch = trainer.distillation_loss.collator(TEXTS)
    loss = trainer.distillation_loss(
        ours(batch.student.input_ids).logits,
        theirs(batch.teachers["teacher"].input_ids).logits,
        batch,
    )
    loss.backward()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), abs=1e-4)
    for mine, moved in zip(ours.parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(mine.detach() - 0.5 * mine.grad, moved, rtol=1e-4, atol=1e-6)


def test_the_teacher_stays_as_it_is_and_an_evaluation_logs_its_own_metrics(tmp_path):
    teacher = model(pair()[1], seed=1)
    before = copy.deepcopy(teacher.state_dict())
    trainer = trained(tmp_path, teacher=teacher)
    metrics = trainer.evaluate()
    assert trainer.state.log_history[-1]["eval_kd"] > 0
    assert metrics["eval_loss"] > 0
    # What the best model can be chosen by.
    assert metrics["eval_kd"] == trainer.state.log_history[-1]["eval_kd"]
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert not any(weight.requires_grad for weight in teacher.parameters())


def test_texts_of_a_packed_row_do_not_see_each_other(tmp_path):
    from megatron_ext import ArrowTextDataset

    loss = CrossTokenizerLoss(*pair(), "alm", max_length=96)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 3))
    dataset = PackedTextDataset(ArrowTextDataset(corpus), loss.collator)
    samples = dataset[0, 0].samples
    assert any(len(sample.pieces) > 1 for sample in samples)
    batch = loss.collator(samples)
    student = model(pair()[0])
    whole = student(
        input_ids=batch.student.input_ids,
        position_ids=batch.student.position_ids,
        use_cache=False,
    )
    bounds = batch.student.cu_seqlens.tolist()
    flat = batch.student.input_ids.flatten()
    for begin, end in itertools.pairwise(bounds):
        alone = student(input_ids=flat[None, begin:end]).logits[0]
        torch.testing.assert_close(
            whole.logits.flatten(0, 1)[begin:end], alone, rtol=1e-4, atol=1e-5
        )
    trained(tmp_path / "run", records=samples, steps=1)


def test_what_would_have_no_effect_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="compute_metrics"):
        trained(tmp_path, compute_metrics=print)


def test_a_trainer_that_is_given_the_collator_itself_is_told_what_to_give_it(tmp_path):
    from transformers import Trainer, TrainingArguments

    loss = CrossTokenizerLoss(*pair(), "alm")
    trainer = Trainer(
        model(pair()[0]),
        args=TrainingArguments(
            str(tmp_path), use_cpu=True, report_to=[], max_steps=1, remove_unused_columns=False
        ),
        train_dataset=[{"text": text} for text in TEXTS],
        data_collator=loss.collator,
    )
    with pytest.raises(DataError, match=r"data_collator=collator\.tensors"):
        trainer.train()

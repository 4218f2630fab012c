"""The loss in the loops of TRL, Lightning and accelerate: a step of each is the same step."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_ext import CrossTokenizerLoss
from tests.training.small_models import TEXTS, huggingface_tokenizer, model, pair

pytest.importorskip("accelerate")

PAGE = Path(__file__).parents[2] / "docs" / "python_api.md"
RATE = 0.5
RECORDS = [{"text": text} for text in TEXTS]


@pytest.fixture(scope="module")
def loss():
    return CrossTokenizerLoss(*pair(), "alm", ce_weight=0.5, max_length=96)


@pytest.fixture(scope="module")
def expected(loss):
    """Parameters of the student after one step of gradient descent on all texts."""
    student, teacher = models()
    batch = loss.collator(TEXTS)
    with torch.no_grad():
        targets = teacher(batch.teachers["teacher"].input_ids).logits
    loss(student(batch.student.input_ids).logits, targets, batch).backward()
    with torch.no_grad():
        return [weight - RATE * weight.grad for weight in student.parameters()]


def models():
    student, teacher = pair()
    return model(student), model(teacher, seed=1).requires_grad_(False)


def loss_of(loss, student, teacher, batch):
    """What docs/python_api.md tells the writer of a loop to compute of a mapping of tensors."""
    with torch.no_grad():
        targets = teacher(batch["teachers.teacher.input_ids"]).logits
    return loss(student(batch["input_ids"]).logits, targets, batch)


def assert_moved(student, expected):
    for moved, mine in zip(student.parameters(), expected, strict=True):
        torch.testing.assert_close(moved.detach(), mine, rtol=1e-4, atol=1e-6)


def test_trl(loss, expected, tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from megatron_ext.training.distillation_trainer import DistillationMixin

    class DistillationSFTTrainer(DistillationMixin, trl.SFTTrainer):
        pass

    student, teacher = models()
    trainer = DistillationSFTTrainer(
        student,
        args=trl.SFTConfig(
            str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=3,
            max_steps=1,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0.0,
            train_sampling_strategy="sequential",
            dataset_kwargs={"skip_prepare_dataset": True},
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        ),
        teacher=teacher,
        loss=loss,
        train_dataset=datasets.Dataset.from_list(RECORDS),
        processing_class=huggingface_tokenizer(),
    )
    trainer.train()
    assert trainer.state.log_history[0]["kd"] > 0
    assert_moved(student, expected)


def test_lightning(loss, expected, tmp_path):
    lightning = pytest.importorskip("lightning")

    class Distillation(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = models()

        def training_step(self, batch, _):
            return loss_of(loss, self.student, self.teacher, batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.student.parameters(), lr=RATE)

    module = Distillation()
    loader = torch.utils.data.DataLoader(
        TEXTS, batch_size=len(TEXTS), collate_fn=loss.collator.tensors
    )
    lightning.Trainer(
        max_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    ).fit(module, loader)
    assert_moved(module.student, expected)


def test_accelerate(loss, expected):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    student, teacher = models()
    loader = torch.utils.data.DataLoader(
        TEXTS, batch_size=len(TEXTS), collate_fn=loss.collator.tensors
    )
    optimizer = torch.optim.SGD(student.parameters(), lr=RATE)
    student, teacher, optimizer, loader = accelerator.prepare(student, teacher, optimizer, loader)
    for batch in loader:
        accelerator.backward(loss_of(loss, student, teacher, batch))
        optimizer.step()
    assert_moved(student, expected)


def test_the_programs_of_the_page_that_name_models_of_the_reader_run(loss, tmp_path, monkeypatch):
    from transformers import TrainingArguments

    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    short = {"max_steps": 1, "use_cpu": True, "report_to": [], "disable_tqdm": True, "bf16": False}
    student_tokenizer, teacher_tokenizer = pair()
    student, teacher = models()
    names = {
        **{"student": student, "teacher": teacher, "loss": loss, "torch": torch},
        **{"student_tokenizer": student_tokenizer, "teacher_tokenizer": teacher_tokenizer},
        "records": datasets.Dataset.from_list(RECORDS),
        "TrainingArguments": partial(TrainingArguments, **short),
        "SFTTrainer": trl.SFTTrainer,
        "SFTConfig": partial(trl.SFTConfig, **short, gradient_checkpointing=False),
        "AutoTokenizer": SimpleNamespace(from_pretrained=lambda _: huggingface_tokenizer()),
        "batch": loss.collator.tensors(TEXTS),
    }
    programs = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert len(programs) == 3
    for program in programs:
        exec(program, names)
    names["trainer"].train()
    assert type(names["trainer"]).__name__ == "DistillationSFTTrainer"
    assert names["trainer"].state.global_step == 1
    assert names["step_loss"].isfinite()

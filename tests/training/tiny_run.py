"""A distillation run small enough for a test, on real vocabularies of two libraries."""

import dataclasses
import importlib.resources
import json
from functools import cache
from pathlib import Path

from megatron_ext.files import write_bytes
from megatron_ext.tokenizers import TokenizerConfig
from megatron_ext.training.config import (
    DataConfig,
    DistillConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TeacherConfig,
    TrainingConfig,
)
from tests.training.short_sentencepiece import short_sentencepiece

SENTENCES = (
    "A dictionary display yields a new dictionary object. ",
    "Le café coûte 2,50 € ; naïveté, œuvre, garçon. ",
    "日本語の文章も、ふつうに学習できます。 ",
    "def f(x):\n    return x ** 2  # 201 + 1999\n",
    "Ελληνικά, русский язык и हिन्दी 😀. ",
)
ITERATIONS = 2
STUDENT_VOCAB_SIZE = 8001
TEACHER_PIECES = 4000


def vocabulary(name):
    """Path of a vocabulary file that mistral-common carries."""
    return str(importlib.resources.files("mistral_common") / "data" / name)


def write_corpus(folder):
    """Documents of different lengths, mixed scripts, as JSON lines; three more are held out."""
    documents = ["".join(SENTENCES[(i + k) % 5] for k in range(1 + i % 7)) for i in range(30)]
    for name, part in (("held-out", documents[27:]), ("train", documents[:24])):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return path


def write_rank_list(folder):
    """The head of Tekken's vocabulary as Megatron's JSON rank list: an odd size, quick to train.

    The teacher's is written beside it, which every rank of a run would else make for itself.
    """
    _sentencepiece(folder)
    path = folder / "ranks.json"
    path.write_text(_rank_list())
    return path


@cache
def _rank_list():
    vocabulary_file = json.loads(Path(vocabulary("tekken_240911.json")).read_text())
    return json.dumps(vocabulary_file["vocab"][: STUDENT_VOCAB_SIZE - 100])


def teacher_run(folder):
    """One step of next-token training, for a checkpoint to distil from."""
    return DistillConfig(
        run_dir=str(folder / "teacher"),
        tokenizer=_teacher(folder).tokenizer,
        student=_teacher(folder).model,
        data=DataConfig(train=(str(folder / "train.jsonl"),)),
        loss=LossConfig(objective="next_token"),
        training=TrainingConfig(train_iters=1, global_batch_size=4),
    )


def student_run(folder, name, *, micro_batch_size=2, global_batch_size=4, **parallel):
    """Projected KL plus cross-entropy from that checkpoint; ``parallel`` is the layout."""
    teacher = dataclasses.replace(
        _teacher(folder), checkpoint=str(folder / "teacher" / "checkpoints")
    )
    return DistillConfig(
        run_dir=str(folder / name),
        tokenizer=TokenizerConfig(
            library="tiktoken",
            model=str(folder / "ranks.json"),
            tiktoken_num_special_tokens=100,
            vocab_size=STUDENT_VOCAB_SIZE,
        ),
        student=ModelConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            num_query_groups=2,
            ffn_hidden_size=64,
            seq_length=41,
            make_vocab_size_divisible_by=8,
        ),
        teacher=teacher,
        data=DataConfig(
            train=(str(folder / "train.jsonl"),), validation=(str(folder / "held-out.jsonl"),)
        ),
        loss=LossConfig(temperature=1.5, kd_weight=1.0, ce_weight=0.5),
        optimizer=OptimizerConfig(lr=1e-3),
        training=TrainingConfig(
            train_iters=ITERATIONS,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            save_interval=1,
        ),
        parallel=ParallelConfig(**parallel),
    )


def objective_run(folder, name, loss, **parallel):
    """Two steps of ``student_run`` by another objective, from its first weights.

    ``vocab_kl`` learns from a model with the student's tokenizer, the run ``next_token-alone``.
    """
    config = student_run(folder, name, **parallel)
    teacher = config.teacher
    if loss.objective == "vocab_kl":
        teacher = TeacherConfig(
            tokenizer=config.tokenizer,
            model=config.student,
            checkpoint=str(folder / "next_token-alone" / "checkpoints"),
        )
    return dataclasses.replace(
        config,
        teacher=teacher,
        loss=loss,
        data=DataConfig(train=config.data.train),
        training=TrainingConfig(
            train_iters=2, micro_batch_size=2, global_batch_size=4, save_interval=2
        ),
        initial_checkpoint=str(folder / "start" / "checkpoints"),
    )


def _teacher(folder):
    return TeacherConfig(
        tokenizer=TokenizerConfig(library="sentencepiece", model=str(_sentencepiece(folder))),
        model=ModelConfig(
            num_layers=2,
            hidden_size=48,
            num_attention_heads=4,
            seq_length=53,
            untie_embeddings_and_output_weights=True,
        ),
        checkpoint="",
    )


def _sentencepiece(folder):
    """The head of Mistral's vocabulary, written where it is not yet; ranks may ask at once."""
    path = folder / "teacher.model"
    if folder.exists() and not path.exists():
        whole = Path(vocabulary("mistral_instruct_tokenizer_240323.model.v3")).read_bytes()
        write_bytes(path, short_sentencepiece(whole, TEACHER_PIECES))
    return path

"""A distillation run small enough for a test, on real vocabularies of two libraries."""

import importlib.resources
import json
from dataclasses import is_dataclass, replace
from functools import cache
from pathlib import Path

from megatron_ext.files import write_bytes
from megatron_ext.tokenizers import TokenizerConfig
from megatron_ext.tokenizers.libraries.sentencepiece_model import (
    LENGTH_DELIMITED,
    bytes_field,
    read_field,
)
from megatron_ext.training.configuration.config import (
    DataConfig,
    DistillConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TeacherConfig,
    TrainingConfig,
)

SENTENCES = (
    "A dictionary display yields a new dictionary object. ",
    "Le café coûte 2,50 € ; naïveté, œuvre, garçon. ",
    "日本語の文章も、ふつうに学習できます。 ",
    "def f(x):\n    return x ** 2  # 201 + 1999\n",
    "Ελληνικά, русский язык и हिन्दी 😀. ",
)
ITERATIONS = 2
STUDENT_VOCAB_SIZE = 2001
TEACHER_PIECES = 2000
LINEAR_ATTENTION = {
    "linear_attention_freq": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}


def vocabulary(name):
    """Path of a vocabulary file that mistral-common carries."""
    return str(importlib.resources.files("mistral_common") / "data" / name)


def write_corpus(folder):
    """Documents of different lengths, mixed scripts, as JSON lines; three more are held out, and
    the same documents with one to three line feeds behind each sentence."""
    documents = ["".join(SENTENCES[(i + k) % 5] for k in range(1 + i % 7)) for i in range(30)]
    spaced = [text.replace(". ", ".\n" + "\n" * (i % 3)) for i, text in enumerate(documents)]
    parts = {"lines": spaced, "held-out": documents[27:], "train": documents[:24]}
    for name, part in parts.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return path


def write_rank_list(folder, size=STUDENT_VOCAB_SIZE):
    """The head of Tekken's vocabulary as Megatron's JSON rank list: an odd size, quick to train.

    The teacher's is written beside it, which every rank of a run would else make for itself.
    """
    _sentencepiece(folder)
    path = folder / "ranks.json"
    path.write_text(_rank_list(size - 100))
    return path


@cache
def _rank_list(size):
    vocabulary_file = json.loads(Path(vocabulary("tekken_240911.json")).read_text())
    return json.dumps(vocabulary_file["vocab"][:size])


def changed(config, **sections):
    """A copy; a mapping changes fields of its section, and of the sections in it."""
    for name, value in sections.items():
        before = getattr(config, name)
        if is_dataclass(before) and isinstance(value, dict):
            sections[name] = changed(before, **value)
    return replace(config, **sections)


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
        teacher=changed(_teacher(folder), checkpoint=checkpoints(folder, "teacher")),
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


def checkpoints(folder, name):
    """Where the run ``name`` saves."""
    return str(folder / name / "checkpoints")


def same_tokenizer_teacher(folder, name, **model):
    """A teacher with the student's tokenizer and sizes: the run ``name``."""
    base = student_run(folder, name)
    return TeacherConfig(
        tokenizer=base.tokenizer,
        model=replace(base.student, **model),
        checkpoint=checkpoints(folder, name),
    )


def objective_run(folder, name, loss, **parallel):
    """Two steps of ``student_run`` by another objective, from its first weights.

    ``vocab_kl`` learns from a model with the student's tokenizer, the run ``next_token-alone``.
    One that compares repeats reads runs of line feeds.
    """
    config = student_run(folder, name, **parallel)
    if "repeat_weight" in loss.options:
        config = changed(config, data={"train": (str(folder / "lines.jsonl"),)})
    if loss.objective == "vocab_kl":
        config = replace(config, teacher=same_tokenizer_teacher(folder, "next_token-alone"))
    return changed(
        config,
        loss=loss,
        data={"validation": ()},
        training={"save_interval": 2},
        initial_checkpoint=checkpoints(folder, "start"),
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


_CHARACTERS = frozenset("".join(SENTENCES))
_PIECE = 1
"""Number of the field that is repeated, a piece each; and within a piece of its text."""


@cache
def short_sentencepiece(model, pieces):
    """``model`` with its first ``pieces`` pieces, and the later ones that are a character of ours.

    Merges come in the order in which they were learnt and the characters last, so that what is
    kept merges as before.
    """
    kept, place = [], 0
    for number, content in _fields(model):
        if number == _PIECE:
            place += 1
            text = next(value for name, value in _fields(content) if name == _PIECE)
            if place > pieces and text.decode() not in _CHARACTERS:
                continue
        kept.append(bytes_field(number, content))
    return b"".join(kept)


def _fields(message):
    """Number and content of each field that is of a length which is said."""
    at = 0
    while at < len(message):
        number, wire, size, end = read_field(message, at)
        if wire == LENGTH_DELIMITED:
            yield number, message[end - size : end]
        at = end

"""Distillation under Megatron-LM's own loop: the functions that its ``pretrain`` takes.

The configuration sets what is learned: the student, its teachers, their tokenizers, the data and
the loss. Megatron-LM's flags set the rest: its optimizer, schedule, logging and checkpoints. The
layout and the batch sizes are in both, and must be equal.

    distillation = PretrainDistillation.from_file("run.yaml", get_args)
    distillation.take_schedule(megatron.training.training)
    sys.argv[1:1] = distillation.flags()
    pretrain(
        distillation.datasets_provider,
        distillation.model_provider,
        ModelType.encoder_or_decoder,
        distillation.forward_step,
        extra_args_provider=distillation.add_arguments,
    )
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module

from megatron_ext.distributed.layout import launched_processes
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import ConfigError
from megatron_ext.megatron_lm.loop_arguments import (
    check_arguments,
    check_padded_vocab_size,
    loop_flags,
)
from megatron_ext.teachers.remote_teacher import remote_teachers
from megatron_ext.tokenizers import build_tokenizer
from megatron_ext.training.checkpoints.folder import find_checkpoint
from megatron_ext.training.configuration.config import DistillConfig
from megatron_ext.training.configuration.exclusions import check_exclusions
from megatron_ext.training.configuration.yaml_file import read_config_file
from megatron_ext.training.distill import build_trainer_around
from megatron_ext.training.forward_step import GlobalCounts
from megatron_ext.training.inputs import Inputs, read_inputs, write_warnings
from megatron_ext.training.megatron_models import cpu_megatron
from megatron_ext.training.megatron_models.cpu_megatron import announce_device
from megatron_ext.training.megatron_models.first_weights import (
    load_first_weights,
    student_vocab_shard,
)
from megatron_ext.training.megatron_models.models import build_gpt_model
from megatron_ext.training.microbatch import Microbatch, MicrobatchWithTargets
from megatron_ext.training.run_data import HeldOut
from megatron_ext.training.run_folder import own_run_folder
from megatron_ext.training.start_agreement import check_same_start
from megatron_ext.training.student import Student
from megatron_ext.training.trainer import Trainer
from megatron_ext.typed_mapping import build_config


class InItsPrecision:
    """A model whose output keeps its precision, where ``Float16Module`` makes all logits fp32.

    Our losses accumulate in fp32 in any case.

    Args:
        model: A chunk as Megatron-LM has wrapped it.
    """

    def __init__(self, model: Any) -> None:
        self.module = model

    def __call__(self, *inputs: Any) -> Any:
        model = self.module
        while not isinstance(model, (GPTModel, Float16Module)):
            model = model.module
        options = {"fp32_output": False} if isinstance(model, Float16Module) else {}
        return self.module(*inputs, **options)


_FILES = "*/train_dataloader_dprank*.pt"
"""Files that Megatron-LM writes under ``--dataloader-save``, in the folder of an iteration."""

_STATE = "dataloader_state_dict"
_POSITIONS = "positions"
_REPLICAS = "replicas"


class TrainingStream:
    """This replica's training microbatches, without end, for Megatron-LM's external data loader.

    Args:
        done: Global batches that the run has trained on.
        folder: ``--dataloader-save``, with the positions of checkpoints, from which any layout can
            resume. Without it, the first ``done`` global batches are read again and skipped.
    """

    def __init__(self, trainer: Trainer, *, done: int, folder: str | None = None) -> None:
        self._trainer = trainer
        self._done = done
        self._folder = Path(folder) if folder else None
        self._microbatches: Iterator[Microbatch] | None = None

    def __iter__(self) -> TrainingStream:
        return self

    def __next__(self) -> Microbatch:
        # Opened late: of the streams of an interleaved pipeline's chunks only one is read.
        if self._microbatches is None:
            self._go_on()
            self._microbatches = self._endless()
        return next(self._microbatches)

    def save_state(self) -> dict[str, Any]:
        """State of this replica that Megatron-LM saves beside a checkpoint; plain values."""
        batches = self._trainer.batches
        positions = batches.positions()
        replicas = self._trainer.groups.dp_size
        return {**batches.state([positions]), _POSITIONS: positions, _REPLICAS: replicas}

    def _endless(self) -> Iterator[Microbatch]:
        while True:
            yield from self._trainer.microbatches()

    def _go_on(self) -> None:
        batches = self._trainer.batches
        saved = self._saved()
        if saved:
            positions = [state.pop(_POSITIONS) for state in saved]
            batches.load_state(batches.state(positions) | saved[0])
            return
        if self._done and self._trainer.groups.is_main:
            print(f"reading {self._done} global batches again, to go on behind them", flush=True)
        for _ in range(self._done):
            batches.take()

    def _saved(self) -> list[dict[str, Any]]:
        """States of all replicas that saved; empty where one is missing."""
        if self._folder is None or not self._done:
            return []
        files = sorted(self._folder.glob(f"iter_{self._done:07d}/{_FILES}"))
        saved = [torch.load(file, weights_only=True)[_STATE] for file in files]
        return saved if saved and len(saved) == saved[0][_REPLICAS] else []


class HeldOutStream:
    """This replica's held-out microbatches, over and over."""

    def __init__(self, trainer: Trainer, held_out: HeldOut) -> None:
        self._trainer = trainer
        self._held_out = held_out
        self._microbatches = self._endless()

    def __iter__(self) -> HeldOutStream:
        return self

    def __next__(self) -> Microbatch:
        return next(self._microbatches)

    def __len__(self) -> int:
        """Number of global batches, which Megatron-LM asks for under ``--full-validation``."""
        return sum(1 for _ in self._held_out.global_batches(self._trainer.replica))

    def _endless(self) -> Iterator[Microbatch]:
        while True:
            for rows in self._held_out.global_batches(self._trainer.replica):
                for samples in rows:
                    yield self._trainer.collate(samples, held_out=self._held_out)


_REPORTED: Final = ("ce", "kd")
"""Terms that Megatron-LM logs."""


class PretrainDistillation:
    """The providers and the forward step that Megatron-LM's ``pretrain`` calls, for one run.

    Args:
        config: Configuration of the run.
        arguments: Returns Megatron-LM's parsed arguments; ``megatron.training``'s ``get_args``.

    Raises:
        ConfigError: A setting is supported by our own loop only.
    """

    def __init__(self, config: DistillConfig, arguments: Callable[[], Any]) -> None:
        check_exclusions(config, "megatron_lm")
        # Its checkpoints hold the heads as they are.
        by_ids = replace(config.training, vocabulary_layout="original")
        self.config = replace(config, training=by_ids)
        self._arguments = arguments
        self._chunks: list[GPTModel] = []
        self._inputs: Inputs | None = None
        self._groups: ProcessGroups | None = None
        self._shard: VocabShard | None = None
        self._trainer: Trainer | None = None
        self._step: Any = None
        self._scale = 1.0

    @classmethod
    def from_file(cls, path: str | Path, arguments: Callable[[], Any]) -> PretrainDistillation:
        """The run of a YAML file of ``megatron-ext distill``.

        Raises:
            ConfigError: The file is not such a configuration.
        """
        values, where = read_config_file(path)
        return cls(build_config(DistillConfig, values, where), arguments)

    def flags(self) -> list[str]:
        """Megatron-LM's flags for the run; those of a command line may follow them.

        The layout, the batch sizes and the student's sizes are checked later: another value is an
        error.
        """
        tokenizer = build_tokenizer(self.config.tokenizer)
        return loop_flags(self.config, vocab_size=tokenizer.vocab_size)

    @staticmethod
    def add_arguments(parser: Any) -> Any:
        """Add ``--dataloader-save``, which Megatron-LM reads but leaves to scripts to define.

        For ``extra_args_provider``.
        """
        if "--dataloader-save" not in parser._option_string_actions:
            parser.add_argument_group("distillation").add_argument(
                "--dataloader-save",
                metavar="FOLDER",
                help="folder for the position in the data of each checkpoint",
            )
        return parser

    def model_provider(
        self, pre_process: bool = True, post_process: bool = True, **options: Any
    ) -> GPTModel:
        """The student's next chunk; the last one also builds teachers, data and loss.

        Args:
            pre_process: Unused; the layout decides whether the chunk embeds tokens.
            post_process: Unused; the layout decides whether it has the head.
            options: ``vp_stage``, and others that depend on the release.

        Collectives: those of ``training.distill.build_trainer_around``, with the last chunk.
        """
        if self._groups is None:
            self._start()
        assert self._groups is not None
        assert self._inputs is not None
        assert self._shard is not None
        parallel = self.config.parallel
        self._chunks.append(
            build_gpt_model(
                self.config.student,
                padded_vocab_size=self._padded_vocab_size,
                parallel=parallel,
                training=self.config.training,
                groups=self._groups,
                vp_stage=options.get("vp_stage") or 0,
            )
        )
        if len(self._chunks) == parallel.virtual_pipeline_model_parallel_size:
            groups, run_dir = self._groups, Path(self.config.run_dir)
            groups.on_main(lambda: own_run_folder(run_dir))
            if self.config.initial_checkpoint:
                start = find_checkpoint(self.config.initial_checkpoint, where="initial_checkpoint")
                load_first_weights(
                    start,
                    self._chunks,
                    self.config.student,
                    verify=self.config.training.verify_checkpoints,
                )
            self._trainer = build_trainer_around(
                self._chunks,
                self._shard,
                config=self.config,
                groups=self._groups,
                inputs=self._inputs,
                make_student=_LentStudent,
            )
        return self._chunks[-1]

    def datasets_provider(
        self, train_val_test_num_samples: Sequence[int], vp_stage: int | None = None
    ) -> tuple[TrainingStream, HeldOutStream | None, None]:
        """Streams of microbatches of the training and the held-out text, without end.

        For ``--dataloader-type external``, which passes them through. Every rank reads its own
        part. With ``--dataloader-save`` a run resumes at the position of its checkpoint; otherwise
        it reads the earlier text again and skips it.
        """
        trainer = self._built()
        args = self._arguments()
        done = getattr(args, "consumed_train_samples", 0) // args.global_batch_size
        held_out = trainer.data.held_out
        return (
            TrainingStream(trainer, done=done, folder=getattr(args, "dataloader_save", None)),
            HeldOutStream(trainer, held_out) if held_out else None,
            None,
        )

    # Every tensor- and pipeline-parallel rank reads microbatches, not only the first.
    datasets_provider.is_distributed = True  # type: ignore[attr-defined]

    def forward_step(
        self, microbatches: Iterator[MicrobatchWithTargets], model: Any
    ) -> tuple[torch.Tensor, Any]:
        """The stage's output, and the function that turns it into Megatron-LM's loss triple."""
        output, loss = self._step(microbatches, InItsPrecision(model))
        return output, partial(self._scaled, loss)

    def _scaled(
        self, loss: Callable[..., Any], output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """The loss scaled for Megatron-LM, which divides gradients by a number of tokens.

        Each microbatch reports one token. Logged terms are divided by their summed counts, so a
        term that is divided already reports this microbatch's share of one.
        """
        total, no_tokens, report = loss(output)
        share = torch.full_like(total, 1 / self._scale, dtype=torch.float32)
        reported = {name: (value, share) for name, value in report.shares.items()}
        reported |= {name: report.metrics[name] for name in _REPORTED if name in report.metrics}
        terms = {
            name: torch.stack([value.float(), count.float()])
            for name, (value, count) in reported.items()
        }
        return total * self._scale, torch.ones_like(no_tokens), terms

    def take_schedule(self, module: ModuleType) -> None:
        """Let the teachers' schedules run before the student's in ``megatron.training.training``.

        A forward step cannot run them: by then a stage of a pipeline waits for another.
        """
        original = module.get_forward_backward_func

        def get_forward_backward_func(*arguments: Any, **options: Any) -> Callable[..., Any]:
            return self._with_targets(original(*arguments, **options))

        module.get_forward_backward_func = get_forward_backward_func  # type: ignore[attr-defined]

    def close(self) -> None:
        """Leave the teachers that run elsewhere, and end their processes; for the end of a script.

        No collectives: Megatron-LM may have ended the process groups.
        """
        if self._trainer is not None:
            for teacher in remote_teachers(self._trainer.teachers).values():
                teacher.close(is_finished=True)

    def _with_targets(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        def run(**options: Any) -> Any:
            trainer = self._built()
            streams, model = options["data_iterator"], options["model"]
            # An interleaved pipeline has a stream for each chunk; all are alike.
            stream = streams[0] if isinstance(streams, list) else streams
            count = options["num_microbatches"]
            batches = [next(stream) for _ in range(count)]
            counts = GlobalCounts.ahead(batches, trainer.groups)
            microbatches = trainer.with_targets(batches)
            self._step = trainer.step_of(microbatches, iteration=1, counts=counts)
            self._scale = float(count * trainer.groups.dp_size * trainer.groups.cp_size)
            several = isinstance(model, list) and len(model) > 1
            iterators = [iter(microbatches) for _ in model] if several else iter(microbatches)
            length = microbatches[0].batch.row_length
            return schedule(**{**options, "data_iterator": iterators, "seq_length": length})

        return run

    def _start(self) -> None:
        """Check arguments and read the inputs, after Megatron-LM has made its process groups."""
        announce_device(require_gpu=self.config.training.require_gpu)
        check_arguments(self._arguments(), self.config)
        self._inputs = read_inputs(self.config, world_size=launched_processes())
        write_warnings(self._inputs.warnings)
        check_same_start(self.config, self._inputs)
        self._groups = ProcessGroups.from_megatron(_device())
        self._shard = student_vocab_shard(
            self.config.student, self._inputs.tokenizer, self._groups, self.config.parallel.layout
        )
        check_padded_vocab_size(self._arguments(), self._padded_vocab_size)

    @property
    def _padded_vocab_size(self) -> int:
        assert self._shard is not None
        return self._shard.width * self.config.parallel.tensor_model_parallel_size

    def _built(self) -> Trainer:
        if self._trainer is None:
            raise ConfigError(
                "the model was not built by model_provider",
                fix="give pretrain the model_provider of this object",
            )
        return self._trainer


class _LentStudent(Student):
    """A student that Megatron-LM wraps, updates and saves."""

    def __init__(self, chunks: Sequence[GPTModel], *_: Any, **__: Any) -> None:
        self.chunks = list(chunks)


def _device() -> torch.device:
    if cpu_megatron.is_installed():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())

"""A megatron-core model as a ``LanguageModel``, loaded from a checkpoint of ours or of HuggingFace.

Requests are divided over replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from megatron_ext.conversation import prompt_config_of
from megatron_ext.conversation.records import ConversationRecord
from megatron_ext.data.sampled_text import template_stop
from megatron_ext.distributed import process_groups
from megatron_ext.distributed.layout import Layout
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.engines.chat_endpoint import Answer
from megatron_ext.errors import CheckpointError, ConfigError, ConversationError, DataError
from megatron_ext.evaluation.generation import Generator, TokenScorer
from megatron_ext.evaluation.language_model import (
    GenerationOptions,
    LogLikelihood,
    Mean,
    TokenRequest,
    conversation_ids,
    prompt_ids,
)
from megatron_ext.evaluation.token_mixture import TokenMixture
from megatron_ext.huggingface.checkpoint_files import (
    CheckpointFiles,
    generation_stops,
    is_checkpoint_folder,
    kept_folder,
)
from megatron_ext.huggingface.model_settings import longest_sequence, model_settings
from megatron_ext.tokenizers import MegatronTokenizerText, TokenizerConfig, build_tokenizer
from megatron_ext.training.checkpoints.checkpoint import checkpoint_model
from megatron_ext.training.checkpoints.folder import find_checkpoint
from megatron_ext.training.checkpoints.tokenizer import KeptTokenizer, tokenizer_doubts
from megatron_ext.training.configuration.config import (
    ModelConfig,
    ParallelConfig,
    TrainingConfig,
    check_division,
)
from megatron_ext.training.inputs import write_warnings
from megatron_ext.training.megatron_models import cpu_megatron
from megatron_ext.training.megatron_models.first_weights import load_first_weights
from megatron_ext.training.megatron_models.models import DTYPES, build_gpt_model, freeze

Result = TypeVar("Result")
_LAST_IDS = 8
"""Ids of a prompt that are decoded with its completion, since some decoders drop a first space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronLanguageModel:
    """A ``LanguageModel`` over all ranks of a process group."""

    tokenizer: MegatronTokenizerText
    adds_bos: bool
    scorer: TokenScorer
    generator: Generator
    groups: ProcessGroups
    applies_chat_template: bool = False

    stops: frozenset[int] = frozenset()
    """Ids that end a text besides EOS and end of document."""

    @property
    def max_length(self) -> int:
        """Longest sequence, in tokens."""
        return self.scorer.max_length

    @property
    def precision(self) -> str:
        """Precision of weights and computation, ``fp32`` or ``bf16``."""
        params_dtype = self.scorer.models.chunks[0].config.params_dtype
        return next(name for name, dtype in DTYPES.items() if dtype == params_dtype)

    def log_likelihoods(self, requests: Sequence[TokenRequest]) -> list[LogLikelihood]:
        """Log-likelihood of each request, in order.

        Collectives: those of ``TokenScorer``, and one all-gather of objects over ``dp``.

        Raises:
            DataError: A continuation is longer than the model's sequences.
        """
        longest = max((len(request.continuation) for request in requests), default=0)
        if longest > self.max_length:
            raise DataError(
                "a continuation is longer than the model reads",
                got=f"{longest} tokens",
                expected=f"at most {self.max_length}",
                fix="raise --seq-length, if the model allows",
            )
        local = [requests[i] for i in self.local(len(requests))]
        return self.gathered(self.scorer.log_likelihoods(local), len(requests))

    def generate(self, prompts: Sequence[str], options: GenerationOptions) -> list[str]:
        """Completion of each prompt, in order.

        Collectives: those of ``Generator``, and one all-gather of objects over ``dp``.
        """
        ids = [prompt_ids(prompts[i], self) for i in self.local(len(prompts))]
        return [answer.text for answer in self._answers(ids, len(prompts), options)]

    def answers(
        self, records: Sequence[ConversationRecord], options: GenerationOptions, first: int = 0
    ) -> list[Answer]:
        """The answer to each conversation, in order; collectives as of ``generate``.

        Args:
            first: Number of the first record among all, which its samples depend on.
        """
        ids = [conversation_ids(records[i], self) for i in self.local(len(records))]
        return self._answers(ids, len(records), options, first)

    def _answers(
        self, ids: Sequence[list[int]], count: int, options: GenerationOptions, first: int = 0
    ) -> list[Answer]:
        """Answers to ``count`` prompts, of which this replica has ``ids``."""
        ends = self.ends()

        def is_done(new: Sequence[int]) -> bool:
            text = self.tokenizer.detokenize(list(new))
            return not ends.isdisjoint(new) or any(stop in text for stop in options.stop)

        places = [first + place for place in self.local(count)]
        new = self.generator.generate(ids, options, places=places, is_done=is_done)
        answers = [
            Answer(self._text(prompt, completion.ids, options.stop), is_done(completion.ids))
            for prompt, completion in zip(ids, new, strict=True)
        ]
        return self.gathered(answers, count)

    def cut_prompts(self) -> tuple[int, int]:
        """Number of prompts and contexts that were too long and lost their beginnings, and of all;
        one all-gather of objects over ``dp``."""
        counts = [self.generator.cut_texts, self.scorer.cut_texts]
        own = sum(count.cut for count in counts), sum(count.texts for count in counts)
        of_replicas = self.gathered([own], self.groups.dp_size)
        return sum(cut for cut, _ in of_replicas), sum(texts for _, texts in of_replicas)

    def once(self, work: Callable[[], Result]) -> Result:
        """See ``ProcessGroups.from_main``."""
        return self.groups.from_main(work)

    def local(self, count: int) -> range:
        """Indices of the requests of this replica."""
        return range(self.groups.dp_rank, count, self.groups.dp_size)

    def gathered(self, local: Sequence[Result], count: int) -> list[Result]:
        """All results, from those of this replica's indices; one all-gather of objects."""
        of_replicas: list[Sequence[Result]] = [()] * self.groups.dp_size
        dist.all_gather_object(of_replicas, local, group=self.groups.dp)
        size = len(of_replicas)
        return [of_replicas[i % size][i // size] for i in range(count)]

    def ends(self) -> set[int]:
        """Ids that end a text."""
        ends = {self.tokenizer.eos_id, self.tokenizer.eod, *self.stops}
        return {end for end in ends if end is not None and end < self.tokenizer.vocab_size}

    def _text(self, prompt: list[int], new: list[int], stops: Sequence[str]) -> str:
        """A completion up to its end."""
        ends = self.ends()
        last = next((i for i, token in enumerate(new) if token in ends), len(new))
        behind = prompt[-_LAST_IDS:]
        before = self.tokenizer.detokenize(behind, skip_special_tokens=True)
        whole = self.tokenizer.detokenize(behind + new[:last], skip_special_tokens=True)
        text = whole[len(before) :]
        if not whole.startswith(before):
            text = self.tokenizer.detokenize(new[:last], skip_special_tokens=True)
        for stop in stops:
            text = text.split(stop)[0]
        return text


_LONGEST: Final = 4096
"""Longest sequence of a HuggingFace model without ``seq_length``."""

_TIMEOUT: Final = timedelta(hours=2)
"""Time-out of collectives: a rank may generate longer texts than others, or run many programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Settings for running a model."""

    tokenizer: str | None = None
    """Tokenizer to read texts with; the one that comes with the checkpoint when not given."""

    allow_other_tokenizer: bool = False
    """Allow a tokenizer that the model was not trained with."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1

    precision: Literal["fp32", "bf16"] | None = None
    """bf16 on a GPU and fp32 on a CPU when not given."""

    seq_length: int | None = None
    """Longest sequence; when not given, that of the run, or that of ``config.json`` up to 4,096."""

    micro_batch_size: int = 8
    """Rows in one forward pass."""

    adds_bos: bool = True
    """Whether contexts begin with BOS, where the tokenizer has one."""

    verify: bool = True
    """Whether the files of a checkpoint of ours are checked against its manifest."""

    applies_chat_template: bool = False
    """Whether contexts and prompts are messages of a user in the tokenizer's chat template."""

    shows_progress: bool = False
    """Whether long work shows on standard error how far it is."""


class OpenedModel(NamedTuple):
    """A checkpoint that was found, before its model is built."""

    checkpoint: Path
    model: ModelConfig
    tokenizer: MegatronTokenizerText


def load_language_model(checkpoint: Path, options: ModelOptions) -> MegatronLanguageModel:
    """Build and load a model on every rank that torchrun started, or on this process alone.

    Ranks beyond tensor and pipeline parallelism are replicas.

    Args:
        checkpoint: A run, its ``checkpoints``, one of these, or a HuggingFace folder.

    Collectives: those of ``process_groups.initialize`` and ``load_first_weights``.

    Raises:
        MegatronExtError: The checkpoint cannot be read, or the options do not fit the model.
    """
    groups = groups_for(options)
    return load_mixture([open_model(checkpoint, options)], options, groups)


def groups_for(options: ModelOptions) -> ProcessGroups:
    """The process groups of a layout; on a CPU where there is no GPU."""
    if not torch.cuda.is_available():
        cpu_megatron.install()
    layout = Layout(
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        pipeline_model_parallel_size=options.pipeline_model_parallel_size,
    )
    return process_groups.initialize(layout, timeout=_TIMEOUT)


def open_model(checkpoint: Path, options: ModelOptions) -> OpenedModel:
    """Find a checkpoint, and read what model it is of and its tokenizer.

    Raises:
        MegatronExtError: As ``load_language_model``.
    """
    checkpoint = find_checkpoint(str(checkpoint), where="--model")
    model, tokenizer = _model(checkpoint, options), _tokenizer(checkpoint, options)
    check_division(
        "model",
        model,
        options.tensor_model_parallel_size,
        options.pipeline_model_parallel_size,
        ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"),
    )
    if options.applies_chat_template and not tokenizer.chat_templates:
        raise ConfigError(
            "the tokenizer has no chat template, which --chat, --conversations and "
            "--apply-chat-template need",
            where=tokenizer.path,
            fix="name a tokenizer that has one with --tokenizer, or leave the flag out",
        )
    doubts = tokenizer_doubts(
        checkpoint,
        tokenizer,
        allow_other=options.allow_other_tokenizer,
        switch="pass --allow-other-tokenizer",
    )
    write_warnings(f"{checkpoint}: {doubt}" for doubt in doubts)
    return OpenedModel(checkpoint, model, tokenizer)


def load_mixture(
    opened: Sequence[OpenedModel],
    options: ModelOptions,
    groups: ProcessGroups,
    *,
    weights: tuple[float, ...] = (1.0,),
    mean: Mean = "probs",
) -> MegatronLanguageModel:
    """Build and load models of one vocabulary, which read and predict in lockstep.

    Args:
        weights: Weight of each, with the sum 1.
        mean: What is averaged.

    Collectives: those of ``load_first_weights``.

    Raises:
        ConfigError: The models have different vocabularies.
        CheckpointError: Weights cannot be loaded.
    """
    first = opened[0]
    for other in opened[1:]:
        if other.tokenizer.fingerprint() != first.tokenizer.fingerprint():
            raise ConfigError(
                "models that predict token by token have different vocabularies",
                where=other.checkpoint,
                got=f"another one than {first.checkpoint}",
                fix="combine them with --mode byte, or give one the other's tokenizer with "
                "megatron-ext transfer init",
            )
    tp = options.tensor_model_parallel_size
    ids = first.tokenizer.vocab_size
    padded_size = max(each.model.head_rows(ids, tensor_ranks=tp) for each in opened)
    precision = options.precision or ("bf16" if groups.device.type == "cuda" else "fp32")
    chunks = []
    for each in opened:
        chunk = build_gpt_model(
            each.model,
            padded_vocab_size=padded_size,
            parallel=ParallelConfig(
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=options.pipeline_model_parallel_size,
            ),
            training=TrainingConfig(train_iters=1, precision=precision),
            groups=groups,
            is_loaded=True,
        )
        load_first_weights(each.checkpoint, [chunk], each.model, verify=options.verify)
        chunks += freeze([chunk])
    shared: dict[str, Any] = {
        "models": TokenMixture(chunks=tuple(chunks), weights=weights, mean=mean),
        "shard": groups.vocab_shard(vocab_size=ids, padded_vocab_size=padded_size),
        "groups": groups,
        "micro_batch_size": options.micro_batch_size,
        "max_length": min(each.model.seq_length for each in opened),
        "shows_progress": options.shows_progress,
    }
    return MegatronLanguageModel(
        tokenizer=first.tokenizer,
        adds_bos=options.adds_bos,
        applies_chat_template=options.applies_chat_template,
        scorer=TokenScorer(**shared),
        generator=Generator(**shared),
        groups=groups,
        stops=frozenset[int]().union(*(stops_of(each, options) for each in opened)),
    )


def stops_of(opened: OpenedModel, options: ModelOptions) -> frozenset[int]:
    """Ids of the generation configuration, and in a chat template the one behind an answer."""
    stops = generation_stops(opened.checkpoint)
    if options.applies_chat_template:
        tokenizer = opened.tokenizer
        # A template that writes no answer, or none that can be told from the rest, has no stop.
        with suppress(ConversationError):
            config = tokenizer.prompt_config or prompt_config_of("auto", tokenizer)
            stop = template_stop(tokenizer, config)
            return stops if stop is None else stops | {stop}
    return stops


def _model(checkpoint: Path, options: ModelOptions) -> ModelConfig:
    """The model of a checkpoint, with the sequence length of ``options``."""
    if not is_checkpoint_folder(checkpoint):
        model = checkpoint_model(checkpoint, verify=options.verify)
        length = options.seq_length or model.seq_length
        if model.position_embedding_type == "learned_absolute" and length != model.seq_length:
            raise ConfigError(
                "a model with learned positions has one length",
                where="--seq-length",
                got=length,
                expected=model.seq_length,
            )
        return replace(model, seq_length=length)
    files = CheckpointFiles(checkpoint)
    settings = model_settings(files)
    limits = _LONGEST, longest_sequence(files), settings["rotary_longest"]
    longest = min(limit for limit in limits if limit is not None)
    return ModelConfig(**settings, seq_length=options.seq_length or longest, hf=str(checkpoint))


def _tokenizer(checkpoint: Path, options: ModelOptions) -> MegatronTokenizerText:
    if options.tokenizer is not None:
        return build_tokenizer(TokenizerConfig(model=options.tokenizer))
    kept = None if is_checkpoint_folder(checkpoint) else KeptTokenizer(checkpoint).tokenizer
    if kept is not None:
        return kept
    folder = kept_folder(checkpoint)
    if folder is None:
        raise CheckpointError(
            "the checkpoint has no tokenizer", where=checkpoint, fix="name one with --tokenizer"
        )
    return build_tokenizer(TokenizerConfig(model=str(folder)))

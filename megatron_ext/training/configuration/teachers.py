"""Configuration sections of a run: the serving of remote teachers, and tasks between steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from megatron_ext.errors import ConfigError
from megatron_ext.training.configuration.number_checks import check_not_negative, check_positive

Placement = Literal["student_ranks", "own_ranks", "process", "server", "engine"]

STUDENT_RANKS: Final = "student_ranks"


@dataclass(kw_only=True, frozen=True, slots=True)
class ServingConfig:
    """Ranks and targets of a teacher with a ``placement`` other than ``student_ranks``."""

    ranks: int | None = None
    """Number of processes of ``own_ranks``, the last ones of the launch; those of several teachers
    follow one another in the order of the configuration."""

    tensor_model_parallel_size: int = 1
    """Processes that share each layer of the teacher, on its own ranks or a server."""

    pipeline_model_parallel_size: int = 1
    """Pipeline stages of the teacher, on its own ranks or a server."""

    targets: Literal["hidden", "topk", "label"] = "hidden"
    """Targets that are sent for each token: the last hidden state, the most probable tokens with
    the log-normaliser, or the log-probability of the label."""

    top_k: int = 64
    """Number of tokens that ``topk`` sends for each position."""

    target_precision: Literal["fp32", "fp16", "bf16"] | None = None
    """Precision of the hidden states or logits that are sent; when not given, the run's own for
    ``hidden`` and fp16 for ``topk``."""

    prefetch: int = 1
    """Global batches that are requested ahead of the one that the student trains on; 0 for none."""

    address: tuple[str, ...] = ()
    """Address of ``server``, HOST:PORT; one for each replica of it."""

    root_certificate: str | None = None
    """PEM file that verifies the certificate of ``server``: that certificate, or its signer's.
    Without it connections are not encrypted."""

    token_file: str | None = None
    """File with the secret that ``server`` and its students share; when not given, it is the
    environment variable MEGATRON_EXT_TEACHER_KEY."""

    plain_connection: bool = False
    """Allow connections between ``server`` and its students without TLS, over a trusted network."""

    def __post_init__(self) -> None:
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
        check_positive(self, "ranks", *sizes, "top_k")
        check_not_negative(self, "prefetch")
        if self.targets == "label" and self.target_precision not in (None, "fp32"):
            raise ConfigError(
                "the two numbers of a label are sent in fp32",
                got=self.target_precision,
                expected="fp32",
            )
        if self.ranks is not None and self.ranks % self.replica_size:
            raise ConfigError(
                "the teacher's ranks do not divide into whole replicas of it",
                got=f"ranks {self.ranks}",
                expected=f"a multiple of {self.replica_size} (serving.tensor_model_parallel_size "
                f"{self.tensor_model_parallel_size} x serving.pipeline_model_parallel_size "
                f"{self.pipeline_model_parallel_size})",
            )
        if self.root_certificate is not None and self.plain_connection:
            raise ConfigError(
                "a connection with TLS is not plain",
                got=f"root_certificate {self.root_certificate} and plain_connection",
                expected="one of them",
                fix="remove the other",
            )
        for address in self.address:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal():
                raise ConfigError("an address cannot be used", got=address, expected="HOST:PORT")

    @property
    def replica_size(self) -> int:
        """Processes of one replica of the teacher."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size


def is_local(address: str) -> bool:
    """Whether only this machine can reach HOST:PORT."""
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    return host in ("localhost", "::1") or host.startswith("127.")


def check_placement(
    placement: Placement, serving: ServingConfig, *, library: str, has_engine: bool = False
) -> None:
    """Check that a teacher's placement and the keys of ``serving`` go together.

    Args:
        library: The library that runs the model.
        has_engine: Whether there is a section ``engine``.

    Raises:
        ConfigError: They do not.
    """
    for name, given, needed_placement, is_needed in (
        ("ranks", serving.ranks is not None, "own_ranks", True),
        ("address", bool(serving.address), "server", True),
        ("root_certificate", serving.root_certificate is not None, "server", False),
        ("token_file", serving.token_file is not None, "server", False),
        ("plain_connection", serving.plain_connection, "server", False),
    ):
        applies = placement == needed_placement
        if (given and not applies) or (applies and is_needed and not given):
            raise ConfigError(
                f"serving.{name} and placement do not go together",
                got=f"placement {placement} {'with' if given else 'without'} serving.{name}",
                expected=f"serving.{name} with placement {needed_placement}, and with no other",
                fix="change one of them",
            )
    if has_engine != (placement == "engine"):
        raise ConfigError(
            "the section engine and placement do not go together",
            got=f"placement {placement} {'with' if has_engine else 'without'} engine",
            expected="engine with placement engine, and with no other",
            fix="change one of them",
        )
    if has_engine and serving.targets == "hidden":
        raise ConfigError(
            "an engine gives no hidden states",
            where="serving.targets",
            got="hidden",
            expected="topk or label",
        )
    for address in serving.address:
        is_safe = serving.root_certificate is not None or is_local(address)
        if not (is_safe or serving.plain_connection):
            raise ConfigError(
                "a teacher's server on another machine needs TLS",
                where=address,
                got="no serving.root_certificate",
                expected="the certificate that the server's is checked by",
                fix="set it, or set serving.plain_connection where the network is trusted",
            )
    whole = {
        "a teacher process has the whole model": placement == "process",
        "the library huggingface runs whole models": library == "huggingface",
        "a teacher on the student's ranks has the student's layout": placement == STUDENT_RANKS,
    }
    for why, applies in whole.items():
        if applies and serving.replica_size > 1:
            raise ConfigError(
                why,
                got=f"serving.tensor_model_parallel_size {serving.tensor_model_parallel_size}, "
                f"serving.pipeline_model_parallel_size {serving.pipeline_model_parallel_size}",
                expected="1 and 1",
            )


NEW_TOKENS: Final = {"gsm8k": 256}
"""Most tokens of a completion by task, where a section does not say."""


@dataclass(kw_only=True, frozen=True, slots=True)
class EvaluationTaskConfig:
    """A task of ``megatron-ext evaluate`` that a run measures its student by."""

    data: str
    """File or folder with the items, in their published format."""

    task: str | None = None
    """Name of the task; that of its section when not given."""

    num_fewshot: int | None = None
    """Solved examples before each item; the task's own number when not given."""

    few_shot_data: str | None = None
    """File or folder of the solved examples."""

    limit: int | None = None
    """Most items, the first ones; all when not given."""

    max_new_tokens: int | None = None
    """Most tokens of a completion; the task's own number when not given."""

    def __post_init__(self) -> None:
        for name, least in (("num_fewshot", 0), ("limit", 1), ("max_new_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is too small", got=value, expected=f"{least} or more")


@dataclass(kw_only=True, frozen=True, slots=True)
class EvaluationConfig:
    """Tasks that measure the student between steps; none by default."""

    tasks: Mapping[str, EvaluationTaskConfig] = field(default_factory=dict)
    """Tasks by name: ``bits_per_byte``, ``mmlu`` or ``gsm8k``, each a section with ``data``; a
    section with another name names its task under ``task``."""

    interval: int = 1000
    """Iterations between measurements by the tasks; one is always made at the end."""

    micro_batch_size: int = 8
    """Rows in one forward pass of a task."""

    def __post_init__(self) -> None:
        check_positive(self, "interval", "micro_batch_size")

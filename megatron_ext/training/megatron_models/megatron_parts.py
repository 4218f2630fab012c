"""Private parts of megatron-core that are replaced or called, and where each release has them.

What is public in megatron-core is imported where it is used. What is not may move with any release:
each such part is a row of ``PARTS``, found through ``place``, and tests hold every row to the
installed release.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, reduce
from importlib import import_module
from inspect import signature
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint import state_dict_loader

from megatron_ext.errors import ConfigError

RANGE: Final = ">=0.16.1,<0.20"
"""Releases that the parts are known of, as ``pyproject.toml`` has them."""

_CHECKPOINTS: Final = "megatron.core.dist_checkpointing"
_STRATEGIES: Final = f"{_CHECKPOINTS}.strategies"
_RANDOM: Final = "megatron.core.tensor_parallel.random"
_OPTIMIZER: Final = "megatron.core.optimizer"
_EXPERTS: Final = "megatron.core.transformer.moe"

SAVE_OPTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "0.16": {},
    # By default 0.17 asks for nvidia-resiliency-ext.
    "0.17": {"async_strategy": "mcore"},
}
"""Keywords of ``dist_checkpointing.save`` that a release has, by the first release."""

MLP_SUBMODULES: Final[Mapping[str, Callable[[Any], Any]]] = {
    "0.16": lambda mlp: mlp.submodules,
    "0.18": lambda mlp: mlp.keywords["submodules"],
}
"""The submodules of a layer spec's MLP, by the first release: of its spec, later of its builder."""

Value = TypeVar("Value")


class Part(NamedTuple):
    """A private part of megatron-core."""

    use: str
    """What it is needed for."""

    places: Mapping[str, str | None]
    """``module:attribute`` by the first release that has it there, oldest first; None where a
    release does without."""

    parameters: tuple[str, ...] = ()
    """Names of parameters that are relied on; none are looked for in what is no function."""


class Place(NamedTuple):
    """Where the installed release has a part."""

    owner: Any
    """Module or class."""

    name: str

    @property
    def value(self) -> Any:
        """The part itself."""
        return getattr(self.owner, self.name)

    @contextmanager
    def replaced(self, make: Callable[[Any], Any]) -> Iterator[None]:
        """Have something else there while entered, made from what is there."""
        # Of a static method ``value`` is the function alone.
        before = vars(self.owner)[self.name]
        self.put(make(self.value))
        try:
            yield
        finally:
            self.put(before)

    def put(self, value: Any) -> None:
        """Have something else there from now on."""
        setattr(self.owner, self.name, value)


PARTS: Final[Mapping[str, Part]] = {
    "get_rng_state": Part(
        "random state of the CPU in its place, in the CPU mode",
        {"0.16": f"{_RANDOM}:_get_cuda_rng_state"},
        ("device", "clone", "graph_safe"),
    ),
    "set_rng_state": Part(
        "random state of the CPU in its place, in the CPU mode",
        {"0.16": f"{_RANDOM}:_set_cuda_rng_state"},
        ("new_state", "device", "graph_safe"),
    ),
    "split_state": Part(
        "taking a save's common state, which is written to common.pt under every release",
        {"0.16": f"{_CHECKPOINTS}.serialization:save_preprocess"},
        ("sharded_state_dict",),
    ),
    "save_common": Part(
        "left out: the common state is written already; 0.19 writes it into a tensor file",
        {
            "0.16": f"{_STRATEGIES}.common:TorchCommonSaveStrategy.save_common",
            "0.17": f"{_CHECKPOINTS}.serialization:save_common",
            "0.19": None,
        },
        ("common_state_dict", "checkpoint_dir"),
    ),
    "load_common": Part(
        "the common state that was read already, without running anything",
        {
            "0.16": f"{_STRATEGIES}.common:TorchCommonLoadStrategy.load_common",
            "0.17": f"{_CHECKPOINTS}.serialization:load_common",
        },
        ("checkpoint_dir",),
    ),
    "finish_index": Part(
        "an error of rank 0's own write, kept until all ranks are at the end of the save",
        {"0.16": f"{_STRATEGIES}.filesystem_async:FileSystemWriterAsync.finish"},
        ("metadata", "results"),
    ),
    "save_format": Part(
        "an error of rank 0's own write, kept until all ranks are at the end of the save",
        {"0.16": f"{_CHECKPOINTS}.serialization:save_config"},
        ("config", "checkpoint_dir"),
    ),
    "results_queue": Part(
        "a queue in shared memory; its own needs a manager process",
        {"0.16": f"{_STRATEGIES}.filesystem_async:_results_queue"},
    ),
    "write_buckets": Part(
        "writers in threads that the watchdog hears of",
        {
            "0.16": f"{_STRATEGIES}.filesystem_async:"
            "FileSystemWriterAsync.write_preloaded_data_multiproc",
            "0.17": f"{_STRATEGIES}.filesystem_async:"
            "FileSystemWriterAsync.write_preloaded_data_multithread",
        },
        ("transform_list", "use_msc", "rank", "write_buckets", "global_results_queue"),
    ),
    "write_bucket": Part(
        "the writing of one bucket",
        {"0.16": f"{_STRATEGIES}.filesystem_async:FileSystemWriterAsync.write_preloaded_data"},
        (
            "transform_list",
            "local_proc_idx",
            "write_bucket",
            "results_queue",
            "count_queue",
            "use_fsync",
        ),
    ),
    "file_reader": Part(
        "a reader of tensors that runs nothing",
        {"0.16": f"{_STRATEGIES}.torch:_get_filesystem_reader"},
    ),
    "make_optimizer_state": Part(
        "state of torch's AdamW before its first update, to load into",
        {
            "0.16": f"{_OPTIMIZER}.distrib_optimizer:"
            "DistributedOptimizer._init_optimizer_states_with_dummy_values"
        },
    ),
    "fill_optimizer_state": Part(
        "an update count for each parameter of torch's AdamW",
        {
            "0.16": f"{_OPTIMIZER}.distrib_optimizer:"
            "DistributedOptimizer._set_main_param_and_optimizer_states"
        },
        ("model_param", "tensors"),
    ),
    "l2_norm": Part(
        "the norm of gradients without a wait for each",
        {"0.16": f"{_OPTIMIZER}.clip_grads:l2_norm_impl"},
    ),
    "slow_l2_norm": Part(
        "telling megatron-core's stand-in from Apex's norm",
        {"0.16": "megatron.core.utils:local_multi_tensor_l2_norm"},
    ),
    "clip_by_norm": Part(
        "clipping by a norm that is known",
        {"0.16": f"{_OPTIMIZER}.clip_grads:clip_grad_by_total_norm_fp32"},
        ("parameters", "max_norm", "total_norm", "use_decoupled_grad"),
    ),
    "read_splits": Part(
        "numbers that experts' tokens are sent by, read without a stream, in the CPU mode",
        {
            "0.16": f"{_EXPERTS}.token_dispatcher:"
            "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize"
        },
        ("point", "tokens_per_expert"),
    ),
    "router_logits": Part(
        "logits of experts in fp32, without Transformer Engine",
        {"0.16": f"{_EXPERTS}.router:TopKRouter.gating"},
        ("input",),
    ),
    "z_loss": Part(
        "the z-loss as a sum over the tokens of a global batch",
        {"0.16": f"{_EXPERTS}.router:TopKRouter.apply_z_loss"},
        ("logits", "padding_mask"),
    ),
    "balance_loss": Part(
        "the load-balancing loss as a sum over the rows of a global batch",
        {"0.16": f"{_EXPERTS}.router:TopKRouter._apply_seq_aux_loss"},
        ("probs", "scores_for_aux_loss", "routing_map", "seq_length", "bsz", "with_padding_mask"),
    ),
    "count_tokens": Part(
        "loads of experts without the tokens of teachers and of evaluation",
        {"0.16": f"{_EXPERTS}.router:TopKRouter._apply_expert_bias"},
        ("routing_map", "padding_mask"),
    ),
    "has_te_for_latent": Part(
        "none: 0.16 takes Transformer Engine for installed, and asks whether a layer is one of its",
        {"0.16": "megatron.core.transformer.multi_latent_attention:HAVE_TE"},
    ),
    "sample_tokens": Part(
        "the trained tokens of a GPT sample, through the indices of its tokens",
        {
            "0.16": "megatron.core.datasets.gpt_dataset:"
            "GPTDataset._query_document_sample_shuffle_indices"
        },
        ("idx",),
    ),
}
"""All of them, by a name for each."""


def installed() -> str:
    """Version of the megatron-core that is imported, which a checkout may have brought."""
    return str(import_module("megatron.core.package_info").__version__)


def of_release(values: Mapping[str, Value], release: str | None = None) -> Value:
    """The value of a release, the installed one unless given, from a table by first releases."""
    wanted = _number(release or installed())
    older = [first for first in values if _number(first) <= wanted]
    return values[max(older, key=_number) if older else min(values, key=_number)]


@cache
def place(part: str) -> Place | None:
    """Where the installed release has a part; None where it does without.

    Raises:
        ConfigError: It is nowhere: a release outside ``RANGE``.
    """
    where = of_release(PARTS[part].places)
    if where is None:
        return None
    module, _, path = where.partition(":")
    *owners, name = path.split(".")
    try:
        owner = reduce(getattr, owners, import_module(module))
        getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"megatron-core has no {where}, which is needed for: {PARTS[part].use}",
            got=f"megatron-core {installed()}",
            expected=f"megatron-core {RANGE}",
            fix=f"pip install 'megatron-core{RANGE}'",
        ) from error
    return Place(owner, name)


def check_torch() -> None:
    """Raise ``ConfigError`` where torch cannot load checkpoints for the installed megatron-core.

    From 0.19 on each rank loads alone, by an option that torch 2.6 does not have, though the
    requirements of 0.19 allow that torch.
    """
    alone = of_release({"0.16": False, "0.19": True})
    if alone and "no_dist" not in signature(state_dict_loader.load).parameters:
        raise ConfigError(
            "megatron-core 0.19 and later cannot load checkpoints with this torch",
            got=f"megatron-core {installed()}, torch {torch.__version__}",
            expected="a torch whose torch.distributed.checkpoint.load has no_dist",
            fix="pip install --upgrade torch, or pip install 'megatron-core<0.19'",
        )


def needed(part: str) -> Place:
    """``place`` of a part that no release does without."""
    found = place(part)
    assert found is not None, part
    return found


def _number(release: str) -> tuple[int, ...]:
    """First two numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", release)[:2]))

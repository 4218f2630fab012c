"""Flags of the verbs that run trained models, and the loading of what they name."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, Final

from megatron_ext.cli.output import quiet_libraries
from megatron_ext.distributed.layout import Layout, launched_processes
from megatron_ext.errors import ConfigError
from megatron_ext.evaluation.language_model import BEAM, PRUNE, EnsembleOptions
from megatron_ext.imports import large_imports

if TYPE_CHECKING:
    from megatron_ext.evaluation.ensemble import ByteEnsemble
    from megatron_ext.evaluation.megatron_language_model import MegatronLanguageModel

_OF_ENSEMBLE: Final = ("mode", "weight", "mean", "prune", "beam")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a model, and of several that predict together."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--tokenizer",
        "--tokenizer-model",
        metavar="PATH",
        help="tokenizer; the one that comes with the model if not given",
    )
    model.add_argument(
        "--allow-other-tokenizer",
        action="store_true",
        help="accept a tokenizer that the model was not trained with",
    )
    model.add_argument(
        "--no-verify",
        dest="verify",
        action="store_false",
        help="do not check the checkpoint's files against its manifest",
    )
    for name, words in (
        ("tensor", "processes that share each layer"),
        ("pipeline", "pipeline stages"),
    ):
        model.add_argument(
            f"--{name}-model-parallel-size", type=int, default=1, metavar="INT", help=f"{words} (1)"
        )
    model.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        help="dtype; bf16 on a GPU and fp32 on a CPU if not given",
    )
    model.add_argument("--seq-length", type=int, metavar="INT", help="longest sequence, in tokens")
    model.add_argument(
        "--micro-batch-size",
        type=int,
        default=8,
        metavar="INT",
        help="rows in one forward pass (8)",
    )
    model.add_argument(
        "--no-bos",
        dest="adds_bos",
        action="store_false",
        help="do not begin contexts with the tokenizer's BOS",
    )
    model.add_argument(
        "--apply-chat-template",
        dest="applies_chat_template",
        action="store_true",
        help="ask each item as a user's message, in the tokenizer's chat template",
    )
    ensemble = parser.add_argument_group("several models")
    ensemble.add_argument(
        "--mode",
        choices=("common", "byte"),
        default="common",
        help="common: token by token, for one vocabulary; byte: byte by byte, for any (common)",
    )
    ensemble.add_argument(
        "--weight",
        type=float,
        action="append",
        metavar="X",
        help="weight of a model, once for each, in order; equal weights if not given",
    )
    ensemble.add_argument(
        "--mean",
        choices=("probs", "logits"),
        default="probs",
        help="numbers that are averaged with --mode common (probs)",
    )
    ensemble.add_argument(
        "--prune",
        type=float,
        default=PRUNE,
        metavar="SHARE",
        help="with --mode byte, leave out tokenizations with a smaller share of a text's "
        f"probability ({PRUNE})",
    )
    ensemble.add_argument(
        "--beam",
        type=int,
        default=BEAM,
        metavar="INT",
        help=f"with --mode byte, most tokenizations of a text to follow ({BEAM})",
    )


def check_model_arguments(arguments: argparse.Namespace) -> None:
    """Check what can be checked before a model is loaded.

    Raises:
        ConfigError: A size is too small, the launched processes do not divide into replicas, or
            the models cannot be combined so.
    """
    for name in ("seq_length", "micro_batch_size"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError("too small", where=f"--{name.replace('_', '-')}", got=value)
    Layout(
        tensor_model_parallel_size=arguments.tensor_model_parallel_size,
        pipeline_model_parallel_size=arguments.pipeline_model_parallel_size,
    ).replicas(launched_processes())
    _ensemble(arguments).weights(len(arguments.checkpoint))


def _ensemble(arguments: argparse.Namespace) -> EnsembleOptions:
    values = ensemble_values(arguments)
    return EnsembleOptions(**{**values, "weight": tuple(values["weight"] or ())})


def ensemble_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """Settings of several models, by name."""
    return {name: getattr(arguments, name) for name in _OF_ENSEMBLE}


def load_models(
    arguments: argparse.Namespace, *, shows_progress: bool = False
) -> MegatronLanguageModel | ByteEnsemble:
    """Load what ``arguments.checkpoint`` names; collectives: those of ``load_ensemble``.

    Args:
        shows_progress: Whether long work shows on standard error how far it is.
    """
    quiet_libraries()
    # Imported after all other checks: megatron-core and torch take seconds to load.
    with large_imports():
        from megatron_ext.evaluation.ensemble import load_ensemble
        from megatron_ext.evaluation.megatron_language_model import ModelOptions

    names = ModelOptions.__dataclass_fields__.keys() - {"shows_progress"}
    options = ModelOptions(
        **{name: getattr(arguments, name) for name in names}, shows_progress=shows_progress
    )
    return load_ensemble(arguments.checkpoint, options, _ensemble(arguments))


def finish(model: MegatronLanguageModel | ByteEnsemble) -> None:
    """Say what a byte ensemble has left out, and take leave of the other processes."""
    from megatron_ext.distributed import process_groups

    lost = getattr(model, "lost", None)
    if lost is not None:
        model.once(lambda: _say_lost(lost))
    process_groups.finalize()


def _say_lost(lost: list[float]) -> None:
    if lost:
        mean, most = sum(lost) / len(lost), max(lost)
        sys.stderr.write(
            f"tokenizations left out: {mean:.2%} of a text's probability on average, {most:.2%} at "
            "most; less with a smaller --prune and a larger --beam\n"
        )

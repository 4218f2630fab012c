"""``CausalLM``: a causal language model of transformers, split from its head if that is linear.

N texts, L tokens, D hidden, V rows of the head.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.nn import functional

from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.huggingface.checkpoint_files import CheckpointFiles
from megatron_ext.teachers.weight_precision import WeightPrecision, round_weights

_PROBED_LOGIT: Final = 1000.0
"""Magnitude of the probe's logits, large enough to show any cap on logits."""

_OLDEST: Final = (4, 56)
"""Oldest supported version of transformers."""

_LOADING_ERRORS: Final = (
    OSError,
    ValueError,
    KeyError,
    AttributeError,
    TypeError,
    ImportError,
    RuntimeError,
)
"""Errors of transformers for folders that it cannot read and models that it does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalLM:
    """A frozen model, whole on one device."""

    module: nn.Module
    """The model, without its head for ``hidden``."""

    kind: Literal["hidden", "logits"]
    """Kind of the outputs: ``hidden`` if logits are ``hidden @ head.T``."""

    size: int
    """D for ``hidden``, V for ``logits``."""

    dtype: torch.dtype

    head: torch.Tensor | None = None
    """[V, D], for ``hidden``."""

    scale: float = 1.0
    """Factor of the hidden states, for architectures that scale logits."""

    layers: tuple[int, ...] = ()
    """Numbers from 1 of layers below the last whose states follow the last ones, of ``hidden``."""

    @property
    def width(self) -> int:
        """Numbers of an output at each position."""
        return self.size * (1 + len(self.layers))

    def __call__(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Outputs [N, L, width] of ``tokens`` [N, L], each row a text that begins at position 0.

        Args:
            mask: [N, L] int64, 0 behind the end of a text; None if all texts are equally long.
        """
        more = {"output_hidden_states": True} if self.layers else {}
        output = self.module(input_ids=tokens, attention_mask=mask, use_cache=False, **more)
        if self.kind == "logits":
            return output.logits.to(self.dtype)  # type: ignore[no-any-return]
        hidden: torch.Tensor = output.last_hidden_state.to(self.dtype)
        hidden = hidden if self.scale == 1.0 else hidden * self.scale
        if not self.layers:
            return hidden
        lower = [output.hidden_states[layer].to(self.dtype) for layer in self.layers]
        return torch.cat([hidden, *lower], dim=-1)


def load_causal_lm(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    vocab_size: int = 0,
    weight_precision: WeightPrecision | None = None,
) -> CausalLM:
    """Load a folder with ``config.json`` and safetensors files, of any model of transformers that
    predicts tokens of text.

    No code in the folder is run. Attention is torch's scaled dot product, except in models that cap
    attention scores, which that does not support.

    Args:
        vocab_size: Least rows of embeddings and head; missing rows are zero.
        weight_precision: Precision of the weights of linear layers other than the head; None:
            ``dtype``.

    Raises:
        ConfigError: transformers is not installed.
        MissingDependencyError: torchao is not installed, and there is a weight precision.
        CheckpointError: The model cannot be loaded, weights are missing, or they cannot be packed.
    """
    _ = CheckpointFiles(folder).stored
    transformers = import_transformers()
    transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
        capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
        model, loaded = _auto_class(transformers, config).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            **({"attn_implementation": "eager"} if capped else {}),
        )
    except _LOADING_ERRORS as error:
        raise CheckpointError(
            "transformers cannot load the model",
            where=folder,
            got=(str(error).strip().splitlines() or [type(error).__name__])[0][:300],
        ) from error
    for what in ("missing_keys", "mismatched_keys"):
        if loaded.get(what):
            raise CheckpointError(
                "the checkpoint has not all weights of its model",
                where=folder,
                got=f"{what.replace('_', ' ')}: {sorted(map(str, loaded[what]))[0]}",
                fix="download it again",
            )
    _add_rows(model, vocab_size)
    if weight_precision is not None:
        round_weights(model, weight_precision)
    return frozen_causal_lm(model.to(device), dtype=dtype)


def _auto_class(transformers: Any, config: Any) -> Any:
    """The class that loads a model's weights with a head over the vocabulary.

    Some models that read images too are among those alone; text is all that they are given.
    """
    causal, of_images = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
    is_of_images = type(config) in of_images._model_mapping
    return of_images if is_of_images and type(config) not in causal._model_mapping else causal


def import_transformers() -> Any:
    """Import transformers.

    Raises:
        ConfigError: transformers is not installed, or too old.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise _no_transformers(str(error)) from error
    version = str(transformers.__version__)
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise _no_transformers(f"version {version}")
    return transformers


def _no_transformers(got: str) -> ConfigError:
    return ConfigError(
        "a teacher with library huggingface needs transformers",
        got=got,
        fix=f'install it: pip install "transformers>={_OLDEST[0]}.{_OLDEST[1]}"',
    )


def frozen_causal_lm(model: Any, *, dtype: torch.dtype) -> CausalLM:
    """Freeze a loaded model, and split off its head if a probe finds it to be a plain matrix."""
    model = model.requires_grad_(False).eval()
    with torch.no_grad():
        scale = _scale_of_plain_head(model, dtype)
        if scale is None:
            token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
            width = int(model(input_ids=token, use_cache=False).logits.shape[-1])
            return CausalLM(module=model, kind="logits", size=width, dtype=dtype)
    head = model.get_output_embeddings().weight
    module, width = model.base_model, head.shape[1]
    return CausalLM(module=module, kind="hidden", size=width, dtype=dtype, head=head, scale=scale)


@torch.no_grad()
def _add_rows(model: Any, vocab_size: int) -> None:
    """Extend embeddings and head in place by rows of zeros up to ``vocab_size``."""
    rows = len(model.get_input_embeddings().weight)
    if vocab_size <= rows:
        return
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    for embeddings in (model.get_input_embeddings(), model.get_output_embeddings()):
        for values in () if embeddings is None else embeddings.parameters():
            values[rows:] = 0


def _scale_of_plain_head(model: Any, dtype: torch.dtype) -> float | None:
    """``s`` if logits are ``s * hidden @ weight.T`` of the output embeddings, else None.

    The probe replaces the model's hidden states by random ones: zero logits would show a bias, and
    large ones a cap or any other function of them.
    """
    embeddings = model.get_output_embeddings()
    weight = getattr(embeddings, "weight", None)
    if model.base_model is model or weight is None or weight.ndim != 2:
        return None
    own = _probed(model, None)
    if own is None or own.shape[-1] != weight.shape[1]:
        return None
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(own.shape, generator=draw).to(device=own.device, dtype=own.dtype)
    hidden = hidden * (_PROBED_LOGIT / functional.linear(hidden, weight).std())
    at_zero, logits = _probed(model, torch.zeros_like(hidden)), _probed(model, hidden)
    plain = functional.linear(hidden, weight).float()
    if at_zero is None or logits is None or logits.shape != plain.shape or bool(at_zero.any()):
        return None
    scale = float((logits.float() * plain).sum() / plain.square().sum())
    difference = (logits.float() - scale * plain).abs().max()
    # Rounding, relative to the largest logit.
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    if not difference <= tolerance * (scale * plain).abs().max():
        return None
    return 1.0 if abs(scale - 1) < 1e-3 else scale


def _probed(model: Any, hidden: torch.Tensor | None) -> torch.Tensor | None:
    """Logits [1, 4, V] of hidden states; for None, the model's hidden states [1, 4, D].

    Returns None if the model has no such output.
    """
    seen: list[torch.Tensor] = []

    def replace(module: nn.Module, arguments: Any, output: Any) -> Any:
        own = getattr(output, "last_hidden_state", None)
        if own is not None:
            seen.append(own)
            if hidden is not None:
                output.last_hidden_state = hidden
        return output

    hook = model.base_model.register_forward_hook(replace)
    tokens = torch.zeros(1, 4, dtype=torch.int64, device=model.device)
    try:
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    finally:
        hook.remove()
    if not seen:
        return None
    return seen[0] if hidden is None else logits

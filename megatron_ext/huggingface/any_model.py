"""What the ``config.json`` of a causal language model of any architecture says of its sizes.

For models that transformers runs: no more is asked than what others need to know of them. torch is
not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from megatron_ext.errors import CheckpointError
from megatron_ext.huggingface.checkpoint_files import CONFIG_FILE, CheckpointFiles

_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_query_groups": ("num_key_value_heads", "num_kv_heads"),
    "kv_channels": ("head_dim",),
    "ffn_hidden_size": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocab_size": ("vocab_size",),
}
"""Settings by names of ``training.config.ModelConfig``, with what architectures call them."""

_NEEDED: Final = ("num_layers", "hidden_size", "vocab_size")

_LENGTHS: Final = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")


def any_model_settings(files: CheckpointFiles) -> dict[str, Any]:
    """Sizes of the model; those that its ``config.json`` does not say are left out.

    Raises:
        CheckpointError: One is missing that every model has.
    """
    config = _text_config(files)
    found: dict[str, Any] = {"hf": str(files.folder)}
    for setting, names in _NAMES.items():
        value = _first(config, names)
        if value is not None:
            found[setting] = value
    for setting in _NEEDED:
        if setting not in found:
            raise CheckpointError(
                "a key is missing",
                where=files.folder / CONFIG_FILE,
                expected=f"one of {', '.join(_NAMES[setting])}",
            )
    # Models without attention have no heads; nothing asks how many.
    found.setdefault("num_attention_heads", 1)
    width = found["hidden_size"] // found["num_attention_heads"]
    found.setdefault("kv_channels", width + width % 2)
    if config.get("tie_word_embeddings") is False:
        found["untie_embeddings_and_output_weights"] = True
    return found


def longest_sequence(files: CheckpointFiles) -> int | None:
    """Positions that the model was made for; None where it does not say."""
    return _first(_text_config(files), _LENGTHS)


def _text_config(files: CheckpointFiles) -> Mapping[str, Any]:
    """The part about text, of a model that reads images too."""
    inner = files.config.get("text_config")
    return inner if isinstance(inner, Mapping) else files.config


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    found = [config[name] for name in names if isinstance(config.get(name), int)]
    return found[0] if found else None

"""Weights of checkpoints, which a rank that makes many runs reads once for each layout."""

from megatron_ext.training.checkpoints.checkpoint import load_weights

_read = {}

_SIZES = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")


def load_weights_once(checkpoint, chunks, *, verify=True):
    """``load_weights``; the second time from what was read, where files and layout are the same.

    All ranks of a group must have made the same runs before: none or all of them read.
    """
    key = (checkpoint, _files(checkpoint), *map(_form, chunks))
    if key not in _read:
        load_weights(checkpoint, chunks, verify=verify)
        _read[key] = [_copied(chunk.state_dict()) for chunk in chunks]
        return
    for chunk, state in zip(chunks, _read[key], strict=True):
        chunk.load_state_dict(state)


def _files(checkpoint):
    stats = sorted((file.name, file.stat()) for file in checkpoint.iterdir())
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _form(chunk):
    """What decides which part of a checkpoint this rank's chunk is, and its form."""
    sizes = tuple(getattr(chunk.config, f"{name}_parallel_size") for name in _SIZES)
    tensors = tuple((name, *_shape(value)) for name, value in chunk.state_dict().items())
    return sizes, tensors


def _shape(value):
    return (value.shape, value.dtype) if hasattr(value, "shape") else (type(value),)


def _copied(state):
    return {
        name: value.clone() if hasattr(value, "clone") else value for name, value in state.items()
    }

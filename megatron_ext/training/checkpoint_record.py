"""What a run of this project saved beside a checkpoint's weights, without loading these."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

from megatron_ext.errors import CheckpointError

_COMMON_FILE: Final = "common.pt"


def checkpoint_record(checkpoint: Path) -> Mapping[str, Any]:
    """The record of the run that saved a checkpoint; empty for one of another program.

    Args:
        checkpoint: One iteration's folder.

    Raises:
        CheckpointError: A file of it is missing.
    """
    import torch

    try:
        # Plain values alone: nothing that a checkpoint holds is run.
        common = torch.load(checkpoint / _COMMON_FILE, weights_only=True, map_location="cpu")
    except FileNotFoundError as error:
        raise CheckpointError(
            "the checkpoint cannot be read",
            where=checkpoint,
            got=f"no {_COMMON_FILE}",
            fix="copy it again: a file of it is missing",
        ) from error
    except (UnpicklingError, EOFError, RuntimeError):
        return {}
    run = common.get("run") if isinstance(common, dict) else None
    return run if isinstance(run, Mapping) else {}

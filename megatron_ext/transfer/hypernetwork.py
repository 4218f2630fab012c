"""A network that predicts the rows of a new token from the old tokens that spell it.

A small transformer reads the pieces' old rows and adds to their mean (``fvt``), for embedding and
head; it begins as nothing, so that an untrained one is ``fvt``. It belongs to one model.

N tokens, L pieces, D hidden size of the model, H of the network.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.huggingface.checkpoint_files import read_json
from megatron_ext.huggingface.tensor_files import write_folder

WEIGHTS_FILE: Final = "hypernetwork.safetensors"
CONFIG_FILE: Final = "hypernetwork.json"
_HEADS: Final = 4
_TOKENS: Final = 4096
"""Tokens whose rows are predicted at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HypernetworkConfig:
    """Sizes of a network, and the model that it is of."""

    model: str
    """Fingerprint of the model's rows."""

    width: int
    """D"""

    parts: int
    """1 where embedding and head are one matrix, else 2."""

    hidden: int = 128
    """H"""

    layers: int = 2
    most_pieces: int = 16
    """Pieces that are read; a longer token is the mean of its pieces."""

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "most_pieces"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive", got=getattr(self, name))
        if self.hidden % _HEADS:
            raise ConfigError(
                "the width of the hypernetwork does not divide into its heads",
                where="--hidden",
                got=self.hidden,
                expected=f"a multiple of {_HEADS}",
            )


class Hypernetwork(torch.nn.Module):
    """Predicts new rows of all matrices of a vocabulary, side by side.

    Args:
        config: Sizes.
    """

    def __init__(self, config: HypernetworkConfig) -> None:
        super().__init__()
        self.config = config
        width = config.parts * config.width
        self.into = torch.nn.Linear(width, config.hidden)
        self.place = torch.nn.Embedding(config.most_pieces, config.hidden)
        layer = torch.nn.TransformerEncoderLayer(
            config.hidden,
            _HEADS,
            4 * config.hidden,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.encoder = torch.nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)
        self.out = torch.nn.Linear(config.hidden, width)
        torch.nn.init.zeros_(self.out.weight)
        torch.nn.init.zeros_(self.out.bias)

    def forward(self, rows: torch.Tensor, pieces: torch.Tensor) -> torch.Tensor:
        """Predict new rows [N, parts D], fp32.

        Args:
            rows: [V, parts D] old rows, of all matrices side by side, fp32.
            pieces: [N, L] old ids, -1 behind the last one.
        """
        is_piece = pieces >= 0
        read = rows[pieces.clamp(min=0)]
        counts = is_piece.sum(1, keepdim=True)
        mean = (read * is_piece[..., None]).sum(1) / counts
        # Rows differ by orders of magnitude between models; the network sees them alike.
        scale = rows.square().mean().sqrt()
        places = torch.arange(pieces.shape[1], device=pieces.device)
        hidden = self.into(read / scale) + self.place(places)
        hidden = self.encoder(hidden, src_key_padding_mask=~is_piece)
        pooled = (hidden * is_piece[..., None]).sum(1) / counts
        added: torch.Tensor = self.out(pooled) * scale
        return mean + added

    def predict(self, rows: torch.Tensor, pieces: Sequence[Sequence[int]]) -> torch.Tensor:
        """New rows [N, parts D] without a gradient, a few at a time; long tokens are means."""
        device = rows.device
        predicted = []
        with torch.no_grad():
            for start in range(0, len(pieces), _TOKENS):
                part = pieces[start : start + _TOKENS]
                short = [ids for ids in part if len(ids) <= self.config.most_pieces]
                found = iter(self(rows, padded(short, device)) if short else ())
                predicted += [
                    next(found)
                    if len(ids) <= self.config.most_pieces
                    else rows[torch.tensor(list(ids), device=device)].mean(0)
                    for ids in part
                ]
        width = rows.shape[1]
        return torch.stack(predicted) if predicted else rows.new_empty(0, width)

    def save(self, folder: Path) -> None:
        """Write the network to a new folder.

        Raises:
            CheckpointError: The folder is not empty, or cannot be written.
        """
        state = {name: weight.detach().cpu() for name, weight in self.state_dict().items()}

        def write(part: Path) -> None:
            save_file(state, part / WEIGHTS_FILE)
            text = json.dumps(asdict(self.config), indent=2)
            (part / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")

        write_folder(folder, write)

    @classmethod
    def load(cls, folder: Path) -> Hypernetwork:
        """Read a network.

        Raises:
            CheckpointError: The folder holds none.
        """
        try:
            values: dict[str, Any] = read_json(folder / CONFIG_FILE)
            network = cls(HypernetworkConfig(**values))
            network.load_state_dict(load_file(folder / WEIGHTS_FILE))
        except (OSError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                "no hypernetwork can be read",
                where=folder,
                got=str(error).splitlines()[0],
                expected=f"{CONFIG_FILE} and {WEIGHTS_FILE} of transfer train-hypernet",
            ) from error
        return network.eval()


def padded(pieces: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """[N, L] ids, -1 behind the last of a row."""
    longest = max(map(len, pieces))
    rows = [[*ids, *[-1] * (longest - len(ids))] for ids in pieces]
    return torch.tensor(rows, device=device)


def rows_fingerprint(matrices: Sequence[torch.Tensor], ids: int) -> str:
    """SHA-256 of a model's embedding and head [rows, D] without padding, and of their dtypes."""
    digest = hashlib.sha256()
    for matrix in matrices:
        rows = matrix[:ids].contiguous()
        digest.update(str(rows.dtype).encode())
        digest.update(rows.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

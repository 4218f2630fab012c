"""The token that a teacher's server and its students share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from megatron_ext.errors import ConfigError
from megatron_ext.training.serving_config import ServingConfig, is_local

TOKEN_VARIABLE: Final = "MEGATRON_EXT_TEACHER_KEY"
"""Of the environment of a server and of its students."""

_LOCAL: Final = "megatron-ext"
"""Where nobody else can listen, none is needed."""


def server_token(serving: ServingConfig, addresses: Sequence[str]) -> str:
    """Read it from ``serving.token_file``, or else from the environment.

    Args:
        addresses: Where the server listens, HOST:PORT.

    Raises:
        ConfigError: It cannot be read or sent, or there is none, and other machines can reach the
            server.
    """
    where = serving.token_file or TOKEN_VARIABLE
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if serving.token_file is not None:
        token = _read(Path(serving.token_file))
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(
            "the token of a teacher's server cannot be sent",
            where=where,
            got="characters that are not printable ASCII",
            expected="one line of printable ASCII",
            fix="make another one, for example with: openssl rand -hex 32",
        )
    for address in addresses:
        if not token and not is_local(address):
            raise ConfigError(
                "a teacher's server that other machines can reach needs a token",
                where=address,
                got=f"no environment variable {TOKEN_VARIABLE}, and no serving.token_file",
                expected="the same secret where the server and its students start",
                fix="set one of them",
            )
    return token or _LOCAL


def _read(path: Path) -> str:
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        got = getattr(error, "strerror", None) or "no text"
    else:
        if token:
            return token
        got = "an empty file"
    raise ConfigError(
        "the token of a teacher's server cannot be read",
        where=path,
        got=got,
        expected="a file with one line",
        fix="set serving.token_file to it, or leave it out and set " + TOKEN_VARIABLE,
    )

"""A teacher in a process of its own beside a student's rank, and the token of a teacher's server.

Parent and child hold the ends of a socket pair: the child reads the token from it and reports the
address that it listens at. When either of them ends, in whatever way, the other reads the end of
the pair and ends too.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from megatron_ext.errors import ConfigError, DistributedError
from megatron_ext.files import write_text
from megatron_ext.training.configuration.teachers import ServingConfig, is_local

FOLDER: Final = "teachers"
"""In the run's folder: configuration and log of each process."""

_LAUNCH_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "GROUP_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Environment variables that would make the child a rank of the launch. ``LOCAL_RANK`` stays: the
child's device is the student's."""

_END_S: Final = 10.0
_LAST_WORDS_S: Final = 3.0


class Address(NamedTuple):
    """Address and token of one replica of a teacher."""

    address: str
    token: str


class TeacherProcess:
    """The parent's end: a started teacher process.

    Args:
        name: Name of the teacher.
        run_dir: Folder of the run.
        values: The run's configuration.
        rank: The student's rank that starts it.
    """

    def __init__(self, name: str, *, run_dir: Path, values: Mapping[str, Any], rank: int) -> None:
        self._name = name
        folder = run_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        settings, self.log = folder / f"{name}-{rank}.yaml", folder / f"{name}-{rank}.log"
        write_text(settings, yaml.safe_dump(dict(values), sort_keys=False))
        self._token = secrets.token_hex(32)
        self._socket, child = socket.socketpair()
        command = [sys.executable, "-m", "megatron_ext", "serve-teacher", "--config", str(settings)]
        command += ["--teacher", name, "--parent-fd", str(child.fileno())]
        with child, self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[child.fileno()],
                env=_environment(),
            )
        self._socket.sendall(f"{self._token}\n".encode())

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def address(self, timeout_s: float) -> Address:
        """Address at which it listens; waits until it does.

        Raises:
            DistributedError: It has ended, or does not report an address in time.
        """
        self._socket.settimeout(timeout_s)
        try:
            line = self._socket.makefile("r").readline()
        except TimeoutError:
            line = None
        if not line:
            raise DistributedError(
                f"the teacher {self._name} {'does not answer' if line is None else 'is gone'}",
                got=self.why_gone() or "no address",
                where=self.log,
                fix="look at its log",
            )
        return Address(str(json.loads(line)), self._token)

    def why_gone(self) -> str | None:
        """Exit code or signal, and the last line of its log; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_LAST_WORDS_S)
            if code <= 0:
                return f"killed by {signal.Signals(-code).name}" if code else "exit code 0"
            lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            return f"exit code {code}; {lines[-1][:300] if lines else 'no word'}"
        return None

    def close(self) -> None:
        """Wait for it to end, and kill it if it does not."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._socket.close()
        self._process.kill()
        self._process.wait()


class ParentSocket:
    """The child's end of the socket pair; the process ends when the parent does.

    Args:
        descriptor: File descriptor of this end.
    """

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._file = self._socket.makefile("rw")
        self.token = self._file.readline().strip()
        threading.Thread(target=self._end_with_parent, name="parent", daemon=True).start()

    def announce(self, address: str) -> None:
        """Report the address that the child listens at."""
        self._socket.sendall(f"{json.dumps(address)}\n".encode())

    def _end_with_parent(self) -> None:
        with suppress(OSError):
            while self._socket.recv(1):
                pass
        sys.stderr.write("the student's rank that started this teacher has ended\n")
        sys.stderr.flush()
        os._exit(1)


def _environment() -> dict[str, str]:
    return {
        key: value
        for key, value in os.environ.items()
        if key not in _LAUNCH_VARIABLES and not key.startswith("TORCHELASTIC")
    }


TOKEN_VARIABLE: Final = "MEGATRON_EXT_TEACHER_KEY"
"""Environment variable with the token, for a server and its students."""

_FEWEST_CHARACTERS: Final = 16


def set_token(serving: ServingConfig) -> str | None:
    """Read a token from ``serving.token_file``, or else from the environment; None without one.

    Raises:
        ConfigError: It cannot be read or sent, or is short.
    """
    if serving.token_file is not None:
        token = _read(Path(serving.token_file))
    elif TOKEN_VARIABLE in os.environ:
        token = os.environ[TOKEN_VARIABLE].strip()
    else:
        return None
    where = serving.token_file or TOKEN_VARIABLE
    fix = "make another one, for example with: openssl rand -hex 32"
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(
            "the token of a teacher's server cannot be sent",
            where=where,
            got="characters that are not printable ASCII",
            expected="one line of printable ASCII",
            fix=fix,
        )
    if len(token) < _FEWEST_CHARACTERS:
        raise ConfigError(
            "the token of a teacher's server is too short",
            where=where,
            got=f"{len(token)} characters",
            expected=f"{_FEWEST_CHARACTERS} characters or more",
            fix=fix,
        )
    return token


def server_token(serving: ServingConfig, address: str) -> str:
    """The token that is set, for a server at an address HOST:PORT.

    Raises:
        ConfigError: It cannot be read or sent, is short, or there is none.
    """
    token = set_token(serving)
    if token is None:
        raise ConfigError(
            "a teacher's server needs a token"
            if is_local(address)
            else "a teacher's server that other machines can reach needs a token",
            where=address,
            got=f"no environment variable {TOKEN_VARIABLE}, and no serving.token_file",
            expected="the same secret where the server and its students start",
            fix="set one of them; a server that only its machine can reach prints its own",
        )
    return token


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

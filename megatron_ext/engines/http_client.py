"""Requests to inference servers over HTTP: retried, bounded in number and in time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Final

import requests
from requests.adapters import HTTPAdapter
from requests.utils import get_environ_proxies
from urllib3.response import BaseHTTPResponse
from urllib3.util import Retry

from megatron_ext.engines.engine import EngineConfig
from megatron_ext.errors import ConfigError, DistributedError

_CONNECT_S: Final = 10.0
_RETRIED: Final = (408, 425, 429, 500, 502, 503, 504)
_PART_BYTES: Final = 1 << 20
_MOST_BYTES: Final = 1 << 30
_LONGEST_PAUSE_S: Final = 60.0
"""Longest pause that a server is given where it asks for one, which may be for a day."""

_SHOWN: Final = 300
"""Characters of a server's words in an error."""


class _Retry(Retry):
    """Repetitions with pauses that a server asks for (``Retry-After``), of a limited length."""

    def get_retry_after(self, response: BaseHTTPResponse) -> float | None:
        asked = super().get_retry_after(response)
        return None if asked is None else min(asked, _LONGEST_PAUSE_S)


class HttpClient:
    """A client of one or several equal servers, to which requests are dealt.

    Requests that fail on the way, or for which a server has no time, are repeated with growing
    pauses. Requests must be safe to repeat.

    Args:
        config: Addresses, limits and where the key is.
        where: Section of the configuration, for errors.

    Raises:
        ConfigError: The key cannot be sent, or the root certificate is missing.
    """

    def __init__(self, config: EngineConfig, *, where: str) -> None:
        self._config, self._where = config, where
        self._session = requests.Session()
        # Keys of the environment, as in .netrc, would take the place of the configured one.
        self._session.trust_env = False
        retry = _Retry(
            total=config.retries,
            backoff_factor=0.5,
            status_forcelist=_RETRIED,
            allowed_methods=None,
            raise_on_status=False,
        )
        adapter = HTTPAdapter(max_retries=retry, pool_maxsize=config.concurrency)
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, adapter)
        roots = os.environ.get("REQUESTS_CA_BUNDLE")
        self._session.verify = config.root_certificate or roots or True
        if config.root_certificate is not None and not Path(config.root_certificate).is_file():
            raise ConfigError(
                "there is no file of root certificates",
                where=f"{where}.root_certificate",
                got=config.root_certificate,
                fix="correct the path, or leave it out where the system's own roots do",
            )
        key = os.environ.get(config.key_variable, "").strip()
        if not key.isascii() or not key.isprintable():
            # Not shown: requests would have it in its error.
            raise ConfigError(
                "a key holds a character that no request can carry",
                where=f"the environment variable {config.key_variable}",
                expected="printable ASCII characters",
            )
        if key:
            self._session.headers["Authorization"] = f"Bearer {key}"
        # Daemons: a process ends whatever a server does that was asked and has not answered.
        self._threads = ThreadPool(config.concurrency)

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses of the servers, without the ``/v1`` that clients of OpenAI's are given."""
        return tuple(url.rstrip("/").removesuffix("/v1") for url in self._config.url)

    def get(self, path: str, *, server: int = 0) -> Any:
        """JSON of a GET; errors as ``post``."""
        return self._request("GET", path, None, server)

    def post(self, path: str, body: Mapping[str, Any], *, server: int = 0) -> Any:
        """JSON of the answer to a POST of JSON.

        Raises:
            DistributedError: The server cannot be reached, refuses the request, takes too long or
                answers no JSON; after all retries.
        """
        return self._request("POST", path, body, server)

    def begin(self, path: str, bodies: Sequence[Mapping[str, Any]]) -> list[Callable[[], Any]]:
        """Begin several requests, some of them under way at a time; each result waits for its
        answer, and has the errors of ``post``."""
        return [
            self._threads.apply_async(
                self.post, (path, body), {"server": number % len(self.servers)}
            ).get
            for number, body in enumerate(bodies)
        ]

    def close(self) -> None:
        """End all requests that have not begun, and the connections."""
        self._threads.terminate()
        self._session.close()

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None, server: int) -> Any:
        url = self.servers[server] + path
        try:
            with self._session.request(
                method,
                url,
                json=body,
                timeout=(_CONNECT_S, self._config.timeout_s),
                proxies=get_environ_proxies(url),
                # Elsewhere nobody was asked for.
                allow_redirects=False,
                stream=True,
            ) as answer:
                content = self._content(answer, url)
        except requests.RequestException as error:
            raise self._failed(url, _reason(error)) from error
        if answer.status_code != requests.codes.ok:
            said = content[:_SHOWN].decode(errors="replace").strip()
            raise self._failed(url, f"status {answer.status_code}: {said}")
        try:
            return json.loads(content)
        except ValueError as error:
            raise self._failed(url, f"no JSON: {content[:_SHOWN]!r}") from error

    def _content(self, answer: requests.Response, url: str) -> bytes:
        """The bytes of an answer that has begun, of a limited size and in a limited time."""
        deadline = time.monotonic() + self._config.timeout_s
        content = bytearray()
        for part in answer.iter_content(_PART_BYTES):
            content += part
            if len(content) > _MOST_BYTES:
                raise self._failed(url, f"more than {_MOST_BYTES >> 20} MiB")
            if time.monotonic() > deadline:
                raise self._failed(url, "no whole answer in time")
        return bytes(content)

    def _failed(self, url: str, got: str) -> DistributedError:
        return DistributedError(
            f"the engine at {url} has not answered",
            where=self._where,
            got=got,
            fix="look at the server's log; a key is read from the environment variable "
            f"{self._config.key_variable}",
        )


def _reason(error: requests.RequestException) -> str:
    """What went wrong first, without the objects that urllib3 names."""
    cause: BaseException = error
    while (inner := cause.__cause__ or cause.__context__) is not None:
        cause = inner
    if isinstance(cause, TimeoutError) or isinstance(error, requests.Timeout):
        return "no answer in time"
    if isinstance(error, requests.exceptions.SSLError):
        return "a certificate that cannot be verified"
    return f"{type(cause).__name__}: {cause}"[:_SHOWN]

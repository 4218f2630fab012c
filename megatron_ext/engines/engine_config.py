"""Configuration section of an inference server that samples or predicts for a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from megatron_ext.errors import ConfigError

EngineKind = Literal["vllm", "sglang"]


@dataclass(kw_only=True, frozen=True, slots=True)
class EngineConfig:
    """A server of vLLM or SGLang that was started before the run."""

    kind: EngineKind
    """``vllm`` (``vllm serve``) or ``sglang`` (``sglang.launch_server``)."""

    url: tuple[str, ...]
    """Addresses, such as ``http://127.0.0.1:8000``; of several equal servers each takes a part of
    the requests."""

    model: str | None = None
    """Name under which the server has the model; its only one when not given."""

    key_variable: str = "MEGATRON_EXT_ENGINE_KEY"
    """Environment variable with the server's API key."""

    root_certificate: str | None = None
    """PEM file that verifies the certificates of ``https`` addresses; the system's own roots when
    not given."""

    plain_connection: bool = False
    """Allow ``http`` to other machines, over a trusted network."""

    timeout_s: float = 600.0
    """Longest wait for the answer to one request."""

    retries: int = 5
    """Repetitions of a request that failed on the way or was refused for lack of time."""

    concurrency: int = 32
    """Requests under way at a time."""

    def __post_init__(self) -> None:
        if not self.url:
            raise ConfigError("an engine has no address", expected="a URL in url")
        for name, least in (("timeout_s", 0), ("concurrency", 0), ("retries", -1)):
            if not getattr(self, name) > least:
                raise ConfigError(f"{name} of an engine is too small", got=getattr(self, name))
        for url in self.url:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ConfigError(
                    "an engine's address cannot be used", got=url, expected="http(s)://HOST:PORT"
                )
            host = parts.hostname
            is_local = host in ("localhost", "::1") or host.startswith("127.")
            if parts.scheme == "http" and not (is_local or self.plain_connection):
                raise ConfigError(
                    "an engine on another machine needs TLS",
                    got=url,
                    expected="https",
                    fix="put the server behind TLS, or set plain_connection where the network is "
                    "trusted",
                )

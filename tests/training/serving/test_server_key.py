"""The key of a teacher's server, which only one machine does without."""

from __future__ import annotations

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.training.serving.serve_teacher import KEY_VARIABLE, server_key


@pytest.mark.parametrize("address", ["node7:7000", "0.0.0.0:7000", "[::]:7000"])
def test_a_server_that_others_reach_needs_a_key(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=KEY_VARIABLE) as refused:
        server_key(["127.0.0.1:7000", address])
    assert str(refused.value).startswith(address)
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    assert server_key([address]) == b"secret"


@pytest.mark.parametrize("address", ["127.0.0.1:7000", "localhost:7000", "[::1]:7000"])
def test_one_machine_does_without(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert server_key([address])

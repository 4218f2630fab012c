"""The token of a teacher's server, which only one machine does without."""

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.training.configuration.teachers import ServingConfig
from megatron_ext.training.teachers.teacher_process import TOKEN_VARIABLE, server_token, set_token

ENVIRONMENT = ServingConfig()


@pytest.fixture(autouse=True)
def without_variable(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


@pytest.mark.parametrize("address", ["node7:7000", "0.0.0.0:7000", "[::]:7000"])
def test_a_server_that_others_reach_needs_a_token(monkeypatch, address):
    with pytest.raises(ConfigError, match=TOKEN_VARIABLE) as refused:
        server_token(ENVIRONMENT, address)
    assert str(refused.value).startswith(address)
    monkeypatch.setenv(TOKEN_VARIABLE, "0123456789abcdef")
    assert server_token(ENVIRONMENT, address) == "0123456789abcdef"


@pytest.mark.parametrize("address", ["127.0.0.1:7000", "localhost:7000", "[::1]:7000"])
def test_a_server_of_one_machine_makes_its_own(address):
    assert set_token(ENVIRONMENT) is None
    with pytest.raises(ConfigError, match=TOKEN_VARIABLE):
        server_token(ENVIRONMENT, address)


@pytest.mark.parametrize("token", [" ", "short", "a" * 15])
def test_a_token_that_can_be_guessed_is_refused(monkeypatch, token):
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    with pytest.raises(ConfigError, match="16 characters") as refused:
        set_token(ENVIRONMENT)
    assert f"got {token}" not in str(refused.value)


def test_a_file_goes_before_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv(TOKEN_VARIABLE, "another")
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    assert server_token(ServingConfig(token_file=str(file)), "node7:7000") == "0123456789abcdef"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read; got No such file"),
        (b" \n", "cannot be read; got an empty file"),
        (b"\xff", "cannot be read; got no text"),
        ("schlüssel".encode(), "cannot be sent; got characters that are not printable ASCII"),
        (b"two\nlines", "cannot be sent"),
    ],
    ids=["none", "empty", "bytes", "letters", "lines"],
)
def test_a_file_that_has_no_token_is_named_and_what_it_has_is_not(content, words, tmp_path):
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        set_token(ServingConfig(token_file=str(file)))
    assert str(refused.value).startswith(str(file))
    assert words in str(refused.value)
    assert "schl" not in str(refused.value)
    assert "lines" not in str(refused.value)

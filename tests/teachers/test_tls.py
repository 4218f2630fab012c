"""A connection is encrypted where both sides say so, and refused by name where they do not."""

import socket
import threading
from unittest.mock import patch

import pytest
import torch

from megatron_ext.errors import ConfigError, DistributedError
from megatron_ext.teachers import channels as offers
from megatron_ext.teachers.listener import ServerTls, TeacherListener
from tests.certificates import make_certificate
from tests.teachers.stand_in_teacher import (
    TOKEN,
    TableTeacher,
    connected,
    expected,
    rows_of,
    server_of,
    serving,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def secure(pair):
    with serving(server_of(TableTeacher()), tls=pair) as address:
        yield address


@pytest.mark.parametrize("channels", [{}, offers.CHANNELS], ids=["flight", "shared_memory"])
def test_answers_come_through_tls(secure, pair, channels):
    rows = rows_of(1)
    with patch.dict(offers.CHANNELS, channels, clear=True):
        client = connected(secure, root_certificate=pair.certificate)
        (fields,) = client.answer(client.ask([rows]))
    assert torch.equal(fields["hidden"], expected(rows))
    client.close()


def test_another_token_is_refused_and_told_to_nobody(secure, pair):
    with pytest.raises(ConfigError, match="has another token") as refused:
        connected(secure, root_certificate=pair.certificate, token="a-wrong-one")
    assert "a-wrong-one" not in str(refused.value)
    assert TOKEN not in str(refused.value)


@pytest.mark.parametrize(
    ("host", "root", "words"),
    [
        ("127.0.0.1", "other", r"another certificate; got self.signed cert"),
        ("localhost", "own", "another certificate; got Hostname mismatch"),
        ("127.0.0.1", None, r"has TLS; got no root certificate; .*; set serving\.root_certificate"),
    ],
    ids=["certificate", "name", "plain"],
)
def test_a_connection_that_is_not_to_be_trusted_is_refused(secure, pair, other, host, root, words):
    files = {"own": pair.certificate, "other": other.certificate, None: None}
    with pytest.raises(ConfigError, match=words):
        connected(secure.replace("127.0.0.1", host), root_certificate=files[root])


def test_a_server_without_tls_is_refused_by_a_student_that_has_it(pair):
    with (
        serving(server_of(TableTeacher())) as address,
        pytest.raises(ConfigError, match=r"has no TLS; got WRONG_VERSION.*--tls-cert"),
    ):
        connected(address, root_certificate=pair.certificate)


@pytest.mark.parametrize("content", [None, "no certificate"], ids=["none", "text"])
def test_a_root_certificate_that_cannot_be_read_is_named(secure, content, tmp_path):
    file = tmp_path / "root.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="root certificate for teacher table cannot be") as e:
        connected(secure, root_certificate=file)
    assert str(e.value).startswith(str(file))


def test_a_key_of_another_certificate_is_refused(pair, other):
    mixed = ServerTls(pair.certificate, other.key)
    with pytest.raises(ConfigError, match=r"cannot be used; got KEY_VALUES_MISMATCH.*--tls-key"):
        TeacherListener("127.0.0.1:0", TOKEN, mixed)
    missing = ServerTls(pair.certificate.with_name("none"), pair.key)
    with pytest.raises(ConfigError, match="cannot be used; got No such file"):
        TeacherListener("127.0.0.1:0", TOKEN, missing)


def test_what_is_no_server_of_ours_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as rude:

        def answer():
            while True:
                try:
                    its, _ = rude.accept()
                except OSError:
                    return
                its.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(DistributedError, match="is gone; got connection closed without"):
            connected(f"127.0.0.1:{rude.getsockname()[1]}", timeout_s=2)
        rude.shutdown(socket.SHUT_RDWR)

"""A server answers what it is asked, through TLS or not, and nobody who means another teacher."""

import dataclasses
import socket
import threading
from contextlib import closing
from unittest.mock import patch

import pytest
import torch

from megatron_ext.errors import ConfigError, DistributedError, MegatronExtError
from megatron_ext.losses import TeacherTargets
from megatron_ext.teachers import channels as offers
from megatron_ext.teachers.base import TokenRows
from megatron_ext.teachers.connection import own_addresses
from megatron_ext.teachers.formed_targets import FormedTargets, from_records, to_records
from megatron_ext.teachers.listener import ServerTls, TeacherListener
from megatron_ext.teachers.target_form import TargetForm
from tests.certificates import make_certificate
from tests.teachers.stand_in_teacher import (
    HEAD,
    HIDDEN,
    IDENTITY,
    POISON,
    TOKEN,
    VOCAB,
    WIDTH,
    TableTeacher,
    connected,
    expected,
    rows_of,
    server_of,
    serving,
)


@pytest.mark.parametrize("channel", ["shared_memory", "flight"])
def test_answers_come_back_whatever_their_channel_order_and_size(channel):
    channels = {} if channel == "flight" else offers.CHANNELS
    teacher = TableTeacher()
    with (
        patch.dict(offers.CHANNELS, channels, clear=True),
        serving(server_of(teacher), until_client_leaves=True) as address,
    ):
        client = connected(address)
        assert client.channel == channel
        assert torch.equal(client.head(), HEAD)
        # Larger and larger: segments of shared memory are replaced on the way.
        asked = [
            [rows_of(3 * n + k, (2, 2 << n)) for k in range(1 + n % 3)] for n in range(0, 16, 3)
        ]
        asked.append(asked[0])
        numbers = [client.ask(rows) for rows in asked]
        for number, rows in reversed(list(zip(numbers, asked, strict=True))):
            found = client.answer(number)
            assert len(found) == len(rows)
            for fields, its in zip(found, rows, strict=True):
                assert torch.equal(fields["hidden"], expected(its))
        tokens = sum(its.tokens.numel() for rows in asked for its in rows)
        assert client.received_tokens == tokens
        assert 0 < client.received_bytes - tokens * HIDDEN.bytes_per_token < 20_000
        client.close()
    assert teacher.calls == [len(rows) for rows in asked]


@pytest.mark.parametrize(
    ("kind", "top_k", "precision"),
    [("topk", 5, "fp32"), ("topk", 64, "fp16"), ("label", 0, None), ("hidden", 0, "bf16")],
)
def test_other_forms_are_those_that_a_cache_keeps(kind, top_k, precision):
    form = TargetForm.of(
        kind, precision=precision, top_k=min(top_k, VOCAB), hidden_size=WIDTH, vocab_size=VOCAB
    )
    rows = rows_of(1)
    with serving(server_of(TableTeacher(), form), until_client_leaves=True) as address:
        client = connected(address, form=form)
        (fields,) = client.answer(client.ask([rows]))
        client.close()
    formed = FormedTargets(form=form, boundary=torch.arange(VOCAB) % 3 == 0)
    targets = TeacherTargets(
        kind="hidden", shard=TableTeacher().shard, hidden=expected(rows), head_weight=HEAD
    )
    direct = {name: x.flatten(0, 1) for name, x in formed(targets, rows.labels).items()}
    kept = from_records(to_records(direct, form), form)
    assert fields.keys() == kept.keys()
    for name, values in kept.items():
        assert torch.equal(fields[name].flatten(0, 1), values)


def test_students_ask_replicas_in_turn_and_a_replica_answers_several():
    assert own_addresses("abcde", client=1, clients=2) == ["b", "d"]
    assert own_addresses("ab", client=3, clients=4) == ["b"]
    teacher = TableTeacher()
    with serving(server_of(teacher), until_client_leaves=True) as address:
        students = connected(address), connected(address)
        rows = [rows_of(seed) for seed in range(5)]
        for student in students:
            found = student.answer(student.ask(rows))
            for fields, its in zip(found, rows, strict=True):
                assert torch.equal(fields["hidden"], expected(its))
        for student in students:
            student.close()
    assert teacher.calls == [5, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token": "another"}, "has another token"),
        (
            {"identity": {**IDENTITY, "teacher checkpoint": "d" * 64}},
            "has another teacher checkpoint; got cccccccccccc; expected dddddddddddd",
        ),
        ({"identity": {**IDENTITY, "precision": "bf16"}}, "has another precision; got none"),
        ({"form": dataclasses.replace(HIDDEN, vocab_size=9)}, "has another vocabulary; got 53"),
        (
            {"form": dataclasses.replace(HIDDEN, precision="bf16")},
            "targets of another form; got hidden 8 in fp32; expected hidden 8 in bf16",
        ),
    ],
    ids=["token", "checkpoint", "unknown", "vocabulary", "form"],
)
def test_another_teacher_than_the_run_means_is_refused(changes, message):
    with serving(server_of(TableTeacher())) as address:
        with pytest.raises(ConfigError, match=message) as caught:
            connected(address, **changes)
        assert str(caught.value).startswith(address)
        assert len(str(caught.value).splitlines()) == 1
        # The server is there for the next.
        client = connected(address)
        assert torch.equal(client.head(), HEAD)
        client.close()


def test_another_version_of_the_protocol_is_refused():
    server = server_of(TableTeacher())
    server._hello = dataclasses.replace(server._hello, protocol=0)
    with (
        serving(server) as address,
        pytest.raises(ConfigError, match="another version of the protocol; got 0"),
    ):
        connected(address)


def test_strangers_and_bad_requests_harm_no_other_student():
    with serving(server_of(TableTeacher())) as address:
        host, port = address.split(":")
        silent = socket.create_connection((host, int(port)))
        with socket.create_connection((host, int(port))) as rude:
            rude.sendall(b"GET / HTTP/1.1\r\n\r\n")
        good, bad = connected(address), connected(address)
        number = bad.ask([dataclasses.replace(rows_of(1), tokens=torch.full((2, 6), VOCAB))])
        with pytest.raises(DistributedError, match="tokens that the teacher does not have"):
            bad.answer(number)
        rows = rows_of(2)
        (fields,) = good.answer(good.ask([rows]))
        assert torch.equal(fields["hidden"], expected(rows))
        good.close()
        silent.close()


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_teacher_that_fails_for_one_request_says_why(is_shared):
    """A server goes on with its other students; a run's own teacher ends with the error."""
    with serving(server_of(TableTeacher()), until_client_leaves=not is_shared) as address:
        students = connected(address), connected(address)
        rows = rows_of(1)
        poisoned = TokenRows(
            tokens=rows.tokens.index_fill(1, torch.tensor([0]), POISON),
            position_ids=rows.position_ids,
        )
        numbers = [students[0].ask([rows]), students[0].ask([poisoned])]
        assert len(students[0].answer(numbers[0])) == 1
        reason = "the teacher table is gone; got ArithmeticError: a number that no one; "
        with pytest.raises(DistributedError, match=reason):
            students[0].answer(numbers[1])
        if is_shared:
            (fields,) = students[1].answer(students[1].ask([rows]))
            assert torch.equal(fields["hidden"], expected(rows))
        else:
            with pytest.raises(DistributedError, match=reason):
                students[1].answer(students[1].ask([rows]))
        for student in students:
            student.close()


def test_a_server_leaves_signals_to_a_student_when_one_is_there():
    joined = []
    server = server_of(TableTeacher())
    with serving(
        server, until_client_leaves=True, on_joined=lambda: joined.append(len(server._sessions))
    ) as address:
        assert not joined
        student = connected(address)
        student.answer(student.ask([rows_of(0)]))
        assert joined == [1]
        student.close()


def test_a_server_that_no_student_comes_to_gives_up():
    server = server_of(TableTeacher(), timeout_s=0.1)
    with (
        closing(TeacherListener("127.0.0.1:0", "")) as listener,
        pytest.raises(DistributedError, match="no student came to the teacher table"),
    ):
        server.serve(listener, until_client_leaves=True)


def test_an_address_that_nobody_listens_at_is_refused_in_time(monkeypatch, capsys):
    monkeypatch.setattr("megatron_ext.teachers.remote_server._SILENT_S", 0.1)
    with closing(TeacherListener("127.0.0.1:0", "")) as listener:
        address = listener.address
    with pytest.raises(DistributedError, match="does not answer; got Connection refused"):
        connected(address, timeout_s=0.5)
    told = capsys.readouterr().err
    assert told.count("waiting for the teacher") == 1
    assert f"at {address} (Connection refused), up to " in told
    with pytest.raises(DistributedError, match="is gone; got exit code 3"):
        connected(address, timeout_s=30, why_gone=lambda: "exit code 3")


@pytest.mark.parametrize("address", ["here", "here:", ":80", "here:port", "here:70000"])
def test_an_address_is_a_host_and_a_port(address):
    with pytest.raises(MegatronExtError, match="HOST:PORT"):
        TeacherListener(address, "")


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

"""Students that mean harm, against a real server process, and what each came to.

``ATTACKS`` has a function for each, which takes the server's address. After each of them a
well-behaved student asks, and its answer is compared.
"""

import json
import random
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import torch

from megatron_ext.teachers.flight import SCHEMA, Frame, fl, header_of, receive, to_chunks
from megatron_ext.teachers.messages import HEAD, HELLO, READY, REQUEST, RETURNED, Request
from tests.teachers.stand_in_teacher import (
    TOKEN,
    VOCAB,
    ServerProcess,
    connected,
    expected,
    rows_of,
)

_ANSWER_S: Final = 5.0
Attack = Callable[[str], None]
GOOD: Final = Request(0, [rows_of(1)]).to_frame("hidden")


def options(token: str = TOKEN, timeout: float = _ANSWER_S) -> Any:
    """Of a call."""
    return fl.FlightCallOptions(
        timeout=timeout, headers=[(b"authorization", f"Bearer {token}".encode())]
    )


@contextmanager
def exchange(address: str, token: str = TOKEN) -> Iterator[tuple[Any, Any]]:
    """Writer and reader of a call, ended without a word."""
    with closing(fl.FlightClient(f"grpc://{address}")) as client:
        writer, reader = client.do_exchange(fl.FlightDescriptor.for_command(b""), options(token))
        with suppress(fl.FlightError, OSError, StopIteration, pa.ArrowException):
            try:
                yield writer, reader
            finally:
                with suppress(fl.FlightError, OSError):
                    reader.cancel()


def say(writer: Any, frame: Frame) -> None:
    """Send a frame."""
    for batch, metadata in to_chunks(frame):
        writer.write_with_metadata(batch, metadata)


def last_word(reader: Any) -> str:
    """Kind of the last frame until the call ends."""
    kind = "nothing"
    with suppress(fl.FlightError, OSError, StopIteration, pa.ArrowException):
        while kind != "error":
            kind = receive(reader).kind
    return kind


def frames(*sent: Frame, joins: bool = True, waits: bool = True) -> Attack:
    """Say frames to the server, and wait for its last word."""

    def attack(address: str) -> None:
        with exchange(address) as (writer, reader):
            writer.begin(SCHEMA)
            if joins:
                say(writer, Frame(READY, {"channel": "flight"}, {}))
            for frame in sent:
                say(writer, frame)
            if waits:
                assert last_word(reader) == "error"

    return attack


def header(content: bytes) -> Attack:
    """A frame with a header of the attacker's own."""

    def attack(address: str) -> None:
        with exchange(address) as (writer, reader):
            writer.begin(SCHEMA)
            say(writer, Frame(READY, {"channel": "flight"}, {}))
            empty = pa.RecordBatch.from_arrays([pa.array([], pa.uint8())], schema=SCHEMA)
            writer.write_with_metadata(empty, content)
            assert last_word(reader) == "error"

    return attack


def request(values: Mapping[str, Any] | None = None, **tensors: torch.Tensor | None) -> Attack:
    """A request with other values, or tensors of its one microbatch."""
    changed = dict(GOOD.tensors)
    for name, tensor in tensors.items():
        changed.pop(f"{name}/0", None)
        if tensor is not None:
            changed[f"{name}/0"] = tensor
    return frames(Frame(REQUEST, {"number": 0, "count": 1} | dict(values or {}), changed))


def described(shape: list[Any], dtype: str = "int32") -> Attack:
    """A header of a tensor that does not follow."""
    values = {"kind": REQUEST, "values": {"number": 0, "count": 1}}
    return header(json.dumps(values | {"tensors": [["tokens/0", dtype, shape]]}).encode())


def connections(count: int, content: bytes = b"") -> Attack:
    """Connections without a call, held for a moment."""

    def attack(address: str) -> None:
        host, port = address.split(":")
        held = []
        with suppress(OSError):
            for _ in range(count):
                held.append(socket.create_connection((host, int(port)), 2))
                held[-1].sendall(content)
        time.sleep(0.3)
        for connection in held:
            connection.close()

    return attack


def call(method: str, *arguments: Any, token: str = TOKEN) -> Attack:
    """Another call of Flight."""

    def attack(address: str) -> None:
        client = fl.FlightClient(f"grpc://{address}")
        with suppress(fl.FlightError, pa.ArrowException, OSError):
            list(getattr(client, method)(*arguments, options(token)))
        client.close()

    return attack


def stranger(token: str) -> Attack:
    """An exchange with another token."""

    def attack(address: str) -> None:
        try:
            with exchange(address, token) as (writer, reader):
                writer.begin(SCHEMA)
                assert last_word(reader) == "nothing"
        except fl.FlightUnauthenticatedError:
            return

    return attack


def other_batches(address: str) -> None:
    """Batches of another schema."""
    with exchange(address) as (writer, reader):
        schema = pa.schema([("bytes", pa.string())])
        writer.begin(schema)
        batch = pa.RecordBatch.from_arrays([pa.array(["a", None])], schema=schema)
        writer.write_with_metadata(batch, header_of(GOOD))
        assert last_word(reader) == "error"


_SHAPE: Final = (2, 6)


def _ids(value: int, shape: tuple[int, ...] = _SHAPE) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.int32)


_NESTED: Final = b'{"kind":' + b"[" * 100_000 + b"]" * 100_000 + b"}"

ATTACKS: Final[dict[str, Attack]] = {
    **{
        f"count {json.dumps(value)[:20]}": request({"count": value})
        for value in (-5, [1], None, float("inf"), float("nan"), 2, 10**9, 2**80, "1", True, 1.0)
    },
    **{
        f"number {json.dumps(value)[:20]}": request({"number": value})
        for value in (-1, None, [0], {}, 2**80, "0")
    },
    **{
        f"{name} missing": request(**{name: None})  # type: ignore[arg-type]
        for name in ("tokens", "position_ids")
    },
    **{
        f"{name} as {dtype}": request(**{name: torch.zeros(_SHAPE, dtype=dtype)})  # type: ignore[arg-type]
        for name in ("tokens", "position_ids")
        for dtype in (torch.float32, torch.bool, torch.uint8)
    },
    "positions NaN": request(position_ids=torch.full(_SHAPE, torch.nan)),
    "positions negative": request(position_ids=_ids(-1)),
    "positions far": request(position_ids=_ids(2**31 - 1)),
    "positions of another shape": request(position_ids=_ids(0, (2, 5))),
    "tokens of one dimension": request(tokens=_ids(0, (12,))),
    "tokens of three": request(tokens=_ids(0, (2, 6, 1))),
    "no tokens": request(tokens=_ids(0, (0, 6)), position_ids=_ids(0, (0, 6))),
    "id behind the vocabulary": request(tokens=_ids(VOCAB)),
    "id negative": request(tokens=_ids(-1)),
    "bounds of two dimensions": request(cu_seqlens=_ids(1, (2, 2))),
    "bounds that fall": request(cu_seqlens=torch.tensor([0, 9, 3], dtype=torch.int32)),
    "bounds outside": request(cu_seqlens=torch.tensor([0, 99], dtype=torch.int32)),
    "bounds of floats": request(cu_seqlens=torch.tensor([0.0, torch.nan])),
    "no bounds": request(cu_seqlens=torch.zeros(0, dtype=torch.int32)),
    "another tensor": request(more=_ids(0)),
    **{
        f"shape {json.dumps(shape)[:30]}": described(shape)
        for shape in ([2**62], [2**80], [1 << 34], [-1], [0, 2**62], [1] * 9, [float("inf")])
    },
    "another dtype": described([2], "float64"),
    "deep JSON": header(_NESTED),
    "no JSON": header(b"\xff{"),
    "JSON of another kind": header(b"[]"),
    "long header": header(b" " * (5 << 20)),
    "many tensors": header(
        b'{"kind":"request","values":{},"tensors":['
        + b",".join([b'["a","int32",[0]]'] * 40_000)
        + b"]}"
    ),
    "no header": header(b""),
    "batches of another schema": other_batches,
    "request before ready": frames(GOOD, joins=False),
    "ready twice": frames(Frame(READY, {"channel": "flight"}, {})),
    **{
        f"channel {channel}": frames(Frame(READY, {"channel": channel}, {}), GOOD, joins=False)
        for channel in ("cuda_ipc", "none", None, ["flight"])
    },
    "memory that was not lent": frames(Frame(RETURNED, {"segment": 3}, {})),
    "memory without a number": frames(Frame(RETURNED, {}, {})),
    "unknown frame": frames(Frame("x" * 9999, {}, {})),
    "many heads": frames(*[Frame(HEAD, {}, {})] * 9),
    "flood of requests": frames(*[GOOD] * 2000, waits=False),
    "requests and gone": frames(*[GOOD] * 100, waits=False),
    "connections": connections(100),
    "connections with garbage": connections(30, b"GET / HTTP/1.1\r\n\r\n"),
    "connections with half a greeting": connections(30, b"PRI * HTTP/2.0\r\n"),
    "another token": stranger("0" * 16),
    "no token": stranger(""),
    "another action": call("do_action", fl.Action("rm", b"")),
    "list of actions": call("list_actions"),
    "list of flights": call("list_flights", b""),
    "action without a token": call("do_action", fl.Action(HELLO, b""), token=""),
}


class Target:
    """A server process that is attacked."""

    def __init__(self, folder: Path) -> None:
        self.server = ServerProcess(folder, is_shared=True)
        self.address = self.server.address
        self.student = connected(self.address)

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return bool(self.server.process.is_alive())

    def is_right(self, seed: int) -> bool:
        """Whether a student that was there and a new one get the right answers."""
        rows = rows_of(seed)
        new = connected(self.address)
        try:
            return all(
                torch.equal(it.answer(it.ask([rows]))[0]["hidden"], expected(rows))
                for it in (self.student, new)
            )
        finally:
            new.close()

    def descriptors(self) -> int:
        """Open files of the process."""
        return len(list(Path(f"/proc/{self.server.pid}/fd").iterdir()))

    def memory(self) -> int:
        """Resident bytes of the process."""
        return int(Path(f"/proc/{self.server.pid}/statm").read_text().split()[1]) * 4096

    def close(self) -> None:
        """End the student, then the process."""
        self.student.close()
        self.server.end()


def run(seconds: float, seed: int) -> dict[str, Any]:
    """Counts of what became of the attacks in a random order, until the time is over."""
    counts: dict[str, Any] = dict.fromkeys(
        ("attacks", "dead_servers", "wrong_answers", "not_refused", "leaked_descriptors"), 0
    )
    counts["found"] = []
    pick, end = random.Random(seed), time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        target = Target(Path(folder))
        target.is_right(0)
        files, memory = target.descriptors(), target.memory()
        while time.monotonic() < end and target.is_alive():
            name = pick.choice(list(ATTACKS))
            counts["attacks"] += 1
            try:
                ATTACKS[name](target.address)
            except AssertionError:
                counts["not_refused"] += 1
                counts["found"].append(name)
            if not target.is_alive():
                counts["dead_servers"] += 1
                counts["found"].append(name)
            elif not target.is_right(counts["attacks"]):
                counts["wrong_answers"] += 1
                counts["found"].append(name)
        if target.is_alive():
            # Sessions need a moment to end.
            until = time.monotonic() + 15
            while target.descriptors() > files and time.monotonic() < until:
                time.sleep(0.2)
            counts["leaked_descriptors"] = max(0, target.descriptors() - files)
            counts["growth_bytes"] = target.memory() - memory
        target.close()
    return counts

"""Damage to input files: of JSON and YAML by structure, of all others by bytes."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

import yaml

_DEEP: Final = 100_000
CONTROLS: Final = "\x1b]0;x\x07\x9b2J\u202e"
"""Text that a terminal would obey."""

BYTES: Final[dict[str, bytes]] = {
    "empty": b"",
    "line end": b"\n",
    "noise": bytes(range(256)) * 9,
    "not UTF-8": b'{"text": "\xff\xfe"}\n',
    "nulls": bytes(4096),
    "lists in lists": b"[" * _DEEP + b"]" * _DEEP,
    "mappings in mappings": b'{"a":' * _DEEP + b"1" + b"}" * _DEEP,
    "open lists": b"[" * _DEEP,
    "list": b"[]",
    "mapping": b"{}",
    "null": b"null",
    "number": b"3",
    "text": b'"x"',
    "infinity": b'{"a": Infinity, "b": NaN, "c": -1e999}',
    "large number": b"1" * 5000,
    "byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "controls": CONTROLS.encode(),
    "long line": b'"' + b"x" * 300_000 + b'"',
    "alias bomb": b"a: &a [x,x,x,x,x,x,x,x,x]\n"
    + b"".join(
        b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 9)) for c in range(98, 106)
    ),
    "tag": b"a: !!python/object/apply:os.system [id]\n",
}
"""Whole contents."""

VALUES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 2**31, 2**63, 2**70, 1.5, -0.0, float("nan"), float("inf")),
    *("", " ", "x", CONTROLS, "\ud800", "\0", "a" * 5000, "/etc/passwd", "../../../etc/passwd"),
    *([], {}, [[]], {"": None}, [1, "a", None], {"a": {"b": {"c": []}}}, [2**70], ["\ud800"]),
)
"""Values in place of others."""


def contents(name: str, content: bytes, draw: random.Random) -> Iterator[tuple[str, bytes | None]]:
    """Endless damage of a file: what it is, and the new content; None where the file is gone."""
    yield "gone", None
    yield from BYTES.items()
    while True:
        kinds: list[Callable[[], tuple[str, bytes]]] = [
            lambda: _flipped(content, draw),
            lambda: _cut(content, draw),
        ]
        if name.endswith((".json", ".jsonl", ".yaml", "latest")):
            kinds += [lambda: _restructured(name, content, draw)] * 4
        yield draw.choice(kinds)()


def _flipped(content: bytes, draw: random.Random) -> tuple[str, bytes]:
    changed = bytearray(content or b"x")
    for _ in range(draw.choice((1, 1, 3, 30))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return "flip", bytes(changed)


def _cut(content: bytes, draw: random.Random) -> tuple[str, bytes]:
    at = draw.randrange(len(content) + 1)
    middle = draw.random() < 0.5
    return "cut", content[:at] + (content[at + draw.randrange(1, 99) :] if middle else b"")


def _restructured(name: str, content: bytes, draw: random.Random) -> tuple[str, bytes]:
    """One value replaced, left out, doubled or renamed."""
    try:
        if name.endswith(".jsonl"):
            lines = content.decode().splitlines()
            at = draw.randrange(len(lines))
            changed = _replaced(json.loads(lines[at]), draw)
            lines[at] = json.dumps(changed[1])
            return changed[0], ("\n".join(lines) + "\n").encode()
        if name.endswith(".yaml"):
            what, value = _replaced(yaml.safe_load(content), draw)
            return what, yaml.safe_dump(value).encode("utf-8", "surrogatepass")
        what, value = _replaced(json.loads(content), draw)
        return what, json.dumps(value).encode()
    except (ValueError, yaml.YAMLError):
        return _flipped(content, draw)


def _replaced(value: Any, draw: random.Random) -> tuple[str, Any]:
    places = list(_places(value))
    if not places:
        return "other value", draw.choice(VALUES)
    holder, key = draw.choice(places[:200] if draw.random() < 0.7 else places)
    kind = draw.randrange(4)
    if kind == 0 and isinstance(holder, dict):
        del holder[key]
        return f"without {str(key)[:40]!r}", value
    if kind == 1 and isinstance(holder, dict):
        holder[draw.choice((f"{key}x", CONTROLS, "", "a" * 3000))] = holder.pop(key)
        return f"renamed {str(key)[:40]!r}", value
    other = draw.choice(VALUES)
    holder[key] = other
    return f"{str(key)[:40]!r} is {str(other)[:20]!r}", value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each place in a value, as what holds it and its key; outer ones first."""
    waiting = [value]
    while waiting:
        holder = waiting.pop(0)
        if isinstance(holder, dict | list):
            keys = holder if isinstance(holder, dict) else range(min(len(holder), 50))
            for key in list(keys):
                yield holder, key
                if len(waiting) < 500:
                    waiting.append(holder[key])

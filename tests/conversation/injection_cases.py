"""What the tests of injection say in a conversation, and how they find what was forged."""

import html
import json
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np

from megatron_ext.conversation import Rendered
from megatron_ext.conversation.message import ROLES
from tests.conversation.vocabularies import Vocabulary

FIELDS = """
{%- for tool in tools or [] %}{{ tool | tojson }}{{ tool.function.description }}{% endfor %}
{%- for m in messages %}
  {{- OPEN ~ m.role ~ '\n' }}
  {{- m.name ~ m.reasoning_content ~ m.content }}
  {{- m.content | trim }}{{ m.content | upper | lower }}{{ m.content.split('e') | join('e') }}
  {%- for call in m.tool_calls or [] %}
    {{- call.function.name }}{{ call.function | tojson }}{{ call.function.arguments | tojson }}
    {%- for key, value in call.function.arguments.items() %}{{ key ~ value }}{% endfor %}
  {%- endfor %}
  {{- CLOSE ~ '\n' }}
{%- endfor %}
"""
"""Writes every field raw and as JSON, between two control tokens that are put into the source."""

ENDS = (("", ""), (" ", ""), ("", " "), ("\n", "\n"), ("▁", ""))
"""What stands around a name that is all the rest of a message."""

BENIGN = [
    "hello",
    "  two spaces, and a line\n\n\nthen another\t\ttab  ",
    "Grüße, 世界! 👩‍👩‍👧 — مرحبا, e\u0301\r\n",
    "<table><b>bold</b></table> a < b && c > d | [x] {y} 0123",
    "def f(x):\n    return x['a'] if x else None\n",
    "",
]


def encoded(vocabulary: Vocabulary, rendered: Rendered) -> tuple[Any, Any]:
    return vocabulary.tokenizer.encode_with_control_spans(rendered.text, rendered.control_ranges)


def forged(vocabulary: Vocabulary, rendered: Rendered) -> list[str]:
    """Control tokens that stand where the template has not written their whole name.

    White space beside a name may be content: some tokens swallow it, in the original library too.
    """
    ids, ends = encoded(vocabulary, rendered)
    raw, template = rendered.text.encode(), own_bytes(rendered)
    names = {i: n for n, i in vocabulary.controls.items() if i != vocabulary.unknown}
    marks = {n: i for n, i in vocabulary.user_defined.items() if is_mark(n)}
    own_text = (np.frombuffer(raw, np.uint8) * template).tobytes()
    names |= {i: n for n, i in marks.items() if n.encode() in own_text}
    begins = np.concatenate(([0], ends[:-1]))[: len(ends)]
    bad = []
    for place in np.flatnonzero(np.isin(ids, [*names])).tolist():
        begin, end = int(begins[place]), int(ends[place])
        wanted = names[int(ids[place])].encode()
        at = raw.find(wanted, begin, end)
        if at < 0 or not template[at : at + len(wanted)].all():
            bad.append(raw[begin:end].decode(errors="replace"))
    return bad


def own_bytes(rendered: Rendered) -> np.ndarray:
    """Whether the template wrote each byte, the roles of messages included."""
    texts = [rendered.text[span.start : span.end] for span in rendered.spans]
    own = [
        span.is_template or (span.provenance.field == "role" and text in ROLES)
        for span, text in zip(rendered.spans, texts, strict=True)
    ]
    return np.repeat(np.array(own, bool), [len(text.encode()) for text in texts])


def marks_of(vocabulary: Vocabulary) -> tuple[str, str]:
    """Two control tokens for a template to write."""
    known = {n: i for n, i in vocabulary.controls.items() if i != vocabulary.unknown}
    names = [n for n in known if not is_space(n)]
    return names[0], names[-1]


def sampled(vocabulary: Vocabulary, most: int = 60) -> list[str]:
    """Names of control tokens and of user-defined ones; the first, the last and some between."""
    names = [n for n in (*vocabulary.controls, *vocabulary.user_defined) if not is_space(n)]
    return names if len(names) <= most else [*names[: most // 2], *names[-most // 2 :]]


def is_space(name: str) -> bool:
    return not name.replace("▁", "").strip()


def is_mark(name: str) -> bool:
    return name[0] in "<[" and name[-1] in ">]"


def cuts(name: str) -> Iterable[int]:
    return range(1, len(name)) if len(name) < 6 else (1, len(name) // 2, len(name) - 1)


def literal(text: str) -> str:
    """A string of Jinja's."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


def spellings(names: Sequence[str]) -> Iterable[str]:
    """Texts that hold all names, plain and disguised."""
    ways: list[Callable[[str], str]] = [
        lambda n: n,
        lambda n: f" {n}  ",
        lambda n: f"\n{n}\n",
        lambda n: f"a{n}b",
        lambda n: n[: len(n) // 2] + n + n[len(n) // 2 :],
        lambda n: json.dumps(n),
        lambda n: "".join(f"\\u{ord(c):04x}" for c in n),
        lambda n: "".join(f"\\x{b:02x}" for b in n.encode()),
        html.escape,
        lambda n: "".join(f"&#{ord(c)};" for c in n),
        quote,
        lambda n: "".join(f"<0x{b:02X}>" for b in n.encode()),
        lambda n: "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in n),
        lambda n: "\u200b".join(n),
        lambda n: "\u00ad".join(n),
        lambda n: "\u0000".join((n[:1], n[1:])),
        lambda n: n.replace(" ", "▁"),
        lambda n: f"▁{n}▁",
        lambda n: n.swapcase(),
        lambda n: unicodedata.normalize("NFKD", n),
        lambda n: n + "\u0301",
    ]
    for way in ways:
        yield " ".join(map(way, names))
        yield "".join(map(way, names))
    # Alone, as all that a message says.
    for name in names[:20]:
        yield name
        yield f" {name}"


def said_everywhere(text: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    call = {"function": {"name": text, "arguments": {text: text, "n": [text, {text: None}]}}}
    speakers = ("system", "user", "assistant", "tool")
    messages: list[dict[str, Any]] = [
        {"role": role, "name": text, "reasoning_content": text, "content": text}
        for role in speakers
    ]
    messages[2]["tool_calls"] = [call]
    tools = [{"function": {"name": text, "description": text, "parameters": {text: [text]}}}]
    return messages, tools


def split_over_places(
    halves: Sequence[tuple[str, str]],
) -> Iterable[tuple[str, list[dict[str, Any]]]]:
    """Templates with messages in which the halves of each name stand side by side."""
    first = [head for head, _ in halves]
    second = [tail for _, tail in halves]
    loop = "{{% for m in messages %}}{}{{% endfor %}}"
    yield (
        loop.format("{{ m.content }}"),
        [
            {"role": r, "content": c}
            for h in halves
            for r, c in zip(("user", "tool"), h, strict=True)
        ],
    )
    yield (
        loop.format("{{ m.name ~ m.content }}\n"),
        [{"role": "user", "name": head, "content": tail} for head, tail in halves],
    )
    yield (
        loop.format("{{ m.tool_calls[0].name }}{{ m.tool_calls[0].arguments }}\n"),
        [{"tool_calls": [{"name": head, "arguments": tail}]} for head, tail in halves],
    )
    listed = "{% set own = [" + ",".join(map(literal, first)) + "] %}"
    yield (
        listed + loop.format("{{ own[loop.index0] ~ m.content }}\n"),
        [{"content": tail} for tail in second],
    )
    listed = "{% set own = [" + ",".join(map(literal, second)) + "] %}"
    yield (
        listed + loop.format("{{ m.content ~ own[loop.index0] }}\n"),
        [{"content": head} for head in first],
    )

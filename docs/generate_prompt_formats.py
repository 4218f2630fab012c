"""Write the tables of ``prompt_formats.md`` from the prompt formats: from what they need and write.

    python docs/generate_prompt_formats.py

A region stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``. A test compares the page with what
this would write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_ext.conversation import (
    PROMPT_FORMAT_REGISTRY,
    Message,
    PromptConfig,
    PromptFormat,
    Rendered,
)
from megatron_ext.conversation.encoded_conversation import render_conversation
from megatron_ext.errors import ConversationError

PAGE = Path(__file__).with_name("prompt_formats.md")
ROWS = [row for row in PROMPT_FORMAT_REGISTRY.values() if isinstance(row, PromptFormat)]
ROLES = {
    "bos_token": "BOS",
    "eos_token": "EOS",
    "pad_id": "padding token",
    "unk_id": "unknown token",
    "eos_id": "EOS",
}
SYSTEM: Message = {"role": "system", "content": "{system}"}
QUESTION: Message = {"role": "user", "content": "{question}"}
ANSWER: Message = {"role": "assistant", "content": "{answer}"}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "{call}", "arguments": {}}}],
}
RESULT: Message = {"role": "tool", "content": "{result}"}
TOOLS = [{"type": "function", "function": {"name": "{tool}"}}]
THOUGHT: Message = {"role": "assistant", "content": "<think>{thought}</think>{answer}"}
SWITCHES = ("/think", "/no_think", "{'reasoning': True}", "{'reasoning': False}")
"""What a system message may hold to switch thinking on or off."""


class AnyVocabulary:
    """A tokenizer that has every token, enough for rendering."""

    chat_template = None
    special_token_names = {"bos_token": "{bos}", "eos_token": "{eos}"}  # noqa: RUF012 (a stand-in)
    bos_id = eos_id = pad_id = unk_id = 0

    def token_to_id(self, token: str) -> int:
        return 0

    def is_control(self, token_id: int) -> bool:
        return True

    def encode_with_control_spans(self, text: str, spans: Sequence[tuple[int, int]]) -> Any:
        raise NotImplementedError


def prompt_formats_page() -> str:
    """The text of ``prompt_formats.md`` with its regions as the code has them now."""
    page = PAGE.read_text(encoding="utf-8")
    for name, lines in REGIONS.items():
        text = "\n".join(lines())
        region = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        assert region.search(page), name
        page = region.sub(lambda match, text=text: f"{match[1]}\n{text}\n\n{match[2]}", page)
    return page


def _needs() -> Iterator[str]:
    yield from _table("format", "tokens of the vocabulary", "pads with")
    yield from _together((_linked(row), _tokens(row), _padding(row)) for row in ROWS)


def _tokens(row: PromptFormat) -> str:
    roles = [ROLES[role] for role in row.special_tokens]
    return ", ".join([*(_code(token) for token in row.tokens), *roles])


def _padding(row: PromptFormat) -> str:
    return ", ".join(ROLES[c] if c in ROLES else _code(c) for c in row.pad)


def _shows() -> Iterator[str]:
    yield from _table("format", "system message", "tools", "thinking", "prompt")
    yield from _together((_code(row.name), *_shown(row)) for row in ROWS)


def _shown(row: PromptFormat) -> Iterator[str]:
    if row.template is None:
        yield from ["its template's"] * 4
    else:
        config = row(AnyVocabulary())
        yield from (_system(config), _tools(config), _thinking(config), _prompt(config))


def _images() -> Iterator[str]:
    refused = "validate_no_image_in_assistant"
    *names, last = [_code(row.name) for row in ROWS if not row.options.get(refused, False)]
    yield "An answer that holds `<image>` is refused: in the mode multimodal with every format,"
    yield f"in the mode sft, where it is text, with all but {', '.join(names)} and {last}."


def _writes() -> Iterator[str]:
    yield from _table("format", "a conversation")
    yield from _together((_code(row.name), _written(row)) for row in ROWS if row.template)


def _written(row: PromptFormat) -> str:
    rendered = _rendered(row(AnyVocabulary()), SYSTEM, QUESTION, ANSWER)
    assert rendered is not None
    return _code(_marked(rendered).replace("\n", "⏎"))


def _together(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Rows; formats that differ in nothing else have one."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        names.setdefault(tuple(cells), []).append(name)
    for others, alike in names.items():
        yield _row(", ".join(alike), *others)


def _linked(row: PromptFormat) -> str:
    """The format, with a link to its template where it has one."""
    if row.template is None:
        return _code(row.name)
    return f"[{_code(row.name)}](../megatron_ext/conversation/templates/{row.template}.jinja)"


def _system(config: PromptConfig) -> str:
    if not config.has_system_role:
        return "left out"
    rendered = _rendered(config, QUESTION, ANSWER)
    assert rendered is not None
    header = "always" if "system" in rendered.text.lower() else "if given"
    return f"{header}; can be forced" if config.system_default is not None else header


def _tools(config: PromptConfig) -> str:
    listed = _rendered(config, SYSTEM, QUESTION, ANSWER, tools=TOOLS)
    able = {
        "definitions": listed is not None and "{tool}" in listed.text,
        "calls": _rendered(config, QUESTION, CALL) is not None,
        "results": _rendered(config, QUESTION, ANSWER, RESULT) is not None,
    }
    return ", ".join(name for name, is_able in able.items() if is_able) or "refused"


def _thinking(config: PromptConfig) -> str:
    rendered = _rendered(config, QUESTION, THOUGHT)
    assert rendered is not None
    if "{thought}" in rendered.text:
        return "kept"
    kept = _rendered(config, QUESTION, THOUGHT, truncate_history_thinking=False)
    assert kept is not None
    assert "{thought}" in kept.text
    return "left out"


def _prompt(config: PromptConfig) -> str:
    """What stands between the last question and the answer to come, and what it depends on."""
    usual = _prompt_after(config, "{system}")
    cells = [_code(usual) if usual else "nothing"]
    for switch in SWITCHES:
        prompt = _prompt_after(config, f"{{system}} {switch}")
        if prompt != usual:
            cells.append(f"{_code(prompt)} with {_code(switch)}")
    return "; ".join(cells)


def _prompt_after(config: PromptConfig, system: str) -> str:
    asked = _rendered(config, {**SYSTEM, "content": system}, QUESTION, add_generation_prompt=True)
    assert asked is not None
    text = asked.text.partition("{question}")[2]
    plain = _rendered(config, SYSTEM, QUESTION)
    assert plain is not None
    return text.removeprefix(plain.text.partition("{question}")[2]).replace("\n", "⏎")


def _rendered(
    config: PromptConfig, *messages: Message, add_generation_prompt: bool = False, **variables: Any
) -> Rendered | None:
    """The conversation as the format writes it; None where it refuses it."""
    try:
        return render_conversation(
            AnyVocabulary(),
            messages,
            replace(config, template_variables=variables),
            add_generation_prompt=add_generation_prompt,
            apply_image_tag_fn=None,
        )
    except ConversationError:
        return None


def _marked(rendered: Rendered) -> str:
    """The text with ⟦ ⟧ around what is trained."""
    pieces = []
    is_open = False
    for span in rendered.spans:
        is_generated = span.provenance.is_generated
        if is_generated != is_open:
            pieces.append("⟦" if is_generated else "⟧")
        is_open = is_generated
        pieces.append(rendered.text[span.start : span.end])
    return "".join([*pieces, "⟧" if is_open else ""])


def _table(*heads: str) -> Iterator[str]:
    yield _row(*heads)
    yield "|---" * len(heads) + "|"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


REGIONS: dict[str, Callable[[], Iterator[str]]] = {
    "needs": _needs,
    "shows": _shows,
    "images": _images,
    "writes": _writes,
}
"""Name of a region of the page -> its lines."""


if __name__ == "__main__":
    PAGE.write_text(prompt_formats_page(), encoding="utf-8")

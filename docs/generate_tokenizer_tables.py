"""Write the parts of ``tokenizers.md`` that the code knows: old types, prompt formats and flags.

    python docs/generate_tokenizer_tables.py

A region stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``. A test compares the page with what
this would write.
"""

from __future__ import annotations

import re
import textwrap
import typing
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from megatron_ext.conversation import PROMPT_FORMAT_REGISTRY
from megatron_ext.tokenizers.config import TokenizerConfig
from megatron_ext.tokenizers.legacy_types import LEGACY_TYPES
from megatron_ext.training.configuration.tokenizer_arguments import OLD_FLAGS, tokenizer_flags

PAGE = Path(__file__).with_name("tokenizers.md")


def tokenizers_page() -> str:
    """The text of ``tokenizers.md`` with its regions as the code has them now."""
    page = PAGE.read_text(encoding="utf-8")
    for name, lines in REGIONS.items():
        text = "\n".join(lines())
        region = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        assert region.search(page), name
        page = region.sub(lambda match, text=text: f"{match[1]}\n{text}\n\n{match[2]}", page)
    return page


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _old_types() -> Iterator[str]:
    yield _row("old", "new")
    yield "|---|---|"
    for name, legacy in LEGACY_TYPES.items():
        more = legacy.release_flag
        also = "" if more is None else f"; of {more.releases} also `{more.flag}`"
        yield _row(f"`--tokenizer-type {name}`", f"`{legacy.flags}`{also}")


def _flags() -> Iterator[str]:
    yield _row("flag", "value", "default", "libraries", "meaning")
    yield "|---|---|---|---|---|"
    options = {option.name: option for option in fields(TokenizerConfig)}
    for flag in tokenizer_flags():
        option = options[flag.keys[-1]]
        only = option.metadata.get("only")
        yield _row(
            f"`{flag.name}`",
            _value(flag.hint),
            _default(option.default),
            "all" if only is None else ", ".join(only),
            _escaped(flag.help),
        )


def _old_flags() -> Iterator[str]:
    yield _row("flag", "meaning")
    yield "|---|---|"
    for old in OLD_FLAGS:
        yield _row(", ".join(f"`{name}`" for name in old.names), _escaped(old.help))


def _prompt_formats() -> Iterator[str]:
    names = ", ".join(f"`{name}`" for name in PROMPT_FORMAT_REGISTRY)
    yield from textwrap.wrap(f"The formats are {names}.", width=100, break_on_hyphens=False)


def _value(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(hint) if choice != "")
    if origin is tuple:
        return "texts"
    return {str: "text", int: "integer", bool: "switch"}[hint]


def _default(default: Any) -> str:
    if default is None or default in ((), ""):
        return "none"
    return f"`{default}`" if not isinstance(default, bool) else ("on" if default else "off")


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


REGIONS: dict[str, Callable[[], Iterator[str]]] = {
    "old-types": _old_types,
    "prompt-formats": _prompt_formats,
    "flags": _flags,
    "old-flags": _old_flags,
}
"""Name of a region of the page -> its lines."""


if __name__ == "__main__":
    PAGE.write_text(tokenizers_page(), encoding="utf-8")

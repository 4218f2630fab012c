"""Write the parts of ``tokenizers.md`` that the code knows: old types and flags.

    python docs/generate_tokenizer_tables.py

A region stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``. A test compares the page with what
this would write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

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
    yield _row("`--tokenizer-type`", "new flags")
    yield "|---|---|"
    for name, legacy in LEGACY_TYPES.items():
        more = legacy.release_flag
        also = "" if more is None else f"; of {more.releases} also `{more.flag}`"
        yield _row(f"`{name}`", f"`{legacy.flags}`{also}")


def _flags() -> Iterator[str]:
    """Flags whose name is not that of their key."""
    yield _row("flag", "key")
    yield "|---|---|"
    for flag in tokenizer_flags():
        key = flag.keys[-1]
        if flag.name != f"--tokenizer-{key.replace('_', '-')}":
            yield _row(f"`{flag.name}`", f"`{key}`")


def _old_flags() -> Iterator[str]:
    yield _row("flag", "meaning")
    yield "|---|---|"
    for old in OLD_FLAGS:
        yield _row(", ".join(f"`{name}`" for name in old.names), _escaped(old.help))


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


REGIONS: dict[str, Callable[[], Iterator[str]]] = {
    "old-types": _old_types,
    "flags": _flags,
    "old-flags": _old_flags,
}
"""Name of a region of the page -> its lines."""


if __name__ == "__main__":
    PAGE.write_text(tokenizers_page(), encoding="utf-8")

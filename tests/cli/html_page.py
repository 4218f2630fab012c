"""A page as a browser reads it."""

import base64
import hashlib
import re
from html.parser import HTMLParser

_VOID = ("meta", "br", "input")


class HtmlPage(HTMLParser):
    """What is on a page. It is balanced, loads nothing, and its policy lets its own style and
    script do their work and nothing else.

    Args:
        source: The page.
    """

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.source = source
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        """All of it; what ends a cell or a paragraph ends a word."""
        self.chunks: list[tuple[str | None, list[list[str]]]] = []
        """Of the ribbons: the class of each, and the tokens of both sides."""
        self.titles: list[str] = []
        """Of the tokens."""
        self._open: list[tuple[str, dict[str, str]]] = []
        self._data: list[tuple[list[tuple[str, dict[str, str]]], str]] = []
        self.feed(source)
        self.close()
        assert self._open == []
        self._check_policy()

    def handle_starttag(self, tag, attrs):
        values = {name: value or "" for name, value in attrs}
        self.elements.append((tag, values))
        for name in values:
            assert not name.startswith("on")
            assert name not in ("src", "style")
        assert values.get("href", "#").startswith("#")
        if tag not in _VOID:
            self._open.append((tag, values))
        if any(one.get("class") == "ribbon" for _, one in self._open):
            if tag == "b":
                self.chunks.append((values.get("class"), []))
            if tag == "u":
                self.chunks[-1][1].append([])
            if tag == "i":
                self.chunks[-1][1][-1].append("")
                self.titles.append(values["title"])

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag
        self.text += " " if tag not in ("i", "b", "u", "bdi") else ""

    def handle_data(self, data):
        self._data.append((list(self._open), data))
        tags = [tag for tag, _ in self._open]
        if tags[-2:] == ["i", "bdi"]:
            self.chunks[-1][1][-1][-1] += data
        self.text += data if tags[-1:] not in (["style"], ["script"]) else ""

    def inside(self, *tags, style=None):
        """Data right within elements of these names, within one of a class where one is named."""
        return [
            data
            for path, data in self._data
            if path
            and path[-1][0] in tags
            and (style is None or any(style in one.get("class", "").split() for _, one in path))
        ]

    def side(self, number):
        """The text of one side's tokens in all ribbons."""
        return "".join(token for _, sides in self.chunks for token in sides[number])

    def _check_policy(self):
        name = "Content-Security-Policy"
        (policy,) = (one["content"] for _, one in self.elements if one.get("http-equiv") == name)
        (style,) = self.inside("style")
        assert "url(" not in style
        scripts = [one for tag, one in self.elements if tag == "script" and not one]
        own = self.inside("script")[-1:] if scripts else []
        digests = [
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            for text in (style, *own)
        ]
        assert len(own) == len(scripts) == policy.count("script-src")
        assert re.findall(r"'[^']*'", policy) == ["'none'", *digests, "'none'", "'none'"]

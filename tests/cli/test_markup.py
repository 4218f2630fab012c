"""Text becomes a part of a page as text."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import example, given
from hypothesis import strategies as st

from megatron_ext.cli.pages.frame import element, swatch

HOSTILE = "</b><script>alert('x')</script> \"onclick=\" &lt; &"


@given(st.text(), st.text())
@example(HOSTILE, HOSTILE)
def test_a_text_in_an_element_and_in_an_attribute_is_read_as_it_is(content, value):
    read: list[object] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: read.append((tag, attributes))
    parser.handle_endtag = read.append
    parser.handle_data = read.append
    parser.feed(element("b", element("i", content, {"title": value})))
    parser.close()
    data = [content] if content else []
    assert read == [("b", []), ("i", [("title", value)]), *data, "i", "b"]


def test_a_text_beside_a_colour_is_escaped():
    assert swatch("k1", HOSTILE).count("<") == 2

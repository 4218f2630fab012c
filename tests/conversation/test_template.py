"""Templates render as transformers renders them, and every character knows its source."""

import json
from datetime import datetime
from typing import Any

import pytest
from jinja2.exceptions import TemplateError

from megatron_ext.conversation import Rendered, render
from megatron_ext.errors import ConfigError, ConversationError
from tests.conversation.plain_jinja import plain_environment
from tests.fork_server import run_python

CONVERSATION = [
    {"role": "system", "content": "Be <brief>."},
    {"role": "user", "content": "  Hi there,\nstraße\n"},
    {"role": "assistant", "content": "<think>hm</think>\n\nHello!", "tags": ["a", "b"]},
]
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def rendered(source: str, conversation: Any = CONVERSATION, **variables: Any) -> Rendered:
    return render(source, conversation, special_tokens=SPECIAL_TOKENS, variables=variables)


def as_jinja_does(source: str) -> str:
    """The render of an environment without provenance."""
    return (
        plain_environment()
        .from_string(source)
        .render(messages=CONVERSATION, tools=None, documents=None, **SPECIAL_TOKENS)
    )


def sources(result: Rendered) -> list[tuple[str, int | str]]:
    """Text of each span, and the message it comes from or else its kind of source."""
    found: list[tuple[str, int | str]] = []
    for span in result.spans:
        message = span.provenance.message
        place = span.provenance.source if message is None else message
        text = result.text[span.start : span.end]
        if found and found[-1][1] == place:
            found[-1] = (found[-1][0] + text, place)
        else:
            found.append((text, place))
    return found


EXPRESSIONS = {
    "content": "x.content",
    "item": "x['content']",
    "sum": "'<' + x.content + '>'",
    "concatenation": "'<' ~ x.content ~ 1 ~ none ~ '>'",
    "percent": "'<%s|%d>' % (x.content, 3)",
    "format filter": "'<%s>' | format(x.content)",
    "format method": "'<{}|{!s:>40}|{{>'.format(x.content, x.content)",
    "format method by name": "'<{m.content}|{m[role]}>'.format(m=x)",
    "format_map": "'{content}'.format_map(x)",
    "trim": "x.content | trim",
    "strip": "x.content.strip().rstrip('!').lstrip()",
    "replace filter": "x.content | replace('e', '<E>')",
    "replace method": "x.content.replace('think', '')",
    "upper": "x.content | upper",
    "title": "x.content | title",
    "capitalize": "x.role | capitalize ~ x.content.capitalize()",
    "casefold": "x.content.casefold()",
    "slice": "x.content[2:-3] ~ x.content[::-1] ~ x.content[0] ~ x.content[-1]",
    "split": "x.content.split('</think>')[-1].lstrip('\\n')",
    "partition": "x.content.partition('h')[0] ~ x.content.rpartition(' ')[2]",
    "join": "x.content.split() | join('|')",
    "join by attribute": "[x, x] | join(', ', attribute='content')",
    "join method": "'+'.join([x.content, x.role])",
    "map": "[x.content] | map('upper') | join",
    "characters": "x.content | list | join('.')",
    "reverse": "x.content | reverse",
    "first and last": "(x.content | first) ~ (x.content | last)",
    "truncate": "x.content | truncate(12, true, '...')",
    "indent": "x.content | indent(2, true)",
    "indent blank": "x.content | indent('> ', blank=true)",
    "wordwrap": "x.content | wordwrap(4)",
    "center": "x.content | center(60)",
    "escape": "x.content | e",
    "safe": "x.content | safe",
    "string": "x.content | string",
    "urlencode": "x.content | urlencode",
    "zfill": "x.content.zfill(60)",
    "tojson": "x.content | tojson",
    "tojson of a message": "x | tojson(indent=2)",
    "tojson of a mapping": "{'a': x.content, 'b': [x.role, 1.5, none]} | tojson",
    "a mapping as it prints": "x",
    "a list as it prints": "x.tags",
    "items": "x.items() | map('join', '=') | join(';')",
    "default": "x.nothing | default(x.content)",
    "condition": "x.content if x.role is string else 'none'",
    "number": "x.content | length ~ loop.index0 ~ (2.5 + 1)",
    "folded list": "(['a', 'b'] + ['c']) | join(',')",
}
PREFIX = "<x>"


@pytest.mark.parametrize("expression", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_an_expression_prints_as_jinja_prints_it_and_knows_its_message(expression: str) -> None:
    source = f"{{% for x in messages %}}{PREFIX}{{{{ {expression} }}}}{{% endfor %}}"
    result = rendered(source)
    assert result.text == as_jinja_does(source)
    for text, place in sources(result):
        assert place != "unknown"
        if "hello" in text.lower() or "olleh" in text.lower():
            assert place == 2, "content must not pass for the template's text"
        if PREFIX in text:
            assert place == "template", "the template's text must not pass for content"


BLOCKS = {
    "set block": "{% for m in messages %}"
    "{% set x %}[{{ m.content }}]{% endset %}{{ x }}{% endfor %}",
    "filter block": "{% for m in messages %}"
    "{% filter upper %}[{{ m.content }}]{% endfilter %}{% endfor %}",
    "macro": "{% macro f(m) %}[{{ m.content }}]{% endmacro %}"
    "{% for m in messages %}{{ f(m) }}{% endfor %}",
    "call block": "{% macro f() %}[{{ caller() }}]{% endmacro %}"
    "{% for m in messages %}{% call f() %}{{ m.content }}{% endcall %}{% endfor %}",
    "namespace": "{% set ns = namespace(x='') %}"
    "{% for m in messages %}{% set ns.x = ns.x + '[' + m.content + ']' %}{% endfor %}{{ ns.x }}",
    "loop controls": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
    "[{{ m.content }}]{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    "nested loops": "{% for m in messages %}{% for t in m.tags or [] %}{{ t }};{% endfor %}"
    "[{{ m.content }}]{% endfor %}",
    "loop over a part": "{% for m in messages[1:] if m.role != 'tool' %}"
    "[{{ m.content }}]{% else %}none{% endfor %}",
    "recursive loop": "{% for m in messages recursive %}[{{ m.content }}]"
    "{% if m.tags %}{{ loop([]) }}{% endif %}{% endfor %}",
    "loop over pairs": "{% for k, v in messages[1].items() %}{{ k }}={{ v }};{% endfor %}",
    "comments and white space": "{#- no -#}\n  {%- for m in messages -%}\n"
    "    [{{- m.content -}}]\n{% endfor %}\n",
}


@pytest.mark.parametrize("source", BLOCKS.values(), ids=BLOCKS)
def test_blocks_print_as_jinja_prints_them_and_keep_every_source(source: str) -> None:
    result = rendered(source)
    assert result.text == as_jinja_does(source)
    contents = {index: str(m["content"]) for index, m in enumerate(CONVERSATION)}
    for text, place in sources(result):
        if isinstance(place, int):
            known = [contents[place], contents[place].upper(), "a", "b", "role", "content", "user"]
            assert text in known
        else:
            assert place == "template"
            assert set(text) <= set("[];=\n ")


def test_turns_are_those_of_the_loop_over_messages() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}({% for t in [1, 2] %}{{ t }}{% endfor %}"
        "{{ m.role }}){% endfor %}{{ eos_token }}"
    )
    result = rendered(source)
    turns = [(result.text[s.start : s.end], s.provenance.turn) for s in result.spans]
    assert turns == [
        ("<s>", None),
        *(("(12", 0), ("system", 0), (")", 0)),
        *(("(12", 1), ("user", 1), (")", 1)),
        *(("(12", 2), ("assistant", 2), (")", 2)),
        ("</s>", None),
    ]


def test_fields_have_paths() -> None:
    conversation = [{"role": "user", "parts": [{"type": "text", "text": "hi"}, "there"]}]
    result = rendered("{{ messages[0].parts[0].text }} {{ messages[0].parts[1] }}", conversation)
    assert [s.provenance.field for s in result.spans] == ["parts[0].text", "", "parts[1]"]


def test_variables_are_not_the_template_s_text_and_special_tokens_are() -> None:
    result = rendered(
        "{{ bos_token }}{{ tools[0].name }}{{ mode }}", tools=[{"name": "f"}], mode="m"
    )
    assert [(s.provenance.source, s.provenance.field) for s in result.spans] == [
        ("template", ""),
        ("variable", "tools[0].name"),
        ("variable", "mode"),
    ]
    assert result.control_ranges == [(0, 3)]


def test_tools_and_documents_are_defined_and_none() -> None:
    assert rendered("{{ tools is none and documents is none }}").text == "True"


def test_a_variable_in_the_place_of_a_special_token_is_not_the_template_s_text() -> None:
    result = rendered("{{ bos_token }}{{ eos_token }}", bos_token="<|im_end|>", eos_token="")
    assert result.text == "<|im_end|>"
    assert [s.provenance.source for s in result.spans] == ["variable"]
    assert result.control_ranges == []


def test_a_message_has_the_fields_that_transformers_gives_it() -> None:
    # As transformers 5.24 does, but for the content of a call, which many templates read unasked.
    call = {"function": {"name": "f", "arguments": {}}}
    conversation = [
        {"role": "user", "content": "Hi", "name": None, "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "assistant", "tool_calls": [call], "thinking": "a", "reasoning_content": "b"},
        {"role": "assistant", "content": "x", "thinking": "", "reasoning_content": None},
    ]
    before = json.dumps(conversation)
    result = rendered(
        "{% for m in messages %}{{ m.content is defined }},{{ m.content }},{{ m.name is defined }},"
        "{{ m.tool_calls is defined }},{{ m.reasoning_content }},{{ m.thinking }};{% endfor %}",
        conversation,
    )
    assert result.text == (
        "True,Hi,False,False,,;True,,False,True,hm,hm;True,,False,True,b,a;True,x,False,False,,;"
    )
    thinking = [s.provenance.field for s in result.spans if s.provenance.message in (1, 2)]
    assert thinking == ["reasoning", "reasoning", "reasoning_content", "thinking"]
    assert json.dumps(conversation) == before


def test_a_call_without_content_is_written_by_templates_that_ask_for_none_and_others() -> None:
    # As DeepSeek-R1's template, which adds the arguments to a text.
    source = (
        "{% for m in messages %}{% if m['content'] is none %}{% set call = m.tool_calls[0] %}"
        "{{ '<call>' + call.name + ':' + call.arguments + '</call>' }}{% endif %}"
        "{% if m['content'] is not none %}<a>{{ m.content }}</a>{% endif %}{% endfor %}"
    )
    for given in ({}, {"content": None}):
        for arguments in ('{"x": "é"}', {"x": "é"}):
            calls = [{"name": "f", "arguments": arguments}]
            message = {"role": "assistant", "tool_calls": calls, **given}
            result = rendered(source, [message])
            assert result.text == '<call>f:{"x": "é"}</call>'
            assert rendered("{{ messages[0].content + '' }}", [message]).text == ""
    # An empty content is one.
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    assert rendered(source, [message]).text == "<a></a>"


def test_fields_of_a_message_are_found_by_any_name() -> None:
    message = {"role": "user", "index": "i", "progress": "p", "provenance": "q"}
    fields = "{{ m.index }}{{ m.progress }}{{ m.provenance }}{{ m.x }}"
    source = f"{{% for m in messages %}}{fields}{{% endfor %}}"
    assert rendered(source, [message]).text == "ipq"
    assert rendered(source, [{"role": "user"}]).text == ""


def test_an_error_after_a_loop_names_no_message() -> None:
    source = "{% for m in messages %}{% for t in m.tags or [] %}{% endfor %}1{% endfor %}2"
    with pytest.raises(ConversationError, match=r"^conversation\[0\]: "):
        rendered(source.replace("1", "{{ raise_exception('no') }}"))
    with pytest.raises(ConversationError, match=r"^the chat template refuses"):
        rendered(source.replace("2", "{{ raise_exception('no') }}"))


def test_control_ranges_join_what_the_template_wrote_in_pieces() -> None:
    result = rendered(
        "{{ '<|im' }}{% for m in messages[:1] %}{{ '_end|>' }}{% endfor %}",
        [{"role": "user", "content": ""}],
    )
    assert result.control_ranges == [(0, len("<|im_end|>"))]


def test_generation_blocks_mark_what_is_written_in_them() -> None:
    source = (
        "{% for m in messages %}<{% if m.role == 'assistant' %}"
        "{%- generation -%} {{ m.content }}|{%- endgeneration -%}{% endif %}>{% endfor %}"
    )
    result = rendered(source)
    generated = [result.text[s.start : s.end] for s in result.spans if s.provenance.is_generated]
    assert generated == ["<think>hm</think>\n\nHello!", "|"]
    assert result.has_generation_blocks
    assert not rendered("{# {% generation %} #}generation").has_generation_blocks


@pytest.mark.parametrize(
    "source",
    [
        "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}.",
        "{% macro f(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ f(m) }}{% endfor %}.",
        "{% set all %}{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% endgeneration %}{% endset %}{{ all }}.",
        "{% generation %}{% generation %}{% endgeneration %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}.",
    ],
    ids=["around a loop", "in a macro", "in a text that is kept", "within another"],
)
def test_a_generation_block_may_stand_anywhere(source: str) -> None:
    result = rendered(source)
    generated = [result.text[s.start : s.end] for s in result.spans if s.provenance.is_generated]
    assert "".join(generated) == result.text.removesuffix(".")
    assert generated


def test_what_a_generation_block_sets_is_not_set_behind_it() -> None:
    source = "{% generation %}{% set x = 'in' %}{{ x }}{% endgeneration %}{{ x is defined }}"
    assert rendered(source).text == "inFalse"


@pytest.mark.parametrize("word", ["break", "continue"])
def test_a_generation_block_is_not_left_with_a_loop_around_it(word: str) -> None:
    around = f"{{% for m in messages %}}{{% generation %}}{{% {word} %}}{{% endgeneration %}}\n"
    with pytest.raises(ConfigError, match=r"line 1: .* a loop goes on within a generation block"):
        rendered(around + "{% endfor %}")
    within = f"{{% generation %}}{{% for m in messages %}}x{{% {word} %}}{{% endfor %}}"
    assert set(rendered(within + "{% endgeneration %}").text) == {"x"}


def test_strftime_now_and_loop_helpers_are_offered() -> None:
    result = rendered("{{ strftime_now('%Y') }}{% set j = joiner(', ') %}{{ j() }}a{{ j() }}b")
    assert result.text == f"{datetime.now().year}a, b"
    assert {place for _, place in sources(result)} == {"template"}


def test_non_ascii_text_stays_in_json() -> None:
    assert rendered("{{ messages[1].content | tojson }}").text == '"  Hi there,\\nstraße\\n"'


LOSSES = {
    "a wrapped mixture": "{{ ('<|im_start|>' ~ m.content) | wordwrap(4) }}",
    "two messages in one": "{{ (messages[0].content ~ m.content).center(90) }}",
    "bytes": "{{ m.content.encode().decode() }}",
    "a mapping of two places": "{{ {'a': messages[0].content, 'b': m.content} | string }}",
    "a widened mixture": "{{ ('ß' ~ m.content ~ 'ß') | title }}",
    "a width that is a field": "{{ '{:{}}'.format(m.content, 90) }}",
    "a generator": "{{ [m.content] | map('upper') }}",
}


@pytest.mark.parametrize("expression", LOSSES.values(), ids=LOSSES)
def test_text_of_unknown_source_is_refused_with_its_message(expression: str) -> None:
    source = f"{{% for m in messages %}}{{% if loop.last %}}{expression}{{% endif %}}{{% endfor %}}"
    with pytest.raises(ConversationError, match=r"^conversation\[2\]: .* cannot be told what is"):
        rendered(source)


def test_outside_a_loop_the_message_is_the_one_that_shares_words() -> None:
    with pytest.raises(ConversationError, match=r"^conversation\[1\]: "):
        rendered("{{ messages[1].content.encode().decode() }}")


def test_no_message_is_changed() -> None:
    before = json.dumps(CONVERSATION)
    rendered("{% for m in messages %}{{ m | tojson }}{% endfor %}")
    assert json.dumps(CONVERSATION) == before


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "{% for m in messages %}{{ raise_exception('no ' ~ m.role) }}{% endfor %}",
            r"^conversation\[0\]: .*TemplateError: no system",
        ),
        (
            "{% for m in messages[1:] %}{{ m.a.b }}{% endfor %}",
            r"^conversation\[1\]: .*UndefinedError",
        ),
        ("{{ 'a' + 1 }}", "^the chat template refuses the conversation; got TypeError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ '{0.__class__.__mro__}'.format(messages) }}", "SecurityError"),
        ("{{ range(10 ** 9) | list }}", "OverflowError"),
    ],
    ids=["raise_exception", "undefined", "type error", "mutation", "dunder", "format", "range"],
)
def test_a_template_s_own_error_is_passed_on_with_the_message(source: str, message: str) -> None:
    with pytest.raises(ConversationError, match=message) as caught:
        rendered(source)
    assert caught.value.__cause__ is not None
    assert "\n" not in str(caught.value)


def test_raise_exception_raises_jinja_s_error() -> None:
    with pytest.raises(ConversationError) as caught:
        rendered("{{ raise_exception('no') }}")
    assert isinstance(caught.value.__cause__, TemplateError)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}",
        "{{ messages | no_such_filter }}",
        "{% endgeneration %}",
        "a\n{% if %}",
    ],
    ids=["unclosed", "unknown filter", "stray end", "no condition"],
)
def test_what_is_no_jinja_is_refused_with_its_line(source: str) -> None:
    with pytest.raises(ConfigError, match=r"^line \d: the chat template is not a Jinja template"):
        rendered(source)


def test_jinja_is_loaded_by_the_first_template_only() -> None:
    code = (
        "import sys, megatron_ext.conversation as c; assert 'jinja2' not in sys.modules\n"
        "c.render('a', [], special_tokens={}, variables={}); assert 'jinja2' in sys.modules"
    )
    run_python(code)

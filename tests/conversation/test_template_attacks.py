"""A chat template from a stranger gets at nothing, and has a budget of its own.

Templates that try to take all time or memory are in ``tests/hostile``.
"""

from itertools import product
from threading import Thread
from typing import Any

import pytest

from megatron_ext.conversation import render
from megatron_ext.conversation.rendering.template_limits import NESTING, SOURCE_LENGTH
from megatron_ext.errors import ConfigError, ConversationError

QUESTION = [{"role": "user", "content": "hi", "tags": ["a"]}]


def rendered(source: str, messages: Any = QUESTION, **variables: Any) -> str:
    return render(source, messages, special_tokens={}, variables=variables).text


def test_a_template_that_does_too_much_is_named_with_the_turn() -> None:
    source = "{% for m in messages %}{% if loop.last %}{{ 'x' * 10 ** 9 }}{% endif %}{% endfor %}"
    with pytest.raises(ConversationError) as caught:
        render(source, QUESTION * 2, special_tokens={}, variables={}, name="template of a stranger")
    assert str(caught.value) == (
        "conversation[1]: the template of a stranger does more than a template needs to for such "
        "a conversation; got one that makes more than 8,390,016 characters of text; "
        "use another template"
    )


def test_what_one_template_spends_another_has() -> None:
    for _ in range(3):
        with pytest.raises(ConversationError):
            rendered("{{ 'x' * 10 ** 9 }}")
        assert len(rendered("{{ 'x' * 3000000 }}")) == 3_000_000


def test_threads_have_budgets_of_their_own() -> None:
    lengths: list[int] = []
    source = "{% for i in range(10000) %}{{ 'x' * 100 }}{% endfor %}"
    threads = [Thread(target=lambda: lengths.append(len(rendered(source)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lengths == [1_000_000] * 4


def test_a_long_conversation_may_take_more() -> None:
    messages = [{"role": "user", "content": f"{i:05d}" + "x" * 9995} for i in range(1000)]
    source = (
        "{% for m in messages %}{% for i in range(300) %}{% endfor %}"
        "{{ '<' + m.content.strip().replace('00', '--') | trim + '>' }}{% endfor %}"
    )
    text = rendered(source, messages)
    assert text == "".join(f"<{m['content'].replace('00', '--')}>" for m in messages)
    with pytest.raises(ConversationError, match="takes more than"):
        rendered(source.replace("300", "99999"), messages[:10])


ROOTS = {
    "text": "''",
    "content": "messages[0].content",
    "message": "messages[0]",
    "messages": "messages",
    "list": "[1]",
    "tuple": "(1, 2)",
    "mapping": "{'a': 1}",
    "integer": "1",
    "float": "1.5",
    "truth": "true",
    "none": "none",
    "undefined item": "messages[7]",
    "range": "range(3)",
    "loop": "loop",
    "macro": "f",
    "namespace": "namespace(a=1)",
    "class of namespaces": "namespace",
    "class of mappings": "dict",
    "cycler": "cycler(1)",
    "joiner": "joiner()",
    "raise_exception": "raise_exception",
    "strftime_now": "strftime_now",
    "method": "''.upper",
    "format method": "''.format",
    "method of a mapping": "messages[0].items",
    "items": "messages[0].items()",
    "bytes": "''.encode()",
    "filtered": "[1] | map('string')",
    "JSON": "[1] | tojson",
    "blocks": "self",
    "group": "([messages[0]] | groupby('role'))[0]",
    "variable": "given",
}
NAMES = (
    *("__class__", "__init__", "__globals__", "__self__", "__func__", "__dict__", "__code__"),
    *("__mro__", "__subclasses__", "__getattribute__", "__reduce__", "__module__", "__call__"),
    *("__add__", "__iter__", "__next__", "_environment", "_func", "_iterable", "_recurse"),
    *("_undefined", "_Namespace__attrs", "_TemplateReference__context", "_provenance", "_values"),
    *("mro", "gi_frame", "gi_code", "func_globals", "runs", "cut", "recased", "pieces"),
    *("real", "to_bytes", "from_bytes", "as_integer_ratio", "hex", "translate", "maketrans"),
    *("clear", "pop", "popitem", "update", "setdefault", "append", "extend", "sort", "insert"),
)
WALKS = (
    "x[name]",
    "x | attr(name)",
    "[x] | map(attribute=name) | join",
    "('{0.' ~ name ~ '}').format(x)",
    "('{x[' ~ name ~ ']}').format_map({'x': x})",
)


@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS)
def test_no_attribute_leads_out_of_the_template(root: str) -> None:
    class Given:
        secret = real = hex = runs = "leaked"

    names = (*NAMES, "secret")
    walks = (*WALKS, *(f"x.{name}" for name in names))
    cases = [f"{{% if walk == {i} %}}{{{{ {w} }}}}{{% endif %}}" for i, w in enumerate(walks)]
    source = (
        "{% macro f() %}{% endmacro %}{% block b %}{% endblock %}"
        f"{{% for y in [1] %}}{{% set x = {root} %}}{{% if loop %}}{''.join(cases)}{{% endif %}}"
        "{% endfor %}"
    )
    for walk, name in (*product(range(len(WALKS)), names), *enumerate(names, len(WALKS))):
        try:
            text = rendered(source, given=Given(), walk=walk, name=name)
        except ConversationError:
            continue
        # What is not there is undefined, and prints nothing.
        assert text == "", (walks[walk], name)


def test_what_templates_do_ask_for_is_there() -> None:
    source = (
        "{% for m in messages %}{{ loop.index }}{{ loop.last }}{{ m.get('x', 'd') }}"
        "{{ m.content.upper() }}{{ m.tags.index('a') }}{{ m.items() | length }}"
        "{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a }}{{ (1.0).is_integer() }}"
        "{{ dict.fromkeys(['k'], 1).k }}{{ m.keys() | list | first }}{% endfor %}"
    )
    assert rendered(source) == "1TruedHI032True1role"


def test_a_field_with_the_name_of_a_method_that_changes_mappings_is_a_field() -> None:
    assert rendered("{{ messages[0].update }}", [{"role": "user", "update": "u"}]) == "u"


SOURCES = {
    "long": ("x" * (SOURCE_LENGTH + 1), "131,073 characters of at most 131,072"),
    "many parts": ("{{ a }}" * 9000, "more than 8,192 parts"),
    "many operands": ("{{ " + "~".join(["1"] * 20000) + " }}", "more than 8,192 parts"),
    "parentheses": ("{{ " + "(" * 10000 + "1" + ")" * 10000 + " }}", "nested too deeply"),
    "brackets": ("{{ " + "[" * 10000 + "]" * 10000 + " }}", "nested too deeply"),
    "signs": ("{{ " + "-" * 10000 + "1 }}", "nested too deeply"),
    "ifs": ("{% if 1 %}" * 5000 + "{% endif %}" * 5000, "nested too deeply"),
    "sums": ("{{ " + "+".join(["1"] * 5000) + " }}", f"nested more than {NESTING} deep"),
    "attributes": ("{{ a" + ".b" * 5000 + " }}", f"nested more than {NESTING} deep"),
    "filters": ("{{ a" + "|trim" * 5000 + " }}", f"nested more than {NESTING} deep"),
    "calls": ("{{ f" + "()" * 5000 + " }}", f"nested more than {NESTING} deep"),
    "loops": ("{% for a in b %}" * 25 + "{% endfor %}" * 25, "too many statically nested blocks"),
    "digits": ("{{ " + "9" * 50000 + " }}", "integer string conversion"),
    "include": ("\n{% include 'a' %}", "include: a chat template is one file"),
    "import": ("\n{% import 'a' as b %}", "import: a chat template is one file"),
    "from import": ("\n{% from 'a' import b %}", "fromimport: a chat template is one file"),
    "extends": ("\n{% extends 'a' %}", "extends: a chat template is one file"),
}


@pytest.mark.parametrize(("source", "message"), SOURCES.values(), ids=SOURCES)
def test_a_source_that_is_too_much_is_refused_before_it_runs(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"^line \d+: the chat template is not") as caught:
        rendered(source)
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", ["message", "variable"])
def test_data_that_hold_themselves_are_refused(kind: str) -> None:
    loop: dict[str, Any] = {"role": "user", "content": "hi"}
    loop["self"] = [loop]
    messages, variables = ([loop], {}) if kind == "message" else (QUESTION, {"tools": [loop]})
    with pytest.raises(ConversationError, match=f"the {kind}.* is nested too deeply, or holds its"):
        rendered("{{ messages }}{{ tools }}", messages, **variables)


def test_random_words_are_not_offered() -> None:
    with pytest.raises(ConversationError, match="'lipsum' is undefined"):
        rendered("{{ lipsum(n=10 ** 9) }}")


def test_the_environment_offers_what_that_of_transformers_does() -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    from megatron_ext.conversation.rendering.jinja_environment import ProvenanceEnvironment

    theirs = utils._compile_jinja_template("a").environment
    ours = ProvenanceEnvironment()
    assert set(theirs.globals) - set(ours.globals) == {"lipsum"}
    assert set(ours.filters) == set(theirs.filters)
    assert set(ours.tests) == set(theirs.tests)
    for option in ("trim_blocks", "lstrip_blocks", "keep_trailing_newline", "autoescape"):
        assert getattr(ours, option) == getattr(theirs, option)
    tags = {tag for extension in ours.extensions.values() for tag in extension.tags}
    assert tags == {tag for extension in theirs.extensions.values() for tag in extension.tags}

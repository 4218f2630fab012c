"""Chat templates that would take all time or memory, and a process that renders them.

``R`` is a range of 99,999 numbers, nearly as long as the sandbox allows.

``python template_attacks.py`` renders each with fewer steps than a template has, so that a test
takes seconds, and writes what came of it as lines of JSON; ``python template_attacks.py all``
renders the slowest ones with all the steps.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time

from megatron_ext.conversation import render
from megatron_ext.conversation.rendering import template_limits
from megatron_ext.errors import MegatronExtError

SECONDS = 60
"""For one attack, on a machine that has other things to do."""

_DOUBLE = "{{% set n = namespace(x={0}) %}}{{% for i in range(99) %}}{1}{{% endfor %}}"
_SHARED = (
    "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}"
)
_TUPLES = (
    "{% set n = namespace(x=(1,)) %}{% for i in range(60) %}{% set n.x = (n.x, n.x) %}{% endfor %}"
)
_MANY = "{% set x = 'a' * 1000000 %}{% set y = x + '' %}{% for i in R %}%s{% endfor %}"


def _double(start: str, step: str) -> str:
    return _DOUBLE.format(start, step)


def _many(body: str) -> str:
    return _MANY.replace("%s", body)


MORE = "more than"
"""Steps or text, whichever comes first."""
STEPS = "takes more than"
TEXT = "characters of text"
WIDE = "wider than any text"
BITS = "an integer of more than"
DEEP = "more than 100"
REFUSED = "SecurityError"

ATTACKS: dict[str, tuple[str, str]] = {
    # Loops.
    "nested loops": ("{% for a in R %}{% for b in R %}{% endfor %}{% endfor %}", STEPS),
    "a loop that takes nothing": (
        "{% for a in R %}{% for b in R if false %}{% endfor %}{% endfor %}",
        STEPS,
    ),
    "loops over pairs": (
        "{% for a, b in [(1, 2)] * 9999 %}{% for c, d in [(1, 2)] * 9999 %}"
        "{% endfor %}{% endfor %}",
        STEPS,
    ),
    "a long body": ("{% for a in R %}" + "{% set x = 1 %}" * 1000 + "{% endfor %}", STEPS),
    "a loop's length": (
        "{% for a in R %}{% for b in R | map('string') %}"
        "{% if loop.length %}{% break %}{% endif %}{% endfor %}{% endfor %}",
        STEPS,
    ),
    "a loop in itself": ("{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}", DEEP),
    "a tree of loops": (
        "{% for a in range(9) recursive %}{{ loop(range(9)) if loop.depth < 30 }}{% endfor %}",
        STEPS,
    ),
    # Macros and blocks.
    "a macro in itself": ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", DEEP),
    "a macro with a growing argument": (
        "{% macro f(x) %}{{ f(x + x) }}{% endmacro %}{{ f('a') }}",
        TEXT,
    ),
    "a tree of macros": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(60) }}",
        STEPS,
    ),
    "a macro's default": ("{% macro f(x=f()) %}{% endmacro %}{{ f() }}", DEEP),
    "a caller in itself": (
        "{% macro f() %}{{ caller() }}{% endmacro %}"
        "{% macro g() %}{% call f() %}{{ g() }}{% endcall %}{% endmacro %}{{ g() }}",
        DEEP,
    ),
    "a block in itself": ("{% block a %}{{ self.a() }}{% endblock %}", DEEP),
    # Text and lists that grow.
    "text + text": (_double("'a'", "{% set n.x = n.x + n.x %}"), TEXT),
    "text ~ text": (_double("'a'", "{% set n.x = n.x ~ n.x %}"), TEXT),
    "text * 2": (_double("'a'", "{% set n.x = n.x * 2 %}"), TEXT),
    "text joined": (_double("'a'", "{% set n.x = [n.x, n.x] | join %}"), TEXT),
    "text joined by itself": (_double("'a'", "{% set n.x = n.x.join([n.x, n.x]) %}"), TEXT),
    "text replaced": (_double("'aa'", "{% set n.x = n.x.replace('a', n.x) %}"), TEXT),
    "nothing replaced": (_double("'aa'", "{% set n.x = n.x | replace('', n.x) %}"), MORE),
    "a set block": (
        _double("'a'", "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}"),
        TEXT,
    ),
    "an escaped set block": (
        "{% autoescape true %}"
        + _double("'&'", "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}")
        + "{% endautoescape %}",
        TEXT,
    ),
    "text of many sources": (
        _double("'a' ~ messages[0].content", "{% set n.x = n.x ~ n.x %}"),
        MORE,
    ),
    "list + list": (_double("[1]", "{% set n.x = n.x + n.x %}"), STEPS),
    "lists added up": ("{{ ([[1] * 99] * 9999) | sum(start=[]) }}", STEPS),
    "text kept in a list": (
        "{% set n = namespace(x=[]) %}{% for i in R %}{% set n.x = n.x + ['x' * 100000 ~ i] %}"
        "{% endfor %}",
        TEXT,
    ),
    "output": (_many("{{ x }}"), MORE),
    "slices": (_many("{% set z = x[1:] %}"), TEXT),
    "capitals": (_many("{% set z = x.upper() %}"), TEXT),
    "characters": ("{{ ('a' * 8000000) | list | length }}", STEPS),
    "characters joined": ("{{ ','.join('a' * 8000000) }}", STEPS),
    "pieces": ("{{ ('a,' * 4000000).split(',') | length }}", STEPS),
    "words": ("{{ ('ab ' * 1000000).split() | length }}", STEPS),
    "lines": ("{{ ('ab\n' * 1000000).splitlines() | length }}", STEPS),
    "pieces of many sources": (
        "{% set x = ('a' ~ messages[0].content) * 9999 %}"
        "{% for i in R %}{% set y = x.split('a') %}{% endfor %}",
        STEPS,
    ),
    # Numbers.
    "a power": ("{{ 2 ** (10 ** 9) }}", BITS),
    "a product of numbers": (_double("10", "{% set n.x = n.x * n.x %}"), BITS),
    "hexadecimal digits": ("{{ ('f' * 100000) | int(base=16) }}", BITS),
    "an integer's bytes": ("{{ (1).to_bytes(10 ** 9, 'big') }}", REFUSED),
    "a rounded integer": ("{{ 5 | round(-1000000000) }}", "rounds to"),
    # Widths.
    "a product": ("{{ 'x' * 10 ** 10 }}", TEXT),
    "a product of constants": ("{{ 'x' * 10000000000 }}", TEXT),
    "a list's product": ("{{ [1] * 10 ** 10 }}", STEPS),
    "center": ("{{ 'x'.center(10 ** 10) }}", TEXT),
    "ljust": ("{{ 'x'.ljust(10 ** 10) }}", TEXT),
    "rjust": ("{{ 'x'.rjust(10 ** 10) }}", TEXT),
    "zfill": ("{{ 'x'.zfill(10 ** 10) }}", TEXT),
    "expandtabs": ("{{ '\t'.expandtabs(10 ** 9) }}", TEXT),
    "translate": ("{{ ('a' * 99999).translate({97: 'b' * 99999}) }}", REFUSED),
    "center filter": ("{{ 'x' | center(10 ** 10) }}", TEXT),
    "center filter of constants": ("{{ 'x' | center(10000000000) }}", TEXT),
    "indent filter": ("{{ 'x\ny' | indent(10 ** 10) }}", TEXT),
    "indent filter of many lines": ("{{ ('x\n' * 9999) | indent(100000) }}", TEXT),
    "batch filter": ("{{ [1] | batch(10 ** 9, 'x') | list }}", TEXT),
    "slice filter": ("{{ [1] | slice(10 ** 9) | list }}", TEXT),
    "wordwrap filter": ("{{ ('x' * 1000000) | wordwrap(1) }}", STEPS),
    "wordwrap filter with a text": ("{{ ('x ' * 999) | wordwrap(1, true, 'y' * 99999) }}", MORE),
    "urlize filter": ("{{ ('www.a.' * 99999) | urlize }}", STEPS),
    "tojson with a wide indent": ("{{ [[[1]]] | tojson(indent=10 ** 9) }}", TEXT),
    "tojson with many indents": ("{{ ([[[1]]] * 9999) | tojson(indent=100000) }}", TEXT),
    "tojson with a separator": ("{{ ([1] * 99) | tojson(separators=('x' * 999999, ':')) }}", TEXT),
    # Format strings.
    "percent width": ("{{ '%1000000000d' % 1 }}", WIDE),
    "percent precision": ("{{ '%.1000000000f' % 1 }}", WIDE),
    "percent star": ("{{ '%*d' % (1000000000, 1) }}", TEXT),
    "percent name": ("{{ '%(a)1000000000d' % {'a': 1} }}", WIDE),
    "percent name in a name": ("{{ '%(a(b))1000000000d' % {'a(b)': 1} }}", "brackets"),
    "percent again and again": ("{{ ('%(a)s' * 9999) % {'a': 'x' * 99999} }}", TEXT),
    "format filter": ("{{ '%1000000000d' | format(1) }}", WIDE),
    "braces width": ("{{ '{:>1000000000}'.format(1) }}", WIDE),
    "braces precision": ("{{ '{:.1000000000f}'.format(1.0) }}", WIDE),
    "braces width as a field": ("{{ '{:{}}'.format(1, 10 ** 9) }}", WIDE),
    "braces again and again": ("{{ ('{0}' * 9999).format('x' * 99999) }}", TEXT),
    "format_map": ("{{ '{a:>1000000000}'.format_map({'a': 1}) }}", WIDE),
    "strftime_now": ("{{ strftime_now('%c' * 99999) }}", "a time format"),
    # Lists within lists, which are as long as a list of all when they are read.
    "shared lists printed": (_SHARED + "{{ n.x }}", STEPS),
    "shared lists as a text": (_SHARED + "{{ n.x | string }}", STEPS),
    "shared lists joined": (_SHARED + "{{ n.x | join }}", STEPS),
    "shared lists as JSON": (_SHARED + "{{ n.x | tojson }}", STEPS),
    "shared lists formatted": (_SHARED + "{{ '%s' % [n.x] }}", STEPS),
    "shared lists in braces": (_SHARED + "{{ '{!r}'.format(n.x) }}", STEPS),
    "shared lists raised": (_SHARED + "{{ raise_exception(n.x) }}", STEPS),
    "shared lists compared": (_SHARED + "{{ n.x == n.y }}", STEPS),
    "shared lists tested": (_SHARED + "{{ n.x is eq(n.y) }}", STEPS),
    "shared lists searched": (_SHARED + "{{ n.x in [n.y] }}", STEPS),
    "shared lists found": (_SHARED + "{{ [n.y].index(n.x) }}", STEPS),
    "shared lists changed": (
        _SHARED + "{% for z in [n.x, n.y] %}{{ loop.changed(z) }}{% endfor %}",
        STEPS,
    ),
    "shared tuples as an item": (_TUPLES + "{{ {}[n.x] }}", STEPS),
    "shared tuples as a key": (_TUPLES + "{{ {n.x: 1} }}", STEPS),
    "shared tuples in dict": (_TUPLES + "{{ dict([(n.x, 1)]) }}", STEPS),
    "shared tuples in get": (_TUPLES + "{{ {}.get(n.x) }}", STEPS),
    "shared tuples in fromkeys": (_TUPLES + "{{ dict.fromkeys([n.x]) }}", STEPS),
    "shared tuples made unique": (_TUPLES + "{{ [n.x] | unique | list }}", STEPS),
    "shared namespaces": (
        _double("1", "{% set n.x = namespace(a=n.x, b=n.x) %}") + "{{ n.x }}",
        STEPS,
    ),
    "a namespace in itself": ("{% set n = namespace() %}{% set n.x = n %}{{ n }}", DEEP),
    "deep lists": (_double("[]", "{% set n.x = [[n.x]] %}") + "{{ n.x }}", DEEP),
    "deep tuples": (_double("()", "{% set n.x = ((n.x,),) %}") + "{{ {n.x: 1} }}", DEEP),
    "filters over filters": (
        "{% set n = namespace(x=[1]) %}{% for i in R %}{% set n.x = n.x | map('string') %}"
        "{% endfor %}{{ n.x | list }}",
        DEEP,
    ),
    # Work that leaves nothing behind.
    "lists of ranges": ("{% for a in R %}{% set x = R | list %}{% endfor %}", STEPS),
    "a chain of filters": (
        "{% for a in R %}{% set x = R | map('string') | select | map('length') | sum %}"
        "{% endfor %}",
        STEPS,
    ),
    "groups": ("{% for a in R %}{% set x = R | map('string') | groupby(0) %}{% endfor %}", STEPS),
    "sorting": ("{{ (['x' * 99999] * 9999) | sort | length }}", STEPS),
    "many capitals": ("{{ (['x' * 99999] * 9999) | map('upper') | list | length }}", TEXT),
    "searching": (_many("{% if 'b' in x %}{% endif %}"), STEPS),
    "comparing": (_many("{% if x == y %}{% endif %}"), STEPS),
    "testing": (_many("{% if x is lower %}{% endif %}"), STEPS),
    "searching backwards": ("{{ ('a' * 4000000).rfind('b' + 'a' * 2000000) }}", STEPS),
    "stripping": ("{{ ('a' * 4000000).strip('b' * 2000000 + 'a') }}", STEPS),
    "trimming": ("{{ ('a' * 4000000) | trim('b' * 2000000 + 'a') }}", STEPS),
    "a slow encoding": ("{{ ('ab' * 1000000).encode('punycode') }}", STEPS),
    "many arguments": (
        "{% macro f() %}{% endmacro %}{% for i in R %}{{ '{}'.format(*R) }}{% endfor %}",
        STEPS,
    ),
    "many arguments of a macro": (
        "{% macro f() %}{{ varargs | length }}{% endmacro %}"
        "{% for i in R %}{{ f(*R) }}{% endfor %}",
        STEPS,
    ),
}
"""Name -> template, and what its error says."""

SLOWEST = (
    "nested loops",
    "a tree of loops",
    "text of many sources",
    "characters",
    "shared lists printed",
    "text kept in a list",
)


def _main(names: list[str], steps: int | None) -> None:
    if steps is not None:
        template_limits._STEPS = steps
    question = [{"role": "user", "content": "hi"}]
    render("{{ messages[0].content }}", question, special_tokens={}, variables={})
    before = _peak()
    # A render that hangs in C code is not to be stopped otherwise; the signal ends the process.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for name in names:
        signal.alarm(SECONDS)
        start = time.monotonic()
        try:
            variables = {"R": range(99999)}
            rendered = render(ATTACKS[name][0], question, special_tokens={}, variables=variables)
            result = f"no error, but {rendered.text[:80]!r}"
        except MegatronExtError as error:
            result = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - start
        print(json.dumps([name, result, seconds, _peak() - before]), flush=True)


def _peak() -> int:
    """Bytes of memory that the process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    if sys.argv[1:] == ["all"]:
        _main(list(SLOWEST), None)
    else:
        _main(list(ATTACKS), 2**15)

"""Chat templates that try to take all time or memory.

The long table is made of expressions that are evaluated again and again on large values; what a
stranger would write by hand stands first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True)
class Attack:
    """A hostile template."""

    source: str
    variables: Mapping[str, Any] = field(default_factory=dict)


def _doubling(start: str, step: str, turns: int = 99) -> str:
    """A variable of a namespace that a loop makes larger."""
    return (
        f"{{% set n = namespace(x={start}, y={start}) %}}"
        f"{{% for i in range({turns}) %}}{step}{{% endfor %}}"
    )


def _again(value: str, expression: str) -> str:
    """An expression of ``v`` that is evaluated again and again."""
    return (
        f"{{% set v = {value} %}}{{% for i in range(99999) %}}"
        f"{{% set z = {expression} %}}{{% endfor %}}"
    )


_SHARED = _doubling("[1]", "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}", 60)
_TUPLES = _doubling("(1,)", "{% set n.x = (n.x, n.x) %}", 60)
_CYCLE = "{% set n = namespace() %}{% set n.x = n %}"
_DEEP = _doubling("[]", "{% set n.x = [n.x] %}{% set n.y = [n.y] %}", 9999)

BY_HAND: Final[dict[str, str]] = {
    # The ones that were found to run for minutes.
    "long field path": (
        "{% set a = '{0' ~ '[0]' * 100000 ~ '}' %}"
        "{% for i in range(9999) %}{% set z = a.format('x') %}{% endfor %}"
    ),
    "long attribute path": (
        _CYCLE + "{% set a = 'x.' * 100000 ~ 'x' %}"
        "{{ ([n] * 9999) | map(attribute=a) | list | length }}"
    ),
    "long attribute path selected": (
        _CYCLE
        + "{% set a = 'x.' * 100000 ~ 'x' %}{{ ([n] * 9999) | selectattr(a) | list | length }}"
    ),
    "range counted": _again("range(99999)", "v.count('a')"),
    "range membership": _again("range(99999)", "'a' in v"),
    "range index of a float": _again("range(99999)", "v.index(99998.0)"),
    "mapping copied": _again("dict.fromkeys(range(90000))", "v.copy()"),
    "namespace of a mapping": _again("dict.fromkeys(range(90000)|map('string'))", "namespace(v)"),
    "words counted": _again("'a ' * 3750000", "v | wordcount"),
    # Loops, macros, callers and blocks.
    "nested loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "nested loops of attributes": (
        _CYCLE
        + "{% for a in range(99999) %}"
        + "{{ n.x.x.x.x.x.x.x.x.x.x.x.x.x.x.x.q }}" * 50
        + "{% endfor %}"
    ),
    "nested loops of items": (
        "{% set d = {'a': {}} %}{% for a in range(99999) %}"
        + "{% set x = d['a']['b'] %}" * 50
        + "{% endfor %}"
    ),
    "nested loops of tests": (
        "{% for a in range(99999) %}" + "{% set x = a is defined %}" * 50 + "{% endfor %}"
    ),
    "nested loops of arithmetic": (
        "{% set v = 2 ** 2000 %}{% for a in range(99999) %}"
        + "{% set x = v // 3 - v * 1 %}" * 50
        + "{% endfor %}"
    ),
    "nested loops of modulo": (
        "{% set v = 2 ** 2000 %}{% for a in range(99999) %}"
        + "{% set x = v % 3 %}" * 50
        + "{% endfor %}"
    ),
    "nested loops of lists": (
        "{% for a in range(99999) %}" + "{% set x = [a, a, a, a, a, a] %}" * 50 + "{% endfor %}"
    ),
    "nested loops of mappings": (
        "{% for a in range(99999) %}" + "{% set x = {'a': a, 'b': a} %}" * 50 + "{% endfor %}"
    ),
    "nested loops of filters": (
        "{% for a in range(99999) %}" + "{{ '' | trim | default('a') }}" * 50 + "{% endfor %}"
    ),
    "nested loops of methods": (
        "{% for a in range(99999) %}" + "{% set x = ''.upper().strip() %}" * 50 + "{% endfor %}"
    ),
    "nested loops of comparisons": (
        "{% for a in range(99999) %}"
        + "{% set x = a == a and a < a or a != a %}" * 50
        + "{% endfor %}"
    ),
    "nested loops of slices": (
        "{% set v = 'abcd' %}{% for a in range(99999) %}"
        + "{% set x = v[1:3] ~ v[0] %}" * 50
        + "{% endfor %}"
    ),
    "nested loops of outputs": ("{% for a in range(99999) %}" + "{{ a }}x" * 50 + "{% endfor %}"),
    "nested loops of undefined values": (
        "{% for a in range(99999) %}" + "{% set x = missing %}{{ x }}" * 50 + "{% endfor %}"
    ),
    "nested loops of conditions": (
        "{% for a in range(99999) %}"
        + "{% if a %}{% elif a %}{% else %}{% endif %}" * 50
        + "{% endfor %}"
    ),
    "nested loops of set blocks": (
        "{% for a in range(99999) %}" + "{% set x %}a{% endset %}" * 50 + "{% endfor %}"
    ),
    "nested loops of namespaces": (
        "{% for a in range(99999) %}"
        + "{% set x = namespace(a=1) %}{% set x.a = 2 %}" * 50
        + "{% endfor %}"
    ),
    "nested loops of with blocks": (
        "{% for a in range(99999) %}" + "{% with b = a %}{% endwith %}" * 50 + "{% endfor %}"
    ),
    "nested loops of generation blocks": (
        "{% for a in range(99999) %}" + "{% generation %}x{% endgeneration %}" * 50 + "{% endfor %}"
    ),
    "nested loops of filter blocks": (
        "{% for a in range(99999) %}" + "{% filter upper %}x{% endfilter %}" * 50 + "{% endfor %}"
    ),
    "nested loops of loops": (
        "{% for a in range(99999) %}"
        + "{% for b in [1] %}{{ loop.index }}{% endfor %}" * 50
        + "{% endfor %}"
    ),
    "nested loops of macros": (
        "{% macro f() %}{% endmacro %}{% for a in range(99999) %}"
        + "{{ f() }}" * 50
        + "{% endfor %}"
    ),
    "loop over messages in loops": (
        "{% for a in range(99999) %}{% for m in messages * 9999 %}{{ m.role }}{% endfor %}"
        "{% endfor %}"
    ),
    "loop that takes nothing": (
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}"
    ),
    "loop over pairs": (
        "{% for a, b in [(1, 2)] * 9999 %}{% for c, d in [(1, 2)] * 9999 %}{% endfor %}{% endfor %}"
    ),
    "long body": "{% for a in range(99999) %}" + "{% set x = 1 %}" * 1000 + "{% endfor %}",
    "loop's length": (
        "{% for a in range(99999) %}{% for b in range(99999) | map('string') %}"
        "{% if loop.length %}{% break %}{% endif %}{% endfor %}{% endfor %}"
    ),
    "loop in itself": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "tree of loops": (
        "{% for a in range(9) recursive %}{{ loop(range(9)) if loop.depth < 30 }}{% endfor %}"
    ),
    "loop that grows": (
        "{% for a in 'a' recursive %}{% set x = a * 2 %}{{ loop([x]) }}{{ loop([x]) }}{% endfor %}"
    ),
    "macro in itself": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "macro with a growing argument": "{% macro f(x) %}{{ f(x + x) }}{% endmacro %}{{ f('a') }}",
    "tree of macros": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "tree of output": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% else %}{{ 'x' * 99 }}{% endif %}"
        "{% endmacro %}{{ f(17) }}"
    ),
    "macro's default": "{% macro f(x=f()) %}{% endmacro %}{{ f() }}",
    "macros through a list": (
        "{% macro f(g) %}{{ g[0](g) }}{{ g[0](g) }}{% endmacro %}{{ f([f]) }}"
    ),
    "macro as a filter's argument": (
        "{% macro f(x) %}{{ x | map('string') | join }}{% endmacro %}{% for i in range(99999) %}"
        "{{ f(range(999)) }}{% endfor %}"
    ),
    "caller in itself": (
        "{% macro f() %}{{ caller() }}{% endmacro %}"
        "{% macro g() %}{% call f() %}{{ g() }}{% endcall %}{% endmacro %}{{ g() }}"
    ),
    "caller again and again": (
        "{% macro f() %}{% for i in range(99999) %}{{ caller() }}{% endfor %}{% endmacro %}"
        "{% call f() %}{% for i in range(99999) %}x{% endfor %}{% endcall %}"
    ),
    "block in itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "blocks twice": (
        "{% block a %}{{ 'x' * 999 }}{% endblock %}"
        "{% for i in range(99999) %}{{ self.a() }}{{ self.a() }}{% endfor %}"
    ),
    "many arguments of a method": _again("range(99999) | list", "'{}'.format(*v)"),
    "many arguments of a macro": (
        "{% macro f() %}{{ varargs | length }}{% endmacro %}" + _again("range(99999)", "f(*v)")
    ),
    "many arguments of a filter": _again("range(9999) | list", "1 | default(*v)"),
    "many arguments of a test": _again("range(9999) | list", "1 is sameas(*v)"),
    "many named arguments": (
        "{% macro f() %}{{ kwargs | length }}{% endmacro %}"
        + _again("dict.fromkeys(range(20000) | map('string'))", "f(**v)")
    ),
    "many named arguments of namespace": _again(
        "dict.fromkeys(range(20000) | map('string'))", "namespace(**v)"
    ),
    "many named arguments of dict": _again(
        "dict.fromkeys(range(20000) | map('string'))", "dict(**v)"
    ),
    "many arguments of cycler": _again("range(99999) | list", "cycler(*v)"),
    "many arguments of a joiner": _again("'a' * 999999", "joiner(v)()"),
    "unpacked texts": _again("'a' * 99999", "cycler(*v)"),
    "cycler's turns": (
        "{% set c = cycler(1, 2) %}{% for a in range(99999) %}"
        + "{% set z = c.next() %}" * 50
        + "{% endfor %}"
    ),
    "loop's cycle": (
        "{% for a in range(99999) %}" + "{% set z = loop.cycle(1, 2) %}" * 50 + "{% endfor %}"
    ),
    "loop changed": (
        "{% set v = range(90000) | list %}{% for i in range(99999) %}"
        "{% set z = loop.changed(v + []) %}{% endfor %}"
    ),
    # Values that grow.
    "text + text": _doubling("'a'", "{% set n.x = n.x + n.x %}"),
    "text ~ text": _doubling("'a'", "{% set n.x = n.x ~ n.x %}"),
    "text * 2": _doubling("'a'", "{% set n.x = n.x * 2 %}"),
    "text of four bytes": _doubling("'\U0001f600'", "{% set n.x = n.x * 2 %}"),
    "text kept while it grows": _doubling(
        "'\U0001f600'", "{% set n.x = n.x * 2 %}{% set n.y = [n.y, n.x, n.x ~ 'a', n.x | list] %}"
    ),
    "text of many sources": _doubling("'a' ~ messages[0].content", "{% set n.x = n.x ~ n.x %}"),
    "text joined": _doubling("'a'", "{% set n.x = [n.x, n.x] | join %}"),
    "text joined by itself": _doubling("'a'", "{% set n.x = n.x.join([n.x, n.x]) %}"),
    "text joined by its characters": _doubling("'ab'", "{% set n.x = n.x.join(n.x) %}"),
    "text replaced": _doubling("'aa'", "{% set n.x = n.x.replace('a', n.x) %}"),
    "nothing replaced": _doubling("'aa'", "{% set n.x = n.x | replace('', n.x) %}"),
    "text formatted by percent": _doubling("'a'", "{% set n.x = '%s%s' % (n.x, n.x) %}"),
    "text formatted by braces": _doubling("'a'", "{% set n.x = '{0}{0}'.format(n.x) %}"),
    "text in capitals": _doubling("'ß'", "{% set n.x = n.x.upper() + n.x.casefold() %}"),
    "text escaped": _doubling("'&'", "{% set n.x = n.x | e | string | e | e %}"),
    "text force-escaped": _doubling("'&'", "{% set n.x = n.x | forceescape | forceescape %}"),
    "text as JSON": _doubling("'\"'", "{% set n.x = n.x | tojson %}"),
    "text as a representation": _doubling('["\'"]', "{% set n.x = [n.x | string] %}"),
    "text URL-encoded": _doubling("'%'", "{% set n.x = n.x | urlencode %}"),
    "text indented": _doubling("'a\\nb'", "{% set n.x = n.x | indent(n.x) %}"),
    "text centred": _doubling("'a'", "{% set n.x = n.x | center(2 * (n.x | length)) %}"),
    "text wrapped": _doubling("'a b'", "{% set n.x = n.x | wordwrap(1, true, n.x) %}"),
    "set block": _doubling("'a'", "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}"),
    "escaped set block": (
        "{% autoescape true %}"
        + _doubling("'&'", "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}")
        + "{% endautoescape %}"
    ),
    "filter block": _doubling(
        "'a'",
        "{% set y %}{% filter replace('a', 'aa') %}{{ n.x }}{% endfilter %}{% endset %}"
        "{% set n.x = y %}",
    ),
    "list + list": _doubling("[1]", "{% set n.x = n.x + n.x %}"),
    "list * 2": _doubling("[1]", "{% set n.x = n.x * 2 %}"),
    "tuple * 2": _doubling("(1,)", "{% set n.x = n.x * 2 %}"),
    "bytes * 2": _doubling("'a'.encode()", "{% set n.x = n.x * 2 %}"),
    "bytes + bytes": _doubling("'a'.encode()", "{% set n.x = n.x + n.x %}"),
    "list of itself": _doubling("[1]", "{% set n.x = [n.x, n.x] %}", 9999) + "{{ n.x }}",
    "list unpacked": (
        "{% macro f() %}{{ caller(varargs + varargs) }}{% endmacro %}"
        + _doubling("(1,)", "{% call(a) f(*n.x) %}{% set n.x = a %}{% endcall %}")
    ),
    "lists summed": "{{ ([[1] * 99] * 9999) | sum(start=[]) }}",
    "lists kept": _doubling("[]", "{% set n.x = n.x + [[0] * 9999] %}", 9999),
    "ranges kept": _doubling("[]", "{% set n.x = n.x + [range(99999) | list] %}", 9999),
    "mappings kept": _doubling("[]", "{% set n.x = n.x + [dict.fromkeys(range(999))] %}", 9999),
    "namespaces kept": _doubling("[]", "{% set n.x = [n.x] + [namespace(a=i)] * 2 %}", 99999),
    "texts kept": _doubling("[]", "{% set n.x = n.x + ['x' * 99999 ~ i] %}", 9999),
    "integers kept": _doubling("[]", "{% set n.x = [n.x, 2 ** 2000 + i] %}", 99999),
    "macros kept": (
        "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% macro f(a=i) %}{% endmacro %}"
        "{% set n.x = [n.x, f] %}{% endfor %}"
    ),
    "loops kept": (
        "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% for j in [[i] * 99] %}"
        "{% set n.x = [n.x, loop] %}{% endfor %}{% endfor %}"
    ),
    "methods kept": _doubling("[]", "{% set n.x = [n.x, ('a' * 999 ~ i).upper] %}", 99999),
    "bound filters kept": _doubling(
        "[]", "{% set n.x = [n.x, range(9999) | map('string')] %}", 99999
    ),
    "pieces kept": _doubling("[]", "{% set n.x = [n.x, ('a ' * 999).split()] %}", 99999),
    "namespace with many names": (
        "{% set n = namespace() %}{% for i in range(99999) %}{% set n.x = [i, n.x] %}{% endfor %}"
    ),
    "output": "{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "output of many sources": (
        "{% set x = ('a' ~ messages[0].content) * 9999 %}{% for i in range(99999) %}{{ x }}"
        "{% endfor %}"
    ),
    "output of turns": (
        "{% for i in range(99999) %}{% for m in messages %}{{ m.content }}<{% endfor %}{% endfor %}"
    ),
    # Numbers.
    "power": "{{ 2 ** (10 ** 9) }}",
    "power of a float": "{{ 2.0 ** (10 ** 9) }}",
    "negative power": "{{ 2 ** -(10 ** 300) }}",
    "power of powers": "{{ 9 ** 9 ** 9 ** 9 }}",
    "power of truth": "{{ true ** (10 ** 300) }}",
    "product of numbers": _doubling("10", "{% set n.x = n.x * n.x %}"),
    "sum of numbers": _doubling("10", "{% set n.x = n.x + n.x %}", 99999),
    "hexadecimal digits": "{{ ('f' * 100000) | int(base=16) }}",
    "decimal digits": "{{ ('9' * 4300) | int * 1 }}",
    "decimal digits again and again": _again("'9' * 4300", "v | int"),
    "digits of a float": _again("'9' * 999999", "v | float"),
    "integer's bytes": "{{ (1).to_bytes(10 ** 9, 'big') }}",
    "rounded integer": "{{ 5 | round(-1000000000) }}",
    "rounded float": "{{ 5.5 | round(10 ** 9) }}",
    "large factor": "{{ 'x' * 10 ** 10 }}",
    "large factor of a list": "{{ [1] * 10 ** 10 }}",
    "large factor of bytes": "{{ 'x'.encode() * 10 ** 10 }}",
    "large range": "{{ range(10 ** 9) | list }}",
    "large integer printed": _again("2 ** 2047", "v ~ ''"),
    "large integer divided": _again("2 ** 2047", "v // 3 ** 300"),
    "large integer raised": _again("2 ** 20", "v ** 100"),
    "sizes of files": _again("2 ** 2047", "v | filesizeformat"),
    "divisibility": _again("2 ** 2047", "v is divisibleby 7"),
    "long constant": "{{ " + "9" * 4300 + " }}",
    "long constants divided": (
        "{% set a = " + "9" * 4300 + " %}{% set b = " + "8" * 2150 + " %}"
        "{% for i in range(99999) %}{% set x = [a // b, a // b, a // b] %}{% endfor %}"
    ),
    "constants divided": (
        "{% set a = 0x" + "f" * 500 + " %}{% set b = 0x" + "7" * 250 + " %}"
        "{% for i in range(99999) %}" + "{% set x = a % b // 3 %}" * 50 + "{% endfor %}"
    ),
    # Widths and forms.
    "center": "{{ 'x'.center(10 ** 10) }}",
    "ljust": "{{ 'x'.ljust(10 ** 10) }}",
    "rjust": "{{ 'x'.rjust(10 ** 10) }}",
    "zfill": "{{ 'x'.zfill(10 ** 10) }}",
    "expandtabs": "{{ '\\t'.expandtabs(10 ** 9) }}",
    "many tabs": "{{ ('\\t' * 99999).expandtabs(99999) }}",
    "translate": "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
    "maketrans": "{{ ''.maketrans('a' * 999999, 'b' * 999999) }}",
    "center filter": "{{ 'x' | center(10 ** 10) }}",
    "indent filter": "{{ 'x\\ny' | indent(10 ** 10) }}",
    "indent filter of many lines": "{{ ('x\\n' * 9999) | indent(100000) }}",
    "indent filter by a text": "{{ ('x\\n' * 99999) | indent('y' * 99999, true, true) }}",
    "batch filter": "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "slice filter": "{{ [1] | slice(10 ** 9) | list }}",
    "slice filter with a text": "{{ range(9999) | slice(10 ** 6, 'x') | list }}",
    "wordwrap filter": "{{ ('x' * 1000000) | wordwrap(1) }}",
    "wordwrap filter of words": "{{ ('x-' * 500000) | wordwrap(1) }}",
    "wordwrap filter of blanks": "{{ (' ' * 1000000) | wordwrap(1) }}",
    "wordwrap filter with a text": "{{ ('x ' * 999) | wordwrap(1, true, 'y' * 99999) }}",
    "wordwrap again and again": _again("'xy ' * 500", "v | wordwrap(3)"),
    "wordwrap of hyphens": _again("'-' * 4000", "v | wordwrap(3)"),
    "urlize filter": "{{ ('www.a.' * 99999) | urlize }}",
    "urlize of brackets": "{{ ('(' * 99999 ~ 'www.a.de' ~ ')' * 99999) | urlize }}",
    "urlize with a target": "{{ ('www.a.de ' * 999) | urlize(target='x' * 99999) }}",
    "urlize with schemes": "{{ ('www.a.de ' * 999) | urlize(extra_schemes=['x:'] * 9999) }}",
    "urlize again and again": _again("'www.a.de ' * 99", "v | urlize"),
    "urlize of dots": _again("'.' * 4000", "v | urlize"),
    "urlize of mail": _again("'a@b.' * 800", "v | urlize"),
    "pprint of depth": _DEEP + "{{ n.x | pprint }}",
    "pprint of a list": _again("[range(99) | list] * 99", "v | pprint"),
    "pprint of texts": _again("['ab ' * 99] * 99", "v | pprint"),
    "pprint of a long text": "{{ ('a b' * 99999) | pprint }}",
    "tojson with a wide indent": "{{ [[[1]]] | tojson(indent=10 ** 9) }}",
    "tojson with many indents": "{{ ([[[1]]] * 9999) | tojson(indent=100000) }}",
    "tojson with an indent of text": "{{ ([[[1]]] * 999) | tojson(indent='x' * 99999) }}",
    "tojson with a separator": "{{ ([1] * 99) | tojson(separators=('x' * 999999, ':')) }}",
    "tojson sorted": _again("dict.fromkeys(range(9999))", "v | tojson(sort_keys=true)"),
    "truncate": "{{ ('a' * 99999) | truncate(10 ** 9, true, 'x' * 999999, 0) }}",
    "truncate of leeway": "{{ ('a' * 99999) | truncate(1, leeway=10 ** 300) }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent precision": "{{ '%.1000000000f' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent star of precision": "{{ '%.*f' % (1000000000, 1) }}",
    "percent name": "{{ '%(a)1000000000d' % {'a': 1} }}",
    "percent name in a name": "{{ '%(a(b))1000000000d' % {'a(b)': 1} }}",
    "percent again and again": "{{ ('%(a)s' * 9999) % {'a': 'x' * 99999} }}",
    "percent of a list": "{{ ('%(a)s' * 9999) % {'a': [1] * 9999} }}",
    "percent with flags": "{{ ('%' ~ '0' * 999999 ~ 'd') % 1 }}",
    "percent with a length": "{{ ('%' ~ 'l' * 999999 ~ 'd') % 1 }}",
    "percent of a long form": _again("'%s' * 9999", "v % (v,)"),
    "percent of a form of text": _again("'a' * 999999", "v % ()"),
    "percent of brackets": "{{ ('%(' * 99999) % {'a': 1} }}",
    "percent of open names": "{{ ('%(a' * 99999) % {'a': 1} }}",
    "percent of many widths": "{{ ('%999d' * 9999) % (1,) }}",
    "percent of a large number": _again("2 ** 2000", "'%d%x%o' % (v, v, v)"),
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "format filter of many": _again("range(9999) | list", "('%d' * 9999) | format(*v)"),
    "braces width": "{{ '{:>1000000000}'.format(1) }}",
    "braces precision": "{{ '{:.1000000000f}'.format(1.0) }}",
    "braces width as a field": "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "braces again and again": "{{ ('{0}' * 9999).format('x' * 99999) }}",
    "braces of a list": "{{ ('{0}' * 9999).format([1] * 9999) }}",
    "braces of attributes": (
        _CYCLE + "{% set a = '{0' ~ '.x' * 100000 ~ '}' %}"
        "{% for i in range(9999) %}{% set z = a.format(n) %}{% endfor %}"
    ),
    "braces of a long index": "{{ ('{0[' ~ '9' * 999999 ~ ']}').format([1]) }}",
    "braces of a long number": "{{ ('{' ~ '9' * 4000 ~ '}').format([1]) }}",
    "braces of a long name": "{{ ('{' ~ 'a' * 999999 ~ '}').format(a=1) }}",
    "braces within braces": "{{ ('{:' * 999 ~ '}' * 999).format(1) }}",
    "braces of specifications": "{{ ('{0:{1}}' * 9999).format('x', 9999) }}",
    "braces doubled": _again("'{{' * 99999", "v.format(1)"),
    "braces of a long form": _again("'a{}' * 9999", "v.format(*v)"),
    "format_map": "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
    "format_map again and again": _again("'{a}' * 9999", "v.format_map({'a': v})"),
    "strftime_now": "{{ strftime_now('%c' * 99999) }}",
    "strftime_now with a width": "{{ strftime_now('%999999999d') }}",
    "strftime_now with widths": "{{ strftime_now('%99999999d' * 20) }}",
    "strftime_now again and again": _again("'%c' * 120", "strftime_now(v)"),
    # Values that hold one another, or themselves.
    "shared lists printed": _SHARED + "{{ n.x }}",
    "shared lists as a text": _SHARED + "{{ n.x | string }}",
    "shared lists joined": _SHARED + "{{ n.x | join }}",
    "shared lists concatenated": _SHARED + "{{ n.x ~ n.x }}",
    "shared lists as JSON": _SHARED + "{{ n.x | tojson }}",
    "shared lists pretty": _SHARED + "{{ n.x | pprint }}",
    "shared lists formatted": _SHARED + "{{ '%s' % [n.x] }}",
    "shared lists in braces": _SHARED + "{{ '{!r}'.format(n.x) }}",
    "shared lists raised": _SHARED + "{{ raise_exception(n.x) }}",
    "shared lists compared": _SHARED + "{{ n.x == n.y }}",
    "shared lists ordered": _SHARED + "{{ n.x < n.y }}",
    "shared lists compared with a constant": _SHARED + "{{ n.x == (n.y[0], 1) }}",
    "shared lists compared in a list": _SHARED + "{{ [n.x] == [n.y] }}",
    "shared lists compared in a mapping": _SHARED + "{{ {'a': n.x} == {'a': n.y} }}",
    "shared lists tested": _SHARED + "{{ n.x is eq(n.y) }}",
    "shared lists tested for order": _SHARED + "{{ n.x is lt(n.y) }}",
    "shared lists tested for membership": _SHARED + "{{ n.x is in([n.y]) }}",
    "shared lists searched": _SHARED + "{{ n.x in [n.y] }}",
    "shared lists searched in a view": _SHARED + "{{ n.x in {'a': n.y}.values() }}",
    "shared lists found": _SHARED + "{{ [n.y].index(n.x) }}",
    "shared lists counted": _SHARED + "{{ [n.y].count(n.x) }}",
    "shared lists sorted": _SHARED + "{{ [n.x, n.y] | sort }}",
    "shared lists at most": _SHARED + "{{ [n.x, n.y] | max }}",
    "shared lists grouped": _SHARED + "{{ [[n.x], [n.y]] | groupby(0) }}",
    "shared lists selected": _SHARED + "{{ [n.x] | select('eq', n.y) | list }}",
    "shared lists rejected": _SHARED + "{{ [{'a': n.x}] | rejectattr('a', 'eq', n.y) | list }}",
    "shared lists changed": (
        _SHARED + "{% for z in [n.x, n.y] %}{{ loop.changed(z) }}{% endfor %}"
    ),
    "shared lists in a call block": (
        _SHARED + "{% macro f() %}{{ caller(n.x) }}{% endmacro %}{% call(a) f() %}{{ a }}"
        "{% endcall %}"
    ),
    "shared lists added": _SHARED
    + "{% for i in range(99999) %}{% set z = n.x + n.y %}{% endfor %}",
    "shared tuples as an item": _TUPLES + "{{ {}[n.x] }}",
    "shared tuples as a key": _TUPLES + "{{ {n.x: 1} }}",
    "shared tuples in a mapping": _TUPLES + "{{ n.x in {} }}",
    "shared tuples in dict": _TUPLES + "{{ dict([(n.x, 1)]) }}",
    "shared tuples in get": _TUPLES + "{{ {}.get(n.x) }}",
    "shared tuples in fromkeys": _TUPLES + "{{ dict.fromkeys([n.x]) }}",
    "shared tuples made unique": _TUPLES + "{{ [n.x] | unique | list }}",
    "shared tuples by attr": _TUPLES + "{{ [1] | map(attribute=n.x) | list }}",
    "shared tuples as items of a format": _TUPLES + "{{ '{0[a]}'.format({'a': n.x}) }}",
    "tuples computed lazily as keys": (
        "{% set t = ((1,) * 200000,) %}{% for i in range(999) %}"
        "{% set z = dict.fromkeys(([[t]] * 9999) | map('first')) %}{% endfor %}"
    ),
    "lists computed lazily and compared": (
        "{% set t = [[1] * 200000] %}{% set u = [[1] * 199999 + [2]] %}{% for i in range(999) %}"
        "{% set z = u in (([[t]] * 9999) | map('first')) %}{% endfor %}"
    ),
    "shared mappings": _doubling("{}", "{% set n.x = {'a': n.x, 'b': n.x} %}", 60) + "{{ n.x }}",
    "shared mappings as items": (
        _doubling("{}", "{% set n.x = {'a': n.x, 'b': n.x}.items() %}", 60) + "{{ n.x }}"
    ),
    "shared mappings as values": (
        _doubling("{}", "{% set n.x = {'a': n.x, 'b': n.x}.values() %}", 60) + "{{ n.x | string }}"
    ),
    "shared namespaces": _doubling("1", "{% set n.x = namespace(a=n.x, b=n.x) %}") + "{{ n.x }}",
    "shared cyclers": _doubling("1", "{% set n.x = cycler(n.x, n.x) %}") + "{{ n.x }}",
    "shared loops": (
        "{% set n = namespace(x=1) %}{% for i in range(60) %}{% for a in [n.x, n.x] %}"
        "{% set n.x = loop %}{% endfor %}{% endfor %}{{ n.x }}"
    ),
    "shared methods": (
        _doubling("[1]", "{% set n.x = [n.x.count, n.x.index] %}", 60) + "{{ n.x }}"
    ),
    "shared methods compared": (
        _doubling(
            "[1]",
            "{% set n.x = [n.x.count, n.x.index] %}{% set n.y = [n.y.count, n.y.index] %}",
            60,
        )
        + "{{ n.x == n.y }}"
    ),
    "shared groups": (
        _doubling("[1]", "{% set n.x = [[n.x], [n.x]] | groupby(0) %}", 60) + "{{ n.x }}"
    ),
    "shared undefined values": (
        _doubling("[1]", "{% set n.x = [n.x, n.x] %}", 60) + "{{ ''[n.x] }}{{ {}[n.x] }}"
    ),
    "shared objects of an error": _SHARED + "{{ n.x.a.b }}",
    "shared objects of an error by item": _SHARED + "{{ n.x['a' * 99999].b }}",
    "shared objects of a key error": _TUPLES + "{{ '%(a)s' % {n.x: 1} }}",
    "namespace in itself": _CYCLE + "{{ n }}",
    "namespace in itself as JSON": _CYCLE + "{{ [n] | tojson }}",
    "namespace in itself compared": _CYCLE + "{{ [n] == [n.x] }}",
    "namespace in itself joined": _CYCLE + "{{ [n, n] | join }}",
    "namespace in itself pretty": _CYCLE + "{{ n | pprint }}",
    "namespace in itself through a list": (
        "{% set n = namespace(x=[]) %}{% set n.x = [n, n, n] %}{{ n.x | string }}"
    ),
    "namespaces in each other compared": (
        "{% set n = namespace() %}{% set m = namespace() %}{% set n.x = [m] %}{% set m.x = [n] %}"
        "{{ n.x == m.x }}{{ n.x in m.x }}{{ n }}"
    ),
    "deep lists printed": _DEEP + "{{ n.x }}",
    "deep lists compared": _DEEP + "{{ n.x == n.y }}",
    "deep lists ordered": _DEEP + "{{ n.x < n.y }}",
    "deep lists as JSON": _DEEP + "{{ n.x | tojson }}",
    "deep lists flattened": _DEEP + "{{ n.x | sum(start=[]) }}",
    "deep tuples hashed": _doubling("()", "{% set n.x = (n.x,) %}", 9999) + "{{ {n.x: 1} }}",
    "deep lists dropped": _doubling("[]", "{% set n.x = [n.x] %}", 99999),
    "deep filters": (
        _doubling("[1]", "{% set n.x = n.x | map('string') %}", 9999) + "{{ n.x | list }}"
    ),
    "deep filters reversed": (
        _doubling("[1]", "{% set n.x = n.x | reverse | map('string') %}", 9999) + "{{ n.x | list }}"
    ),
    "deep slices of filters": (
        _doubling("[1]", "{% set n.x = n.x | batch(1) %}", 9999) + "{{ n.x | list }}"
    ),
    "deep unique filters": (
        _doubling("[1]", "{% set n.x = n.x | unique %}", 9999) + "{{ n.x | list }}"
    ),
    "deep items": (
        _doubling("{}", "{% set n.x = {'a': n.x} | items %}", 9999) + "{{ n.x | list }}"
    ),
    "deep names of filters": "{{ [[1]] | map('map', 'map', 'map', 'string') | list }}",
    "filter by name again and again": _again("range(9999)", "v | map('map') | list"),
    "test by name again and again": _again("range(9999)", "v | select('in', v) | list"),
    # Text whose search takes the product of two lengths.
    "searching backwards": "{{ ('a' * 4000000).rfind('b' + 'a' * 2000000) }}",
    "searching forwards": "{{ ('a' * 4000000).find('a' * 2000000 + 'b') }}",
    "searching by in": "{{ ('a' * 2000000 + 'b') in ('a' * 4000000) }}",
    "counting": "{{ ('ab' * 2000000).count('ab' * 99999 ~ 'c') }}",
    "stripping": "{{ ('a' * 4000000).strip('b' * 2000000 + 'a') }}",
    "trimming": "{{ ('a' * 4000000) | trim('b' * 2000000 + 'a') }}",
    "splitting": "{{ ('a' * 4000000).rsplit('b' + 'a' * 2000000) }}",
    "partition": "{{ ('a' * 4000000).rpartition('b' + 'a' * 2000000) }}",
    "removing": _again("'a' * 999999", "v.removeprefix(v ~ 'b').removesuffix('b' ~ v)"),
    "replacing pieces of many sources": (
        "{% set x = ('a' ~ messages[0].content) * 9999 %}"
        "{% for i in range(99999) %}{% set y = x.split('a') %}{% endfor %}"
    ),
    "single characters of many sources": (
        "{% set x = ('a' ~ messages[0].content) * 9999 %}"
        "{% for i in range(99999) %}{% set y = x[i] %}{% endfor %}"
    ),
    "sliding cuts of many sources": (
        "{% set x = ('a' ~ messages[0].content) * 9999 %}"
        "{% for i in range(99999) %}{% set y = x[i:i + 2] %}{% endfor %}"
    ),
    "slow encoding": "{{ ('ab' * 1000000).encode('punycode') }}",
    "slow encoding of many": "{{ ('äöüß' * 10000).encode('punycode') }}",
    "idna": "{{ ('ä' * 10000).encode('idna') }}",
    "slow decoding": "{{ ('ab-' ~ 'a' * 99999).encode().decode('punycode') }}",
    "zipped bomb": "{{ ('a' * 99999).encode('zip') }}",
    "unicode escape": _again("'\U0001f600' * 99999", "v.encode('unicode_escape')"),
    "name escapes": _again("'\U0001f600' * 99999", "v.encode('ascii', 'namereplace')"),
    "XML escapes": _again("'\U0001f600' * 99999", "v.encode('ascii', 'xmlcharrefreplace')"),
    "encoding of a long name": "{{ 'a'.encode('x' * 999999) }}",
    # What reaches a terminal.
    "control characters": "{{ raise_exception('\\x1b]0;x\\x07\\x9b31m\\u202e\\n\\r\\u2028') }}",
    "control characters of a message": "{{ raise_exception(messages[0].content ~ '\x1b[2J') }}",
    "long error": "{{ raise_exception('x' * 999999) }}",
    "surrogates": "{{ raise_exception('\ud800') }}",
    "control characters of an attribute": "{{ messages['\x1b[2J\x07'].a }}",
    "long attribute": "{{ messages['a' * 999999].a }}",
    "long filter": "{{ [1] | map('a' * 999999) | list }}",
    "control characters of a filter": "{{ [1] | map('\x1b[2J') | list }}",
    "control characters of a syntax error": "{{ \x1b[2J }}",
    "long syntax error": "{{ " + "a" * 99999 + " b }}",
    "long unknown tag": "{% " + "a" * 99999 + " %}",
    "control characters of a format": "{{ '%(\x1b)s' % {} }}",
    "error of a large value": _again("[1] * 99999", "v + 'a'") + "{{ {}[([1] * 99999) | join] }}",
    "output of surrogates": "{{ '\ud800' }}",
    # Sources that are slow to read or compile.
    "many names": "".join(f"{{% set a{i} = 1 %}}" for i in range(2600)),
    "many names passed on": (
        "".join(f"{{% set a{i} = 1 %}}" for i in range(2500)) + "{{ [] | map('a') | list }}" * 900
    ),
    "many names passed on in a loop": (
        "{% for i in range(99999) %}"
        + "".join(f"{{% set a{i} = 1 %}}" for i in range(600))
        + "{% set z = [] | map %}" * 600
        + "{% endfor %}"
    ),
    "many names in conditions": (
        "".join(f"{{% if b %}}{{% set a{i} = 1 %}}{{% endif %}}" for i in range(3000))
    ),
    "many names in loops": (
        "".join(f"{{% for b{i} in c %}}{{% set a{i} = 1 %}}{{% endfor %}}" for i in range(1800))
    ),
    "many nested names": (
        "".join(f"{{% if a{i} %}}{{% set b{i} = 1 %}}" for i in range(80))
        + "{{ x }}" * 3500
        + "{% endif %}" * 80
    ),
    "many macros": "".join(f"{{% macro f{i}(a) %}}{{% endmacro %}}" for i in range(2600)),
    "many macros with names": (
        "".join(f"{{% set a{i} = 1 %}}" for i in range(800))
        + "".join(f"{{% macro f{i}() %}}{{{{ a{i} }}}}{{% endmacro %}}" for i in range(1400))
    ),
    "many blocks": "".join(f"{{% block b{i} %}}{{% endblock %}}" for i in range(3000)),
    "many outputs": "{{a}}" * 4000,
    "many constants": "{{ [" + "1," * 8000 + "] }}",
    "many texts": "".join(f"{{{{ 'a{i}' }}}}" for i in range(4000)),
    "many filters": "{{a|e}}" * 2700,
    "many set blocks": "{% set x %}{% endset %}" * 2600,
    "many loops": "{% for a in b %}{% endfor %}" * 2000,
    "many calls": "{{ f(a=1, b=2) }}" * 1100,
    "many line statements": "\n" * 131000,
    "many brackets": "{{ " + "(" * 10000 + "1" + ")" * 10000 + " }}",
    "many comments": "{#" * 65000,
    "many open tags": "{%" * 65000,
    "many quotes": "{{ '" + "\\'" * 65000 + " }}",
    "many digits": "{{ " + "1_0" * 40000 + " }}",
    "many dots": "{{ a" + ".b" * 60000 + " }}",
    "many blanks before a tag": " " * 130000 + "{%",
    "many blanks in a tag": "{{" + " " * 130000,
    "many raw blocks": "{% raw %}" * 14000,
    "many dashes": "{{" + "-" * 130000,
    "deep ifs": "{% if a %}" * 90 + "{% endif %}" * 90,
    "deep loops": "{% for a in b %}" * 19 + "{% endfor %}" * 19,
    "deep loops of many turns": "{% for a in range(99) %}" * 15 + "{% endfor %}" * 15,
    "deep macros": ("".join(f"{{% macro f{i}() %}}" for i in range(18)) + "{% endmacro %}" * 18),
    "deep filters of a block": "{% filter e %}" * 90 + "a" + "{% endfilter %}" * 90,
    "many targets": (
        "{% for "
        + ",".join(f"a{i}" for i in range(4000))
        + " in [range(4000)] * 99999 %}{% endfor %}"
    ),
    "many parameters": (
        "{% macro f("
        + ",".join(f"a{i}" for i in range(4000))
        + ") %}{% endmacro %}{% for i in range(99999) %}{{ f() }}{% endfor %}"
    ),
    "many defaults": (
        "{% macro f("
        + ",".join(f"a{i}=1" for i in range(2000))
        + ") %}{% endmacro %}{% for i in range(99999) %}{{ f() }}{% endfor %}"
    ),
    "many parameters of a call block": (
        "{% macro f() %}{% for i in range(99999) %}{{ caller() }}{% endfor %}{% endmacro %}{% call("
        + ",".join(f"a{i}" for i in range(4000))
        + ") f() %}{% endcall %}"
    ),
    "long condition of a loop": (
        "{% for b in range(99999) if " + " or ".join(["b.a"] * 90) + " %}{% endfor %}"
    ),
    "list as the condition of a loop": (
        "{% for b in range(99999) if [" + ",".join(["b.a"] * 2500) + "] %}{% endfor %}"
    ),
    "long path of nothing": _again("'x.' * 100000", "[] | map(attribute=v) | list"),
    "long path of nothing sorted": _again("'x.' * 100000", "[] | sort(attribute=v)"),
    "long list of paths": _again("'x,' * 100000", "[] | sort(attribute=v)"),
    # Ways out.
    "class": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "self": "{{ self._TemplateReference__context }}",
    "format to class": "{{ '{0.__class__}'.format(messages) }}",
    "attr to class": "{{ '' | attr('__class__') }}",
    "map to class": "{{ [''] | map(attribute='__class__') | list }}",
    "attribute of an object": "{{ given.secret }}{{ given['secret'] }}{{ given | attr('secret') }}",
    "attribute of an object by a path": "{{ [given] | map(attribute='secret') | join }}",
    "attribute of an object by a format": "{{ '{0.secret}'.format(given) }}",
    "environment": "{{ self._environment }}",
    "context": "{{ _progress }}",
    "generator": "{{ ([1] | map('string')).gi_frame }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import '/etc/passwd' as p %}",
    "extends": "{% extends '/etc/passwd' %}",
    "lipsum": "{{ lipsum(n=10 ** 9) }}",
    "mutation": "{{ messages.append(1) }}",
}
"""Name -> template."""

TEXTS: Final = {
    "a long text": "'a' * 1000000",
    "words": "'ab ' * 100000",
    "lines": "'a\\n' * 100000",
    "text of many sources": "('a ' ~ messages[0].content) * 20000",
    "wide text": "'ß\U0001f600' * 100000",
    "marks": "'&%{\\t' * 20000",
    "a middling text": "'ab c\\n&' * 500",
}
_OPERATIONS_ONTEXTS: Final = (
    *("v | upper", "v | lower", "v | title", "v | capitalize", "v | trim", "v | trim('ab')"),
    *("v | list", "v | reverse", "v | first", "v | last", "v | length", "v | random"),
    *("v | join('-')", "v | replace('a', 'b')", "v | replace('', 'b')", "v | indent(1)"),
    *("v | center(100)", "v | wordwrap(9)", "v | urlize", "v | urlencode", "v | e"),
    *("v | forceescape", "v | striptags", "v | wordcount", "v | truncate(9)", "v | tojson"),
    *("v | pprint", "v | string", "v | safe", "v | int", "v | float", "v | format(1)"),
    *("v | map('upper') | list", "v | select('upper') | list", "v | batch(2) | list"),
    *("v | slice(9) | list", "v | sort | list", "v | unique | list", "v | groupby(0)"),
    *("v | sum(start='')", "v | min", "v | max", "v | attr(v)", "v | default('a')"),
    *("v.upper()", "v.lower()", "v.title()", "v.capitalize()", "v.casefold()", "v.swapcase()"),
    *("v.strip()", "v.strip('a')", "v.lstrip('b')", "v.rstrip('ab ')", "v.split()"),
    *("v.split('a')", "v.rsplit('a', 1)", "v.splitlines()", "v.partition('x')"),
    *("v.rpartition('x')", "v.find('x')", "v.rfind('x')", "v.count('a')", "v.replace('a', '')"),
    *("v.startswith(v)", "v.endswith(v)", "v.removeprefix(v)", "v.isalnum()", "v.isprintable()"),
    *("v.isidentifier()", "v.join([v])", "v.join('ab')", "v.center(9)", "v.ljust(9)"),
    *("v.zfill(9)", "v.expandtabs()", "v.encode()", "v.encode().decode()", "v.format(1)"),
    *("v.format_map({})", "v % 1", "v % ()", "v + 'a'", "v ~ 'a'", "v ~ v", "v * 2"),
    *("v[1:]", "v[::2]", "v[::-1]", "v[5]", "v[-1]", "v == v ~ ''", "v < v ~ ''", "'x' in v"),
    *("v ~ 'a' in v", "v is upper", "v is lower", "v is eq(v ~ '')", "v is in([v ~ ''])"),
    *("v in {v: 1}", "{v ~ '': 1}", "{}[v ~ '']", "[v ~ ''] == [v]", "(v ~ '',) in {}"),
    *(
        "dict.fromkeys(v)",
        "dict([v])",
        "namespace(v)",
        "cycler(v)",
        "joiner(v)",
        "{v ~ '': 1}.get(v)",
    ),
    *("strftime_now(v)", "range(v)", "messages[v ~ '']", "messages[0][v ~ '']", "n[v ~ '']"),
    *("v is filter", "v is test", "v is mapping", "v is iterable", "v is sequence", "not v"),
)
LISTS: Final = {
    "a list of numbers": "range(90000) | list",
    "a list of texts": "('ab ' * 20000).split()",
    "a list of long texts": "['x' * 99999] * 9000",
    "a list of one": "[1] * 200000",
    "a list of lists": "[[1] * 99] * 999",
    "a range": "range(99999)",
    "a mapping": "dict.fromkeys(range(50000))",
    "a mapping of texts": "dict.fromkeys(('a' * 99 ~ 'b ' * 20000).split(), 'x' * 999)",
    "a list of mappings": "[{'a': 1, 'b': {'c': 2}}] * 20000",
    "messages": "messages * 20000",
    "a tuple": "(1,) * 99999",
    "views": "dict.fromkeys(range(50000), 'a').items()",
}
_OPERATIONS_ONLISTS: Final = (
    *("v | list", "v | reverse | list", "v | first", "v | last", "v | length", "v | random"),
    *("v | join", "v | join(',', attribute='a.b.c.d')", "v | map('string') | list"),
    *("v | map(attribute='a.b.c') | list", "v | map('default', 1) | sum", "v | select | list"),
    *("v | selectattr('a') | list", "v | selectattr('a', 'eq', 1) | list", "v | reject | list"),
    *("v | select('in', [1, 2]) | list", "v | map('int') | list", "v | map('tojson') | list"),
    *("v | sort | first", "v | sort(attribute='a') | first", "v | sort(attribute='a,b,a.c,b.c')"),
    *("v | sort(case_sensitive=true)", "v | unique | list", "v | unique(attribute='a') | list"),
    *("v | groupby('a')", "v | groupby(0)", "v | batch(3) | list", "v | slice(999) | list"),
    *("v | sum", "v | sum(attribute='a')", "v | min", "v | max", "v | max(attribute='a')"),
    *("v | tojson", "v | pprint", "v | string", "v | e", "v | urlencode", "v | xmlattr"),
    *("v | items | list", "v | dictsort", "v | dictsort(by='value')", "v | upper", "v | length"),
    *("v | wordcount", "v | striptags", "v | default(1)", "v | attr('a')", "v | int", "v | float"),
    *("v | center(9)", "v | trim", "v | title", "v | truncate(9)", "v | filesizeformat", "v | abs"),
    *("v + v", "v * 2", "v[1:]", "v[::-1]", "v[7]", "v == v[:]", "v < v[:]", "v != [v]"),
    *("v[:] in [v]", "'a' in v", "1.5 in v", "v is eq(v[:])", "v is in(v)", "v[:] is sameas(v)"),
    *("v.count('a')", "v.index('a')", "v.index(-1)", "v.copy()", "v.items() | list", "v.keys()"),
    *("v.values() | list", "v.get('a')", "v.keys() == v.keys()", "v.items() == v.items()"),
    *("[v] == [v[:]]", "(v, v) in {}", "dict(v)", "dict.fromkeys(v)", "namespace(v)", "cycler(*v)"),
    *("range(*v)", "'%s' % v", "'%s' % (v,)", "'{}'.format(v)", "'{0[5]}'.format(v)", "''.join(v)"),
    *("v ~ ''", "messages[v]", "{}[v]", "{}.get(v)", "raise_exception(v)", "not v", "-v", "v ** 2"),
    *("v | map('upper') | select | map('length') | sum", "v is iterable", "v is sequence"),
    *("v | map('replace', 'x', 'yz') | list", "v | map('list') | list", "v | format(*v)"),
)


def _table() -> dict[str, Attack]:
    table = {name: Attack(source) for name, source in BY_HAND.items()}
    for values, operations in ((TEXTS, _OPERATIONS_ONTEXTS), (LISTS, _OPERATIONS_ONLISTS)):
        for name, value in values.items():
            for operation in operations:
                source = "{% set n = namespace() %}" + _again(value, operation)
                table[f"{operation} of {name}"] = Attack(source)
    wide = {"tools": [{"name": "a" * 999, "items": list(range(99))}] * 9}
    for operation in ("tools | tojson", "tools ~ ''", "tools == [tools]", "tools | pprint"):
        table[f"given {operation}"] = Attack(_again("1", operation), wide)
    return table


ATTACKS: Final = _table()
"""Name -> template and variables."""

"""Random chat templates of everything that a template can write."""

import random
from typing import Final

from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.hostile.template_attacks import LISTS, TEXTS

_NAMES: Final = ("given", "v", "w", "n.x", "n.y", "i", "messages", "messages[0]")
_FEW: Final = ("0", "1", "-1", "2.5", "true", "none", "'a'", "''", "'{}'", "'%s'", "999", "10 ** 9")


class Grammar:
    """Random templates of everything that a template can write.

    Args:
        seed: The same seed makes the same templates.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        environment = ImmutableSandboxedEnvironment()
        self._filters = sorted({*environment.filters, "tojson"})
        self._tests = sorted(name for name in environment.tests if name.isalpha())
        self._values = [*TEXTS.values(), *LISTS.values(), "2 ** 2000", "[]", "{}", "()"]
        kinds = (str, list, dict, bytes, int, range)
        names = {name for kind in kinds for name in dir(kind) if not name.startswith("_")}
        self._methods = sorted({*names, "secret", "__class__"})

    def template(self) -> str:
        """The next template."""
        pick = self._random
        body = "".join(self._statement(0) for _ in range(pick.randint(1, 4)))
        turns = pick.choice((99, 9999, 99999))
        return (
            f"{{% set v = {pick.choice(self._values)} %}}"
            f"{{% set w = {pick.choice(self._values)} %}}"
            f"{{% set n = namespace(x={pick.choice(self._values)}, y=1) %}}"
            f"{{% macro f(a=1, b=2) %}}{{{{ a }}}}{{% endmacro %}}"
            f"{{% for i in range({turns}) %}}{body}{{% endfor %}}"
            f"{{% set z = {self._expression(0)} %}}"
        )

    def _statement(self, depth: int) -> str:
        pick = self._random
        value = self._expression(0)
        kind = pick.randrange(8 if depth < 2 else 5)
        if kind == 0:
            return f"{{{{ {value} }}}}"
        if kind in (1, 2):
            return f"{{% set n.{pick.choice('xy')} = {value} %}}"
        if kind in (3, 4):
            return f"{{% set z = {value} %}}"
        inner = self._statement(depth + 1)
        if kind == 5:
            return f"{{% for j in {value} %}}{inner}{{% endfor %}}"
        if kind == 6:
            return f"{{% set z %}}{inner}{{% endset %}}"
        return f"{{% if {value} %}}{inner}{{% endif %}}"

    def _expression(self, depth: int) -> str:
        pick = self._random
        if depth > 3 or pick.random() < 0.2:
            return pick.choice(_NAMES if pick.random() < 0.7 else _FEW)
        parts = [self._expression(depth + 1) for _ in range(2)]
        kind = pick.randrange(12)
        if kind < 4:
            arguments = ", ".join(parts[1:] if pick.random() < 0.4 else [])
            return f"({parts[0]} | {pick.choice(self._filters)}({arguments}))"
        if kind < 6:
            arguments = ", ".join(parts[1:] if pick.random() < 0.5 else [])
            return f"({parts[0]}).{pick.choice(self._methods)}({arguments})"
        if kind == 6:
            name = pick.choice(self._filters)
            return f"({parts[0]} | map('{name}', {parts[1]}) | list)"
        if kind == 7:
            operator = pick.choice(("+", "~", "*", "%", "**", "//", "-", "==", "<", "in"))
            return f"({parts[0]} {operator} {parts[1]})"
        if kind == 8:
            return f"({parts[0]} is {pick.choice(self._tests)}({parts[1]}))"
        if kind == 9:
            return pick.choice(("[{}, {}]", "({}, {})", "{{'a': {}, 'b': {}}}")).format(*parts)
        if kind == 10:
            return pick.choice(("({})[{}]", "({})[:{}]", "({})[::{}]")).format(*parts)
        function = pick.choice(
            ("f", "dict", "range", "cycler", "namespace", "dict.fromkeys", "strftime_now")
        )
        return f"{function}({parts[0]})"

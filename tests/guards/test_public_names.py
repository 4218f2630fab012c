"""No public name goes, comes or changes by accident."""

import ast
from pathlib import Path

import megatron_ext
from tests.guards.public_names import (
    current_names,
    differences,
    imports_of_documentation,
    imports_of_examples,
    is_importable,
    recorded_names,
)

HOW_TO_RECORD = "if it is meant: python -m tests.guards.record names, and a line in CHANGELOG.md"


def test_public_names_are_those_recorded():
    recorded = recorded_names()
    changes = differences(recorded, current_names(recorded))
    assert not changes, "\n".join([*changes, HOW_TO_RECORD])


def test_what_the_documentation_and_the_examples_import_is_there():
    shown = imports_of_documentation() | imports_of_examples()
    assert "megatron_ext:TokenAligner" in shown
    assert [name for name in sorted(shown) if not is_importable(name)] == []


def test_differences_name_what_went_came_and_changed():
    recorded = {
        "package": {"align": "text", "cut": "text"},
        "verbs": {"run": ["--fast"]},
        "configuration": {"lr": 1.0},
    }
    current = {
        "package": {"align": "text, *, mask="},
        "verbs": {"run": ["--slow"]},
        "configuration": {"lr": 1.0},
    }
    assert differences(recorded, current) == [
        'changed: /package/align "text" -> "text, *, mask="',
        'gone: /package/cut "text"',
        "gone: /verbs/run/--fast ",
        "new: /verbs/run/--slow ",
    ]


def test_type_checkers_find_each_public_name_in_the_module_that_it_is_loaded_from():
    tree = ast.parse(Path(megatron_ext.__file__).read_text(encoding="utf-8"))
    (seen,) = (node for node in tree.body if isinstance(node, ast.If))
    found = {each.asname: node.module for node in seen.body for each in node.names}
    assert found == megatron_ext._HOME_OF

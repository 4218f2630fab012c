"""The names that the documentation and the examples import from the package."""

import ast
import re
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]

_PYTHON_BLOCK = re.compile(r"^```py(?:thon)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
"""``py``: a program that the tests of the documentation do not run."""


def imports_of_documentation():
    """``module:name`` of every import in a Python block of README.md, docs and package pages."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    pages += (ROOT / "megatron_ext").glob("**/README.md")
    blocks = (
        block for page in pages for block in _PYTHON_BLOCK.findall(page.read_text(encoding="utf-8"))
    )
    return {name for block in blocks for name in _imports(block)}


def imports_of_examples():
    """``module:name`` of every import in a program under ``examples/``."""
    programs = (ROOT / "examples").glob("**/*.py")
    return {name for path in programs for name in _imports(path.read_text(encoding="utf-8"))}


def is_importable(address):
    """Whether ``module``, ``module:name`` or ``module:name.attribute`` is there."""
    module, _, path = address.partition(":")
    try:
        found = import_module(module)
        for name in path.split(".") if path else ():
            found = _member(found, name)
    except (ImportError, AttributeError):
        return False
    return True


def _member(owner, name):
    # A field without a default is no attribute of its class.
    if name in getattr(owner, "__dataclass_fields__", ()):
        return None
    try:
        return getattr(owner, name)
    except AttributeError:
        # ``from package import module``
        return import_module(f"{getattr(owner, '__name__', '')}.{name}")


def _imports(program):
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
            yield from (name for name in modules if name.split(".")[0] == "megatron_ext")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_ext"):
            yield from (f"{node.module}:{alias.name}" for alias in node.names)

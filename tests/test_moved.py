"""Programs written before a module moved still find it, and are told where it is."""

import importlib.util
import re
import sys
from importlib import import_module

import pytest

from megatron_ext.imports import MOVED
from tests.fork_server import run_python


@pytest.mark.parametrize("name", MOVED)
def test_a_moved_module_is_the_one_of_now(name):
    sys.modules.pop(name, None)
    with pytest.warns(DeprecationWarning, match=re.escape(f"{name} is {MOVED[name]} now")):
        module = import_module(name)
    assert module is import_module(MOVED[name])
    assert module.__name__ == MOVED[name]
    assert module.__spec__.name == MOVED[name]
    assert importlib.util.find_spec(MOVED[name]) is not None


def test_a_module_of_a_moved_package_is_loaded_once():
    program = (
        "import sys\n"
        "from megatron_ext.training.megatron_lm.script import install\n"
        "from megatron_ext.megatron_lm import script\n"
        "assert script.install is install\n"
        "assert sys.modules['megatron_ext.training.megatron_lm.script'] is script\n"
    )
    run_python(program)


def test_a_name_that_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=re.escape("megatron_ext.training.megatron")):
        import_module("megatron_ext.training.megatron")

"""Triton's interpreter without work that it repeats: kernels are most of what some tests take.

To be imported once TRITON_INTERPRET is set: Triton reads it as it is imported.
"""

import dataclasses
import functools
import inspect
import os

from triton.language import core
from triton.runtime import interpreter


def interpret_quickly():
    """Patch Triton's language once a launch, and look for NumPy's types once.

    A launch patches the modules that it finds among the names of its kernel and restores them. The
    interpreter patches them again for every call of a device function; here only if its file names
    others, as Triton's own do. It also takes every sum, difference and product of integers in 64
    bits, to see whether it overflows: a fifth of the time, for where everything is run.
    """
    call = interpreter.InterpretedFunction.__call__

    @functools.wraps(call)
    def call_once_patched(self, *arguments, **keywords):
        if any(core.is_builtin(language.load) for language in _languages(self)):
            return call(self, *arguments, **keywords)
        return self.rewrite()(*arguments, **keywords)

    interpreter.InterpretedFunction.__call__ = call_once_patched
    interpreter._get_np_dtype = _found_once(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(
        builder.options, sanitize_overflow=bool(os.environ.get("MEGATRON_EXT_ALL_TEXT"))
    )


@functools.cache
def _languages(function):
    """The modules that the interpreter would patch for a device function."""
    candidates = (interpreter.tl, core)
    names = function.fn.__globals__.values()
    return [value for value in names if inspect.ismodule(value) and value in candidates]


def _found_once(type_of):
    """A function of a Triton type that depends on its elements' alone, whose names tell."""
    found = {}

    def wrapped(its_type):
        name = its_type.scalar.name
        if name not in found:
            found[name] = type_of(its_type)
        return found[name]

    return wrapped

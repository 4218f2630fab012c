"""Triton's interpreter without work that it repeats: kernels are most of what some tests take.

To be imported once TRITON_INTERPRET is set: Triton reads it as it is imported.
"""

import dataclasses
import functools
import inspect
import os

from triton.language import core, semantic
from triton.runtime import interpreter


def interpret_quickly():
    """Patch Triton's language once a launch, and look for NumPy's types once.

    A launch patches the modules that it finds among the names of its kernel and restores them. The
    interpreter patches them again for every call of a device function; here only if its file names
    others, as Triton's own do. It makes the shape of each tensor anew. It also takes every sum,
    difference and product of integers in 64 bits, to see whether it overflows: a fifth of the time,
    for where everything is run.
    """
    call = interpreter.InterpretedFunction.__call__

    @functools.wraps(call)
    def call_once_patched(self, *arguments, **keywords):
        if any(core.is_builtin(language.load) for language in _languages(self)):
            return call(self, *arguments, **keywords)
        return self.rewrite()(*arguments, **keywords)

    interpreter.InterpretedFunction.__call__ = call_once_patched
    interpreter._get_np_dtype = _found_once(interpreter._get_np_dtype)
    _make_shapes_once()
    _take_integers_for_masks()
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(
        builder.options, sanitize_overflow=bool(os.environ.get("MEGATRON_EXT_ALL_TEXT"))
    )


def _make_shapes_once():
    """Let tensors and types of blocks share their shape, by which those of one shape are known."""
    of_blocks, of_tensors = {}, {}
    block_init, tensor_init = core.block_type.__init__, core.tensor.__init__
    broadcast = semantic.TritonSemantic.broadcast_impl_value

    @functools.wraps(block_init)
    def init_block(self, element_ty, shape):
        sizes = tuple(core._unwrap_if_constexpr(size) for size in shape)
        key = sizes, element_ty.name
        if key not in of_blocks:
            block_init(self, element_ty, shape)
            # One for all types of elements.
            self.shape = of_blocks.setdefault(sizes, self.shape)
            of_blocks[key] = {name: getattr(self, name) for name in ("shape", "numel", "name")}
        else:
            vars(self).update(of_blocks[key], element_ty=element_ty)

    @functools.wraps(tensor_init)
    def init_tensor(self, handle, type):
        key = tuple(type.shape) if type.is_block() else ()
        if key not in of_tensors:
            tensor_init(self, handle, type)
            of_tensors[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[key]

    @functools.wraps(broadcast)
    def broadcast_others(self, lhs, rhs):
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    core.block_type.__init__, core.tensor.__init__ = init_block, init_tensor
    semantic.TritonSemantic.broadcast_impl_value = broadcast_others


def _take_integers_for_masks():
    """Let masks of loads and stores be integers, as "and" of a block and a scalar is interpreted.

    From 3.9 on that is an error.
    """
    builder = type(interpreter.interpreter_builder)
    for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
        setattr(builder, name, _with_boolean(getattr(builder, name), place))


def _with_boolean(access, place):
    """``access`` with the argument at ``place``, a mask, as booleans."""

    @functools.wraps(access)
    def wrapped(self, *arguments):
        mask = arguments[place]
        if mask.data.dtype != bool:
            mask.data = mask.data.astype(bool)
        return access(self, *arguments)

    return wrapped


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

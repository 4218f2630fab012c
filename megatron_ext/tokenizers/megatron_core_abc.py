"""Our tokenizers in the eyes of megatron-core's isinstance checks."""

from __future__ import annotations

import sys
from abc import ABCMeta
from importlib import import_module

from megatron_ext.tokenizers.base import MegatronTokenizerBase

_MODULE = "megatron.core.tokenizers.base_tokenizer"


def register_with_megatron_core() -> bool:
    """Make our tokenizers virtual subclasses of megatron-core's ``MegatronTokenizerBase``.

    megatron-core is heavy, so nothing is registered unless the process has imported it already.
    Its base is an ``ABC``, whose ``register`` asks for no methods: what their abstract ``vocab``
    and ``apply_chat_template`` mean is up to our classes. Calling it again changes nothing.

    Returns:
        Whether megatron-core now counts our tokenizers as its own; False without megatron-core, or
        with a release that has no such class.
    """
    if "megatron.core" not in sys.modules:
        return False
    try:
        theirs = getattr(import_module(_MODULE), "MegatronTokenizerBase", None)
    except ImportError:
        return False
    if not isinstance(theirs, ABCMeta):
        return False
    ours: type = MegatronTokenizerBase
    theirs.register(ours)
    return True

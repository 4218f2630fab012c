"""What the fork server imports, so that its children begin with little to do.

The garbage collector looks at nothing of it: importing takes a third less time so, and each child
would copy the pages of all objects.
"""

import gc
import os
import sys
from importlib import import_module

from tests.absent_devices import seed_no_absent_device
from tests.huge_pages import collapse_memory

_MODULES = (
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron_ext.cli.main",
    "megatron_ext.ops.projected_kl.compiled_loops",
    "megatron_ext.ops.projected_kl.kernel_evaluation",
    "megatron_ext.ops.selection_loops",
    "megatron_ext.tokenizers.engine",
    "megatron_ext.tokenizers.libraries.sentencepiece",
    "megatron_ext.tokenizers.libraries.tiktoken",
    "megatron_ext.training.distill",
    "numba.core.entrypoints",
    "numpy.ma",
    "pytest",
    "requests",
    "safetensors.numpy",
    "safetensors.torch",
    "sentencepiece",
    "tests.training.rank_functions",
    "tiktoken.load",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)

gc.disable()
for name in _MODULES:
    import_module(name)
if os.environ.get("TRITON_INTERPRET") == "1":
    import_module("tests.triton_interpreter").interpret_quickly()
# Else each process that runs a compiled loop looks for extensions of numba, and imports them.
sys.modules["numba.core.entrypoints"].init_all()
# Else each process with a command line reads the sources of all flags for their help.
import_module("megatron_ext.training.configuration.arguments").config_flags()
seed_no_absent_device()
gc.freeze()
gc.set_threshold(100_000, 20, 20)
gc.enable()
collapse_memory()

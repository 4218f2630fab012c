"""What the fork server imports last, so that its children begin with little to do.

Nothing that has been imported is ever looked at again by the garbage collector: each child would
copy the pages of all objects for it.
"""

import gc
from importlib import import_module

_LATE = (
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron_ext.cli.main",
    "megatron_ext.tokenizers.engine",
    "megatron_ext.tokenizers.libraries.sentencepiece",
    "megatron_ext.tokenizers.libraries.tiktoken",
    "pytest",
    "safetensors.numpy",
    "safetensors.torch",
    "tests.training.rank_functions",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)
"""What is imported where it is used."""

for name in _LATE:
    import_module(name)
gc.collect()
gc.freeze()

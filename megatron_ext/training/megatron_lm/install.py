"""What of Megatron-LM is replaced, in the layouts of its releases."""

from __future__ import annotations

import sys
from typing import Final

from megatron_ext.training.megatron_lm.checkpoint_arguments import with_tokenizer_of_checkpoint
from megatron_ext.training.megatron_lm.checkpoint_assets import with_whole_tokenizers
from megatron_ext.training.megatron_lm.megatron_builder import with_our_tokenizers
from megatron_ext.training.megatron_lm.megatron_parser import with_our_flags
from megatron_ext.training.megatron_lm.patched_modules import Patch, PatchedModules

PATCHES: Final = (
    Patch("megatron.training.arguments", "_add_tokenizer_args", with_our_flags),
    # Up to 0.16.
    Patch("megatron.training.tokenizer.tokenizer", "build_tokenizer", with_our_tokenizers),
    Patch(
        "megatron.core.tokenizers.text.utils.build_tokenizer",
        "build_tokenizer",
        with_our_tokenizers,
    ),
    # From 0.17.
    Patch("megatron.core.tokenizers.utils.build_tokenizer", "build_tokenizer", with_our_tokenizers),
    Patch(
        "megatron.training.checkpointing",
        "load_args_from_checkpoint",
        with_tokenizer_of_checkpoint,
    ),
    # After 0.19.
    Patch(
        "megatron.training.checkpointing",
        "save_tokenizer_assets",
        with_whole_tokenizers,
        optional=True,
    ),
)


def install() -> None:
    """Put our flags and tokenizers under Megatron-LM, in this process and those it forks.

    It may be called before or after Megatron-LM is imported, and more than once. Nothing is
    imported by it, and no file is touched.
    """
    if any(isinstance(finder, PatchedModules) for finder in sys.meta_path):
        return
    modules = PatchedModules(PATCHES)
    sys.meta_path.insert(0, modules)
    modules.patch_imported()

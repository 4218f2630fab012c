"""Our flags and tokenizers under Megatron-LM's own scripts, none of which is edited.

``megatron-ext run pretrain_gpt.py ...`` runs a script of a checkout. A script of one's own takes
two lines before its first import from Megatron-LM, or after it::

    from megatron_ext.megatron_lm import install

    install()
"""

from megatron_ext.megatron_lm.script import install, run_script

__all__ = ["install", "run_script"]

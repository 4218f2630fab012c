"""Code that a model wrote, run in a process of its own under limits."""

from megatron_ext.evaluation.code_execution.sandbox import Limits, Outcome, run_program

__all__ = ["Limits", "Outcome", "run_program"]

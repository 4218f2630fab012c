"""Tasks by name, in a file each."""

from collections.abc import Callable
from functools import partial

from megatron_ext.evaluation.tasks.code import HUMANEVAL_STOPS, MBPP_STOPS, CodeTask
from megatron_ext.evaluation.tasks.gsm8k import Gsm8k
from megatron_ext.evaluation.tasks.mmlu import Mmlu
from megatron_ext.evaluation.tasks.task import BitsPerByte, Task, TaskOptions, TaskResult
from megatron_ext.registry import Registry

__all__ = ["TASKS", "Task", "TaskOptions", "TaskResult"]

TASKS: Registry[Callable[[TaskOptions], Task]] = Registry("task")

TASKS.register("bits_per_byte", BitsPerByte)
TASKS.register("mmlu", Mmlu)
TASKS.register("gsm8k", Gsm8k)
TASKS.register("humaneval_plus", partial(CodeTask, stops=HUMANEVAL_STOPS))
TASKS.register("mbpp_plus", partial(CodeTask, stops=MBPP_STOPS))

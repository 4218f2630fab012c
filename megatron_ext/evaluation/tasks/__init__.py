"""Tasks by name, in a file each."""

from megatron_ext.evaluation.tasks.registry import TASKS
from megatron_ext.evaluation.tasks.task import Task, TaskOptions, TaskResult

__all__ = ["TASKS", "Task", "TaskOptions", "TaskResult"]

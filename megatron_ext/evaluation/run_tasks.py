"""Tasks of a run, which measure its student between steps, and results as files and as a table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from megatron_ext.errors import ConfigError, DataError, counted
from megatron_ext.evaluation.tasks import TASKS, Task, TaskOptions
from megatron_ext.evaluation.tasks.task import TaskResult
from megatron_ext.files import write_text
from megatron_ext.training.configuration.teachers import EvaluationConfig, EvaluationTaskConfig

if TYPE_CHECKING:
    from megatron_ext.evaluation.megatron_language_model import MegatronLanguageModel
    from megatron_ext.training.distill import StudentToEvaluate

_RUN_CODE: Final = ("humaneval_plus", "mbpp_plus")


class RunTasks:
    """An ``Evaluator`` over the tasks of a run.

    Args:
        evaluation: Section with the tasks, whose files are read here, before a model is built.

    Raises:
        MegatronExtError: Files cannot be read, or a task is not allowed in a run.
    """

    def __init__(self, evaluation: EvaluationConfig) -> None:
        self._tasks = {name: _task(name, section) for name, section in evaluation.tasks.items()}
        self._micro_batch_size = evaluation.micro_batch_size
        self._has_warned = False

    def __call__(self, student: StudentToEvaluate) -> dict[str, float]:
        """Metrics of all tasks. Collectives: those of the tasks' calls of ``LanguageModel``."""
        from megatron_ext.training.inputs import write_warnings

        model = _language_model(student, self._micro_batch_size)
        metrics: dict[str, float] = {}
        with evaluating(student.chunk):
            for name, task in self._tasks.items():
                metrics |= main_metrics(name, task.run(model).metrics)
        cut, texts = model.cut_prompts()
        if cut and not self._has_warned:
            self._has_warned = True
            write_warnings([f"evaluation.tasks: {cut_warning(cut, texts)}"])
        return metrics


def cut_warning(cut: int, texts: int) -> str:
    """What is said of prompts that lost their beginnings."""
    return (
        f"{cut:,} of {texts:,} prompts are longer than the model reads, and lost their beginnings: "
        "raise the sequence length, or take fewer solved examples or new tokens"
    )


def main_metrics(name: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """``eval/NAME/METRIC`` without the parts of a metric, such as MMLU's accuracy by subject."""
    return {
        f"eval/{name}/{metric}": value
        for metric, value in metrics.items()
        if metric.rpartition("/")[0] not in metrics
    }


def _task(name: str, section: EvaluationTaskConfig) -> Task:
    kind, where = section.task or name, f"evaluation.tasks.{name}"
    if kind in _RUN_CODE:
        raise ConfigError(
            "a run does not execute code that its student writes",
            where=where,
            got=kind,
            fix="call megatron-ext evaluate on a checkpoint",
        )
    return TASKS[kind](
        TaskOptions(
            data=Path(section.data),
            num_fewshot=section.num_fewshot,
            few_shot_data=None if section.few_shot_data is None else Path(section.few_shot_data),
            limit=section.limit,
            max_new_tokens=section.max_new_tokens,
        )
    )


def _language_model(student: StudentToEvaluate, micro_batch_size: int) -> MegatronLanguageModel:
    # Imported late: megatron-core takes seconds to load, and wrong paths are reported before.
    from megatron_ext.evaluation.generation import Generator, TokenScorer
    from megatron_ext.evaluation.megatron_language_model import MegatronLanguageModel
    from megatron_ext.evaluation.token_mixture import TokenMixture

    shared: dict[str, Any] = {
        "models": TokenMixture(chunks=(student.chunk,)),
        "shard": student.shard,
        "groups": student.groups,
        "micro_batch_size": micro_batch_size,
        "max_length": student.max_length,
    }
    return MegatronLanguageModel(
        tokenizer=student.tokenizer,
        adds_bos=True,
        scorer=TokenScorer(**shared),
        generator=Generator(**shared),
        groups=student.groups,
        stops=student.stops,
    )


@contextmanager
def evaluating(chunk: Any) -> Iterator[None]:
    """Evaluation mode while entered; each forward pass reports progress to the watchdog."""
    from megatron_ext.training.watchdog import tick

    was_training = chunk.training
    hook = chunk.register_forward_pre_hook(lambda *_: tick())
    chunk.eval()
    try:
        yield
    finally:
        chunk.train(was_training)
        hook.remove()


def write_results(path: Path, result: TaskResult, about: Mapping[str, Any]) -> None:
    """Write metrics, counts and settings as JSON, whole or not at all.

    Args:
        about: Task, data, checkpoint and settings of the model.

    Raises:
        DataError: It cannot be written.
    """
    values = {
        **about,
        "count": result.count,
        "settings": dict(result.settings),
        "metrics": dict(result.metrics),
    }
    _write(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def write_samples(path: Path, result: TaskResult) -> None:
    """Write each item as a line of JSON, whole or not at all.

    Raises:
        DataError: It cannot be written.
    """
    lines = [json.dumps(dict(sample), ensure_ascii=False) for sample in result.samples]
    _write(path, "".join(f"{line}\n" for line in lines))


def results_table(task: str, result: TaskResult) -> str:
    """A row for each metric."""
    width = max(len(name) for name in (*result.metrics, task))
    lines = [f"{task:<{width}}  {counted(result.count, 'item')}"]
    lines += [f"{name:<{width}}  {value:.4f}" for name, value in result.metrics.items()]
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise DataError("the results cannot be written", where=path, got=error.strerror) from error

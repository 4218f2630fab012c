"""Tasks of lm-evaluation-harness, where the package ``lm_eval`` is installed.

Every rank runs the harness on all requests; the model divides them over replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from megatron_ext.errors import DataError
from megatron_ext.evaluation.language_model import (
    GenerationOptions,
    LanguageModel,
    continuation_request,
    rolling_requests,
)
from megatron_ext.evaluation.tasks.task import TaskOptions, TaskResult
from megatron_ext.imports import needed_packages

PREFIX: Final = "lm_eval:"
_NEW_TOKENS: Final = 256
"""Most new tokens of the harness where a task does not set a number."""


class LmEvalTask:
    """One task or group by its name in the harness.

    Args:
        name: Name without ``PREFIX``.
        options: Options, with a folder of the user's own task files or None as ``data``.

    Raises:
        MissingDependencyError: The package is not installed.
        DataError: It has no such task.
    """

    def __init__(self, name: str, options: TaskOptions) -> None:
        with needed_packages(f"the task {PREFIX}{name}"):
            import lm_eval
            from lm_eval.tasks import TaskManager
        self._name, self._options = name, options
        self._evaluate = lm_eval.simple_evaluate
        folder = None if options.data is None else str(options.data)
        self._tasks = TaskManager(include_path=folder)
        if name not in self._tasks.all_tasks:
            raise DataError("lm-evaluation-harness has no such task", got=name)

    def run(self, model: LanguageModel) -> TaskResult:
        """Run the harness on the model."""
        options = self._options
        found = self._evaluate(
            model=harness_model(model, options),
            tasks=[self._name],
            task_manager=self._tasks,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            bootstrap_iters=0,
        )
        rows: Mapping[str, Mapping[str, Any]] = found["results"]
        samples = [sample for of in found.get("samples", {}).values() for sample in of]
        return TaskResult(
            metrics={
                f"{task}/{name}": float(value)
                for task, row in rows.items()
                for name, value in row.items()
                if isinstance(value, (int, float)) and "stderr" not in name and name != "sample_len"
            },
            count=len(samples),
            settings={"num_fewshot": dict(found["n-shot"])},
            samples=[
                {"doc": sample["doc"], "responses": sample["filtered_resps"]} for sample in samples
            ],
        )


def harness_model(model: LanguageModel, options: TaskOptions) -> Any:
    """A model as an ``lm_eval.api.model.LM``."""
    from lm_eval.api.model import LM

    class _Model(LM):  # type: ignore[misc]
        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            pairs = [request.args for request in requests]
            asked = [continuation_request(pair[0], pair[1], model) for pair in pairs]
            return [(score.nats, score.is_greedy) for score in model.log_likelihoods(asked)]

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            windows = [list(rolling_requests(request.args[0], model)) for request in requests]
            scores = iter(model.log_likelihoods([one for of in windows for one in of]))
            return [sum(next(scores).nats for _ in of) for of in windows]

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            found: list[str] = [""] * len(requests)
            kinds: dict[GenerationOptions, list[int]] = {}
            for place, request in enumerate(requests):
                kinds.setdefault(_generation(request.args[1], options), []).append(place)
            for kind, places in kinds.items():
                texts = model.generate([requests[place].args[0] for place in places], kind)
                for place, text in zip(places, texts, strict=True):
                    found[place] = text
            return found

    return _Model()


def _generation(asked: Mapping[str, Any], options: TaskOptions) -> GenerationOptions:
    """The harness's generation settings as ours; those of the task take precedence."""
    until = asked.get("until") or ()
    length = asked.get("max_gen_toks", options.max_new_tokens or _NEW_TOKENS)
    samples = asked.get("do_sample", options.temperature > 0)
    return GenerationOptions(
        max_new_tokens=int(length),
        stop=(until,) if isinstance(until, str) else tuple(until),
        temperature=float(asked.get("temperature", options.temperature)) if samples else 0.0,
        top_p=float(asked.get("top_p", options.top_p)),
        seed=options.seed,
    )

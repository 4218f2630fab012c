"""The engine that a run has by itself: its student, in the layout that it trains in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_ext.engines.engine import Answers, AskedPrompt, Completion, Sampling
from megatron_ext.evaluation.generation import Generator
from megatron_ext.evaluation.run_tasks import evaluating
from megatron_ext.evaluation.token_mixture import TokenMixture
from megatron_ext.imports import needed_packages
from megatron_ext.training.configuration.rollouts import RolloutConfig
from megatron_ext.training.distill import EngineOf, StudentToEvaluate


class StudentEngine:
    """An ``Engine`` that samples with the weights of the moment, which it shares.

    A sample depends on the weights, the seed and the prompt's place; not on a layout, beyond the
    rounding of its logits.

    Args:
        student: The student.
        sampling: Settings of all completions.
        micro_batch_size: Completions that are sampled together.
    """

    shares_weights = True

    def __init__(
        self, student: StudentToEvaluate, sampling: Sampling, *, micro_batch_size: int
    ) -> None:
        self._chunk = student.chunk
        self._generator = Generator(
            models=TokenMixture(chunks=(student.chunk,)),
            shard=student.shard,
            groups=student.groups,
            micro_batch_size=micro_batch_size,
            max_length=student.max_length,
        )
        self._sampling = sampling

    def load(self, checkpoint: Path) -> None:
        """Nothing: the weights are shared."""

    def close(self) -> None:
        """Nothing: all that was begun has ended."""

    def complete(self, prompts: Sequence[AskedPrompt]) -> Answers:
        """``Engine.complete``. Collectives of the result: those of ``Generator.generate``."""
        return lambda: self._sampled(prompts)

    def _sampled(self, prompts: Sequence[AskedPrompt]) -> list[Completion]:
        stops = frozenset[int]().union(*(prompt.stop_ids for prompt in prompts))
        with evaluating(self._chunk):
            completions = self._generator.generate(
                [prompt.ids for prompt in prompts],
                self._sampling,
                places=[prompt.place for prompt in prompts],
                is_done=lambda new: not stops.isdisjoint(new),
            )
        return [
            _up_to_stop(completion, prompt.stop_ids)
            for completion, prompt in zip(completions, prompts, strict=True)
        ]


def engine_of(rollouts: RolloutConfig | None, *, seed: int, run_dir: Path) -> EngineOf | None:
    """What makes the engine of a run's rollouts; None where it has none."""
    if rollouts is None:
        return None
    sampling = Sampling(
        max_new_tokens=rollouts.max_new_tokens,
        temperature=rollouts.temperature,
        top_p=rollouts.top_p,
        seed=seed,
    )
    size, servers = rollouts.micro_batch_size, rollouts.engine
    if servers is None:
        return lambda student: StudentEngine(student, sampling, micro_batch_size=size)
    # Late: only runs with a server need requests.
    with needed_packages("data.rollouts.engine"):
        from megatron_ext.training.server_engine import ServerEngine

    return lambda student: ServerEngine.connected(
        servers,
        sampling,
        groups=student.groups,
        vocab_size=student.tokenizer.vocab_size,
        length=student.max_length,
        run_dir=run_dir,
    )


def _up_to_stop(completion: Completion, stops: frozenset[int]) -> Completion:
    ids = completion.ids
    count = next((n for n, token in enumerate(ids, 1) if token in stops), len(ids))
    return Completion(ids[:count], completion.log_probs[:count], completion.entropies[:count])

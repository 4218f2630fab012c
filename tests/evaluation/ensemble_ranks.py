"""What spawned ranks run: several models that predict together."""

from dataclasses import replace

from megatron.core import parallel_state

from megatron_ext.evaluation.ensemble import load_ensemble
from megatron_ext.evaluation.language_model import (
    EnsembleOptions,
    GenerationOptions,
    continuation_request,
    prompt_ids,
)
from megatron_ext.evaluation.megatron_language_model import ModelOptions
from tests.evaluation.tiny_language_model import PAIRS, PROMPTS

GREEDY = GenerationOptions(max_new_tokens=2)
DRAWN = replace(GREEDY, temperature=0.8, top_p=0.9, seed=3)
EXACT = {"prune": 0.0, "beam": 1 << 20}
WEIGHTS = (0.3, 0.7)


def load(models, parallel, **ensemble):
    parallel_state.destroy_model_parallel()
    return load_ensemble(models, ModelOptions(**parallel), EnsembleOptions(**ensemble))


def ask_common(rank, models, parallel, means):
    """Of each kind of mean; draws of the last."""
    found = {}
    for mean in means:
        model = load(models, parallel, weight=WEIGHTS, mean=mean)
        found[mean] = {
            "requests": (requests := [continuation_request(*pair, model) for pair in PAIRS]),
            "scores": model.log_likelihoods(requests),
            "greedy": _ids(
                model.generator.generate(
                    [prompt_ids(prompt, model) for prompt in PROMPTS[:3]],
                    GREEDY,
                    places=range(3),
                    is_done=lambda new: False,
                )
            ),
        }
    found["drawn"] = model.generate(PROMPTS[:2], DRAWN)
    return found


def ask_first(rank, models, parallel, context, continuations):
    """Of the first model alone without pruning."""
    alone = load(models[:1], parallel, mode="byte", **EXACT)
    requests = [continuation_request(context, text, alone) for text in continuations]
    return {"scores": alone.log_likelihoods(requests), "lost": alone.lost}


def ask_bytes(rank, models, parallel, context, continuations):
    """Of all together."""
    together = load(models, parallel, mode="byte", weight=WEIGHTS, beam=2)
    requests = [continuation_request(context, text, together) for text in continuations]
    return {
        "scores": together.log_likelihoods(requests),
        # A dozen bytes before the number of tokens is first looked at, each a forward step or two.
        "greedy": together.generate(["the"], GREEDY),
        "drawn": together.generate([""], DRAWN),
    }


def _ids(completions):
    return [completion.ids for completion in completions]

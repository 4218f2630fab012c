"""What spawned ranks run: everything that is asked of a model, under several layouts."""

import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.cli.main import main
from megatron_ext.distributed import process_groups
from megatron_ext.evaluation import generation
from megatron_ext.evaluation.language_model import (
    GenerationOptions,
    TokenRequest,
    continuation_request,
    prompt_ids,
    rolling_requests,
)
from megatron_ext.evaluation.megatron_language_model import ModelOptions, load_language_model
from megatron_ext.evaluation.token_mixture import NextTokens
from tests.evaluation.tiny_language_model import PAIRS, PROMPTS

NEW_TOKENS = 5
GREEDY = GenerationOptions(max_new_tokens=NEW_TOKENS)


def ask(rank, folder, layouts):
    """Answers under each layout."""
    found = {}
    for name, options in layouts.items():
        parallel_state.destroy_model_parallel()
        model = load_language_model(folder, ModelOptions(**options))
        found[name] = _answers(model)
        if name == "alone":
            found[name] |= _answers_alone(model)
    return found


def _answers(model):
    requests = [continuation_request(*pair, model) for pair in PAIRS]
    text = " ".join(PROMPTS) * 3
    rolling = list(rolling_requests(text, model))
    return {
        "scores": model.log_likelihoods(requests),
        "rolling": model.log_likelihoods(rolling),
        "requests": requests,
        "rolling_requests": rolling,
        "stopped": model.generate(PROMPTS, _with_stop("e")),
        "sampled": model.generate(PROMPTS, _with_seed(3)),
        "once": model.once(lambda: "said"),
    }


def _answers_alone(model):
    ids = [prompt_ids(prompt, model) for prompt in PROMPTS]
    new = model.generator.generate(ids, GREEDY, places=range(len(ids)), is_done=lambda new: False)
    stopping = replace(model, stops=frozenset({new[0].ids[2]}))
    return {
        "greedy": model.generate(PROMPTS, GREEDY),
        "others": model.generate(PROMPTS, _with_seed(4)),
        "greedy_ids": _ids(new),
        "ended": stopping.generate(PROMPTS[:1], GREEDY),
        "stops": model.stops,
        "slow_ids": _without_cache(_by_large_batches(model), ids[0]),
    }


def _with_seed(seed):
    return GenerationOptions(max_new_tokens=NEW_TOKENS, temperature=0.7, top_p=0.9, seed=seed)


def _with_stop(stop):
    return GenerationOptions(max_new_tokens=NEW_TOKENS, stop=(stop,))


def _by_large_batches(model):
    return replace(model, scorer=replace(model.scorer, micro_batch_size=64))


def _without_cache(model, prompt):
    """Two tokens, each from all before it: the one that scores best, of all that there are."""
    new = []
    for _ in range(2):
        tokens = range(model.tokenizer.vocab_size)
        scores = model.log_likelihoods([TokenRequest(prompt + new, [token]) for token in tokens])
        (best,) = [token for token, score in enumerate(scores) if score.is_greedy]
        assert torch.tensor([score.nats for score in scores]).argmax() == best
        new.append(best)
    return new


def evaluate(rank, arguments, verb="evaluate"):
    """Run the verb as a program of one process; what it writes on standard error."""
    generation.SECONDS_UNTIL_PROGRESS = 0.0
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]
    written = io.StringIO()
    with redirect_stderr(written):
        main([verb, *arguments])
    # What the caller takes leave of.
    process_groups.join(timedelta(minutes=1))
    return written.getvalue()


def chat(rank, folder, messages):
    """What ``generate --chat`` prints for lines of standard input."""
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]
    sys.stdin, printed = io.StringIO("".join(f"{line}\n" for line in messages)), io.StringIO()
    with redirect_stdout(printed):
        main(["generate", "--model", str(folder), "--chat", "--max-new-tokens", "4"])
    process_groups.join(timedelta(minutes=1))
    return printed.getvalue()


def ask_families(rank, folders):
    """First choices of models of other families, and what they are asked as a chat."""
    found = {}
    for name, folder in folders.items():
        parallel_state.destroy_model_parallel()
        model = load_language_model(folder, ModelOptions(adds_bos=False, micro_batch_size=3))
        ids = [prompt_ids(prompt, model) for prompt in PROMPTS]
        chat = replace(model, applies_chat_template=True)
        found[name] = {
            "greedy_ids": _ids(
                model.generator.generate(
                    ids, GREEDY, places=range(len(ids)), is_done=lambda new: False
                )
            ),
            "next": _next_tokens(model),
            "chat_prompt": prompt_ids(PROMPTS[0], chat),
            "chat_request": continuation_request(PROMPTS[0], " there", chat),
            "chat": chat.generate(PROMPTS[:1], GREEDY),
            "chat_score": chat.log_likelihoods([continuation_request(PROMPTS[0], " there", chat)]),
        }
    return found


SHARED_BEGINNINGS = [
    [1, 5, 9, 40, 41],
    [1, 5, 9, 40, 41, 42, 43],
    [1, 5, 9, 44],
    [1, 5, 9, 44],
    [1, *range(5, 30)],
]


def _next_tokens(model):
    """Probabilities behind texts that are read one after the other, by bytes that models share."""
    generator = model.generator
    read = NextTokens(
        generator.models.chunks[0], generator.shard, generator.groups, max_length=model.max_length
    )
    return [read.after(ids) for ids in SHARED_BEGINNINGS]


def _ids(completions):
    return [completion.ids for completion in completions]

"""Several models predict what the mean of transformers' models does, by tokens and by bytes."""

import json
import math
import os

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_ext.errors import ConfigError
from megatron_ext.evaluation.language_model import EnsembleOptions
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.tokenizers.token_bytes import TokenBytes
from tests.evaluation.ensemble_ranks import WEIGHTS, ask_bytes, ask_common, ask_first
from tests.evaluation.evaluation_ranks import evaluate
from tests.evaluation.tiny_language_model import save_tiny_model
from tests.process_group import run_ranks

TP2 = {"tensor_model_parallel_size": 2, "adds_bos": False}
PP2 = {"pipeline_model_parallel_size": 2, "adds_bos": False}
ALONE = {"adds_bos": False}
SHARED_BY = {"tp2": TP2}
if os.environ.get("MEGATRON_EXT_ALL_TEXT"):
    SHARED_BY["pp2"] = PP2
CONTEXT = "the "
CONTINUATIONS = ["th", "o"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models of one vocabulary, and one of another."""
    root = tmp_path_factory.mktemp("ensemble")
    first, second, other = (root / name for name in ("first", "second", "other"))
    save_tiny_model(first)
    save_tiny_model(second, seed=6)
    save_tiny_model(other, seed=7, text="a theory is another thing of theirs")
    return first, second, other


@pytest.fixture(scope="module")
def common(folders):
    return {
        "alone": run_ranks(1, ask_common, folders[:2], ALONE, ["logits", "probs"]),
        "tp2": run_ranks(2, ask_common, folders[:2], TP2, ["probs"]),
    }


@pytest.fixture(scope="module")
def models(folders):
    return [AutoModelForCausalLM.from_pretrained(it, dtype=torch.float32).eval() for it in folders]


def mixed(models, ids, mean):
    """[T, V] log-probabilities of two models' mean behind each token of ``ids``."""
    with torch.no_grad():
        logits = [model(torch.tensor([ids])).logits[0].double() for model in models[:2]]
    if mean == "logits":
        return sum(w * each for w, each in zip(WEIGHTS, logits, strict=True)).log_softmax(-1)
    return sum(w * each.softmax(-1) for w, each in zip(WEIGHTS, logits, strict=True)).log()


@pytest.mark.parametrize("mean", ["probs", "logits"])
def test_scores_and_first_choices_are_those_of_the_mean(common, models, mean):
    (found,) = common["alone"]
    for request, score in zip(found[mean]["requests"], found[mean]["scores"], strict=True):
        whole = (request.context + request.continuation)[-97:]
        logs = mixed(models, whole[:-1], mean)[-len(request.continuation) :]
        labels = torch.tensor(request.continuation)
        nats = logs.gather(1, labels[:, None]).sum()
        assert score.nats == pytest.approx(float(nats), rel=1e-5)
        assert score.is_greedy == bool((logs.argmax(-1) == labels).all())
    prompt = found[mean]["requests"][0].context
    ids = list(prompt)
    for _ in found[mean]["greedy"][0]:
        ids.append(int(mixed(models, ids, mean)[-1].argmax()))
    assert found[mean]["greedy"][0] == ids[len(prompt) :]


def test_ranks_predict_together_what_one_predicts(common):
    (alone,), ranks, mean = common["alone"], common["tp2"], "probs"
    for rank in ranks:
        assert rank[mean]["greedy"] == alone[mean]["greedy"]
        assert rank["drawn"] == alone["drawn"]
        nats = [score.nats for score in rank[mean]["scores"]]
        assert nats == pytest.approx([score.nats for score in alone[mean]["scores"]], rel=1e-5)


@pytest.fixture(scope="module")
def by_bytes(folders):
    models = [folders[0], folders[2]]
    arguments = (CONTEXT, CONTINUATIONS)
    return {
        "alone": run_ranks(1, ask_bytes, models, ALONE, *arguments),
        **{name: run_ranks(2, ask_bytes, models, it, *arguments) for name, it in SHARED_BY.items()},
    }


def test_bytes_of_one_model_are_its_own_over_all_tokens(folders, models):
    (found,) = run_ranks(1, ask_first, folders, ALONE, CONTEXT, CONTINUATIONS)
    tokenizer = build_tokenizer(TokenizerConfig(model=str(folders[0])))
    tokens = TokenBytes.of(tokenizer).tokens()
    # The context is shorter than what is read byte by byte, but its first token is kept.
    first = tokenizer.text_to_ids(CONTEXT.rstrip())[:1]
    opened = CONTEXT.rstrip().encode().removeprefix(tokens[first[0]])
    for text, score in zip(CONTINUATIONS, found["scores"], strict=True):
        read, nats = opened, 0.0
        for byte in b" " + text.encode():
            longer = read + bytes([byte])
            before = _covers(models[0], tokens, first, read, without_control=True)
            nats += math.log(_covers(models[0], tokens, first, longer) / before)
            read = longer
        assert score.nats == pytest.approx(nats, rel=1e-5)
    assert found["lost"] == [0.0] * len(CONTINUATIONS)


def _covers(model, tokens, ids, text, weight=1.0, *, without_control=False):
    """Probability of all tokens that begin with a text behind ``ids``.

    Args:
        without_control: Leave out those that go on, behind the text, with what is no text.
    """
    with torch.no_grad():
        probs = model(torch.tensor([ids])).logits[0, -1].double().softmax(-1).tolist()
    shares = [(it, token, weight * probs[token]) for token, it in enumerate(tokens)]
    if not text:
        # The third id ends a text.
        return sum(s for it, token, s in shares if it or token == 2 or not without_control)
    total = sum(share for it, _, share in shares if it and it != text and it.startswith(text))
    for it, token, share in shares:
        if it and text.startswith(it):
            rest = text[len(it) :]
            total += _covers(
                model, tokens, [*ids, token], rest, share, without_control=without_control
            )
    return total


@pytest.mark.parametrize("layout", SHARED_BY)
def test_ranks_read_bytes_as_one_does(by_bytes, layout):
    (alone,) = by_bytes["alone"]
    for rank in by_bytes[layout]:
        assert rank["greedy"] == alone["greedy"]
        assert rank["drawn"] == alone["drawn"]
        nats = [score.nats for score in rank["scores"]]
        assert nats == pytest.approx([score.nats for score in alone["scores"]], rel=1e-4)


def test_the_verb_writes_what_models_generate_together(folders, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the"}\n{"prompt": "a"}\n')
    options = {"prompts": tmp_path / "prompts.jsonl", "output": tmp_path / "texts.jsonl"}
    options |= {"mode": "byte", "max-new-tokens": 3, "beam": 1}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    arguments += [f"--model={folders[0]}", f"--model={folders[2]}"]
    (said,) = run_ranks(1, evaluate, arguments, "generate")
    assert "generate: 100%" in said
    written = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert [record["prompt"] for record in written] == ["the", "a"]
    assert all(isinstance(record["completion"], str) for record in written)
    assert any(record["completion"] for record in written)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "byte", "mean": "logits"}, "no logits in common"),
        ({"prune": 1.0}, "no share"),
        ({"beam": 0}, "no reading"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EnsembleOptions(**options)


@pytest.mark.parametrize("weight", [(1.0,), (0.0, 0.0), (1.0, -1.0), (1.0, math.nan)])
def test_weights_that_cannot_be_are_refused(weight):
    with pytest.raises(ConfigError, match="weights"):
        EnsembleOptions(weight=weight).weights(2)


def test_other_vocabularies_are_refused_token_by_token(folders):
    (error,) = run_ranks(1, _refusal, [folders[0], folders[2]])
    assert "different vocabularies" in error
    assert "--mode byte" in error


def _refusal(rank, models):
    from tests.evaluation.ensemble_ranks import load

    with pytest.raises(ConfigError) as error:
        load(models, ALONE)
    return str(error.value)

"""What megatron-core generates and scores is what transformers does, under every layout."""

import json
import math
import os

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_ext.errors import ConfigError
from megatron_ext.evaluation.megatron_language_model import (
    ModelOptions,
    OpenedModel,
    open_model,
    stops_of,
)
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from tests.evaluation.evaluation_ranks import (
    NEW_TOKENS,
    SHARED_BEGINNINGS,
    ask,
    ask_families,
    chat,
    evaluate,
)
from tests.evaluation.stand_in_model import written
from tests.evaluation.tiny_language_model import PROMPTS, save_tiny_model
from tests.huggingface.tiny_models import COMPARED, save_model, save_tokenizer
from tests.process_group import run_ranks

ALONE = {"adds_bos": False, "micro_batch_size": 3}
LAYOUTS = {
    "tp2": {**ALONE, "tensor_model_parallel_size": 2},
    "pp2": {**ALONE, "pipeline_model_parallel_size": 2, "micro_batch_size": 2},
}
FAMILIES = ["qwen3", "gpt-neox", *(name for name in ("qwen3.5",) if name in COMPARED)]
if os.environ.get("MEGATRON_EXT_ALL_TEXT"):
    LAYOUTS["dp2"] = {**ALONE, "micro_batch_size": 5}
    FAMILIES += ["gemma", "gemma3", "mistral", "phi3", "olmo2", "olmo3", "smollm3", "granite"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def answers(folder):
    """Of each rank, by layout."""
    found = {}
    for world_size, layouts in ((1, {"alone": ALONE}), (2, LAYOUTS)):
        ranks = run_ranks(world_size, ask, folder, layouts)
        found |= {name: [rank[name] for rank in ranks] for name in layouts}
    return found


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_model_parallel_size": 3}, "the model's attention heads do not divide over --ten"),
        ({"pipeline_model_parallel_size": 7}, "the model's num_layers do not divide over --pipel"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(folder, options, message):
    with pytest.raises(ConfigError, match=message):
        open_model(folder, ModelOptions(**options))


@pytest.mark.parametrize("kind", ["scores", "rolling"])
def test_log_likelihoods_are_those_of_transformers(answers, model, kind):
    (found,) = answers["alone"]
    requests = found["requests" if kind == "scores" else "rolling_requests"]
    for request, score in zip(requests, found[kind], strict=True):
        nats, is_greedy = _score(model, *request)
        # fp32 sums in another order, over up to 96 tokens.
        assert score.nats == pytest.approx(nats, rel=1e-5)
        assert score.is_greedy == is_greedy


def test_greedy_generation_is_that_of_transformers_and_of_no_cache(answers, folder, model):
    (found,) = answers["alone"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompt, ids, text in zip(PROMPTS, found["greedy_ids"], found["greedy"], strict=True):
        encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        whole = model.generate(
            **encoded, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        expected = whole[0, encoded["input_ids"].shape[1] :].tolist()
        assert ids == expected
        if 2 in expected:
            expected = expected[: expected.index(2)]
        assert text == tokenizer.decode(expected, skip_special_tokens=True)
    assert found["slow_ids"] == found["greedy_ids"][0][:2]


def test_a_text_ends_with_the_stops_of_the_generation_configuration(answers, folder):
    (found,) = answers["alone"]
    assert found["stops"] == {2}
    ids = found["greedy_ids"][0]
    whole = AutoTokenizer.from_pretrained(folder).decode(ids[: ids.index(ids[2])])
    assert found["ended"] == [whole]


def test_an_answer_ends_where_the_chat_template_writes_an_end(tmp_path):
    template = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}<pad>{% endfor %}"
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    tokenizer = build_tokenizer(TokenizerConfig(model=str(tmp_path)))
    opened = OpenedModel(tmp_path, None, tokenizer)
    assert stops_of(opened, ModelOptions()) == {2, 7}
    assert stops_of(opened, ModelOptions(applies_chat_template=True)) == {0, 2, 7}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_and_no_batch_changes_an_answer(answers, layout):
    (alone,) = answers["alone"]
    for rank in answers[layout]:
        for kind in ("stopped", "sampled", "once"):
            assert rank[kind] == alone[kind], kind
        for kind in ("scores", "rolling"):
            nats = [score.nats for score in rank[kind]]
            assert nats == pytest.approx([score.nats for score in alone[kind]], rel=1e-5)
            assert [s.is_greedy for s in rank[kind]] == [s.is_greedy for s in alone[kind]]


def test_draws_depend_on_their_seed_and_differ_from_first_choices(answers):
    (alone,) = answers["alone"]
    assert alone["sampled"] != alone["greedy"]
    assert alone["sampled"] != alone["others"]


def test_a_completion_ends_before_a_stop_string(answers):
    (alone,) = answers["alone"]
    assert any("e" in text for text in alone["greedy"])
    assert alone["stopped"] == [text.split("e")[0] for text in alone["greedy"]]


def test_the_verb_measures_a_huggingface_folder(folder, model, tmp_path):
    text = "the theory of the other thing"
    written(tmp_path / "texts.jsonl", json.dumps({"text": text}))
    options = {"checkpoint": folder, "task": "bits_per_byte", "data": tmp_path / "texts.jsonl"}
    options |= {"output": tmp_path / "results.json", "samples": tmp_path / "samples.jsonl"}
    (written_errors,) = run_ranks(
        1, evaluate, [f"--{name}={value}" for name, value in options.items()]
    )
    assert "score: 100%" in written_errors
    results = json.loads((tmp_path / "results.json").read_text())
    ids = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]
    nats, _ = _score(model, [1], ids)
    found = results["metrics"]["bits_per_byte"]
    assert found == pytest.approx(-nats / math.log(2) / len(text), rel=1e-5)
    assert results["checkpoint"] == str(folder)
    assert (results["precision"], results["seq_length"]) == ("fp32", 96)
    assert (tmp_path / "samples.jsonl").is_file()


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {name: save_model(name, root / name) for name in FAMILIES}


@pytest.fixture(scope="module")
def asked(families):
    (found,) = run_ranks(1, ask_families, families)
    return dict(found)


@pytest.mark.parametrize("name", FAMILIES)
def test_other_families_generate_what_transformers_does(asked, families, name):
    model = AutoModelForCausalLM.from_pretrained(families[name], dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(families[name])
    for prompt, ids in zip(PROMPTS, asked[name]["greedy_ids"], strict=True):
        encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        assert ids == _first_choices(model, encoded, len(tokenizer))


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_with_one_beginning_are_read_as_transformers_reads_each(asked, families, name):
    model = AutoModelForCausalLM.from_pretrained(families[name], dtype=torch.float32).eval()
    for ids, probs in zip(SHARED_BEGINNINGS, asked[name]["next"], strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0, -1, : len(probs)].double().softmax(0)
        torch.testing.assert_close(torch.from_numpy(probs), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_chat_template_makes_a_message_of_every_prompt(asked, families, name):
    model = AutoModelForCausalLM.from_pretrained(families[name], dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(families[name])
    message = [{"role": "user", "content": PROMPTS[0]}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    found = asked[name]
    assert found["chat_prompt"] == prompt
    assert found["chat_request"] == (prompt, tokenizer("there")["input_ids"])
    nats, _ = _score(model, *found["chat_request"], vocab_size=len(tokenizer))
    assert found["chat_score"][0].nats == pytest.approx(nats, rel=1e-5)
    ids = _first_choices(model, torch.tensor([prompt]), len(tokenizer))
    ids = ids[: ids.index(2)] if 2 in ids else ids
    assert found["chat"] == [tokenizer.decode(ids, skip_special_tokens=True)]


def _first_choices(model, ids, vocab_size):
    """As many new ids, each from all before it, of those that the tokenizer has."""
    start = ids.shape[1]
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            logits = model(ids).logits[:, -1, :vocab_size]
            ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), dim=1)
    return ids[0, start:].tolist()


def _score(model, context, continuation, *, vocab_size=None):
    ids = torch.tensor([(context + continuation)[-97:]])
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits[0, :, :vocab_size]
        log_probs = logits.log_softmax(-1)[-len(continuation) :]
    labels = torch.tensor(continuation)
    nats = log_probs.gather(1, labels[:, None]).sum()
    return float(nats), bool((log_probs.argmax(-1) == labels).all())


def test_a_chat_answers_each_line_and_remembers_the_ones_before(families):
    folder = families["qwen3"]
    (printed,) = run_ranks(1, chat, folder, [PROMPTS[0], "", PROMPTS[2]])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    messages = []
    for prompt in (PROMPTS[0], PROMPTS[2]):
        messages.append({"role": "user", "content": prompt})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        whole = model.generate(
            torch.tensor([ids]),
            # Few: what comes in several bytes is many tokens in the next message.
            max_new_tokens=4,
            do_sample=False,
            suppress_tokens=list(range(len(tokenizer), model.config.vocab_size)),
            pad_token_id=0,
        )
        answer = tokenizer.decode(whole[0, len(ids) :].tolist(), skip_special_tokens=True)
        assert printed.startswith(f"{answer}\n")
        printed = printed.removeprefix(f"{answer}\n")
        messages.append({"role": "assistant", "content": answer})
    assert printed == ""

"""Servers are asked by ids, their answers checked, and what goes wrong is said."""

import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext.engines.engine import AskedPrompt, EngineConfig, Sampling
from megatron_ext.engines.server import InferenceServer, check_processed
from megatron_ext.errors import ConfigError, DistributedError
from megatron_ext.teachers.base import TokenRows
from megatron_ext.teachers.engine_connection import EngineConnection
from megatron_ext.teachers.target_form import TargetForm
from tests.engines.stand_in_server import VOCAB_SIZE, log_probs_after, sample, serving

KINDS = ("vllm", "sglang")
SAMPLING = Sampling(max_new_tokens=5, seed=3)


@pytest.fixture
def stand_in():
    with serving() as stand_in, ExitStack() as stand_in.students:
        yield stand_in


def connected(stand_in, kind="vllm", length=100, **options):
    options = {"retries": 2, "timeout_s": 5.0, **options}
    config = EngineConfig(kind=kind, url=(stand_in.url,), **options)
    server = InferenceServer(config, where="teacher.engine", vocab_size=VOCAB_SIZE, length=length)
    stand_in.students.callback(server.close)
    return server


@pytest.mark.parametrize("kind", KINDS)
def test_a_completion_is_the_servers_own_ids(stand_in, kind):
    prompts = [AskedPrompt([1, 5, 9], frozenset(), 0), AskedPrompt([7], frozenset({11}), 1)]
    completions = connected(stand_in, kind).complete(prompts, SAMPLING)()
    for prompt, completion in zip(prompts, completions, strict=True):
        ids, log_probs = sample(prompt.ids, 5, prompt.stop_ids)
        assert completion.ids == ids
        assert completion.log_probs == pytest.approx(log_probs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_says_how_to_sample(stand_in, kind):
    server = connected(stand_in, kind)
    sampling = Sampling(max_new_tokens=2, temperature=0.7, top_p=0.9)
    server.complete([AskedPrompt([1, 2], frozenset({8, 4}), 5)], sampling)()
    ((_, body, _),) = stand_in.requests
    values = {**body, **body.get("sampling_params", {})}
    assert values["temperature"] == 0.7
    assert values["top_p"] == 0.9
    assert values["stop_token_ids"] == [4, 8]
    # Nothing of the model's generation config, and no penalty.
    assert (values["top_k"], values["min_p"], values["repetition_penalty"]) == (-1, 0.0, 1.0)
    assert values["ignore_eos"] is True


def test_samples_of_other_places_have_other_seeds(stand_in):
    server = connected(stand_in)
    server.complete([AskedPrompt([1], frozenset(), place) for place in (0, 1, 0)], SAMPLING)()
    seeds = sorted(body["seed"] for _, body, _ in stand_in.requests)
    assert len(set(seeds)) == 2


@pytest.mark.parametrize("top_k", [0, 1, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_the_ids(stand_in, kind, top_k):
    texts = [[1, 5, 9, 700, 3], [2, 2000]]
    scores = connected(stand_in, kind).score(texts, top_k)()
    for ids, found in zip(texts, scores, strict=True):
        expected = np.stack([log_probs_after(ids[:at]) for at in range(1, len(ids))])
        own = expected[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(found.log_probs, own, rtol=1e-6)
        best = np.argsort(-expected, axis=1, kind="stable")[:, :top_k]
        np.testing.assert_array_equal(found.top_ids, best)
        top = np.take_along_axis(expected, best, 1)
        np.testing.assert_allclose(found.top_log_probs, top, rtol=1e-6)


@pytest.mark.parametrize("form", ["label", "topk"])
@pytest.mark.parametrize("kind", KINDS)
def test_targets_of_packed_rows_stand_at_their_positions(stand_in, kind, form):
    # Two texts and padding in the first row; one text, of which only a part is trained, behind.
    tokens = torch.tensor([[1, 5, 9, 1, 7, 0], [1, 4, 4, 4, 4, 0]])
    labels = torch.tensor([[5, 9, 2, 7, 2, -100], [-100, -100, 4, 4, -100, -100]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    form = TargetForm.of(form, precision="fp32", top_k=4, hidden_size=8, vocab_size=VOCAB_SIZE)
    connection = EngineConnection(connected(stand_in, kind), form)
    rows = TokenRows(tokens=tokens, position_ids=positions, labels=labels)
    numbers = [connection.ask([rows]), connection.ask([rows, rows])]
    (fields,) = connection.answer(numbers[0])
    assert len(connection.answer(numbers[1])) == 2
    texts = {0: [1, 5, 9, 2], 3: [1, 7, 2], 6: [1, 4, 4, 4, 4]}
    asked = [body.get("prompt") or body.get("input_ids") for _, body, _ in stand_in.requests]
    assert sorted(asked) == sorted(3 * [*texts.values()])
    for start, ids in texts.items():
        for at in range(1, len(ids)):
            row, column = divmod(start + at - 1, 6)
            if labels[row, column] < 0:
                continue
            expected = log_probs_after(ids[:at])
            assert fields["label_log_probs"][row, column] == pytest.approx(expected[ids[at]])
            if "topk_ids" in fields:
                best = np.sort(np.argsort(-expected)[:4])
                assert fields["topk_ids"][row, column].tolist() == best.tolist()
                named = fields["topk_logits"][row, column] - fields["log_normaliser"][row, column]
                np.testing.assert_allclose(named.numpy(), expected[best], rtol=1e-5)
    assert connection.received_tokens == 3 * 12


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_without_time_is_asked_again(stand_in, status):
    stand_in.statuses = [status]
    (completion,) = connected(stand_in).complete([AskedPrompt([1], frozenset(), 0)], SAMPLING)()
    assert len(completion.ids) == 5
    assert len(stand_in.requests) == 2


@pytest.mark.parametrize(
    ("break_it", "match"),
    [
        (lambda s: s.statuses.extend([500] * 9), "500.*not now"),
        (lambda s: s.statuses.extend([400] * 9), "400.*not now"),
        (lambda s: setattr(s, "change", lambda _: b"<html>"), "no JSON"),
        (lambda s: setattr(s, "change", lambda _: {"choices": []}), "cannot be read"),
        (lambda s: setattr(s, "change", lambda _: [1]), "cannot be read"),
        (lambda s: s.statuses.append(302), "status 302"),
    ],
    ids=["no time", "refused", "no JSON", "nothing", "other JSON", "sent elsewhere"],
)
def test_a_server_that_does_not_answer_ends_the_run_in_one_line(stand_in, break_it, match):
    server = connected(stand_in, retries=1)
    break_it(stand_in)
    with pytest.raises(DistributedError, match=match) as caught:
        server.complete([AskedPrompt([1], frozenset(), 0)], SAMPLING)()
    assert "teacher.engine" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_other_ids_are_refused(stand_in, kind):
    def of_others(answer):
        if "choices" in answer:
            answer["choices"][0]["prompt_token_ids"][1] += 1
        else:
            answer["meta_info"]["input_token_logprobs"][1][1] += 1
        return answer

    server = connected(stand_in, kind)
    stand_in.change = of_others
    with pytest.raises(DistributedError, match="ids"):
        server.score([[1, 2, 3]], 0)()


def refusal_of_scores(stand_in, kind, form, match):
    """The error of a connection whose server answers as the stand-in's ``change`` has it."""
    form = TargetForm.of(form, precision="fp32", top_k=2, hidden_size=8, vocab_size=VOCAB_SIZE)
    connection = EngineConnection(connected(stand_in, kind), form)
    row = torch.tensor([[1, 5, 7]])
    rows = TokenRows(tokens=row, position_ids=torch.arange(3)[None], labels=row + 1)
    with pytest.raises(DistributedError, match=rf"teacher\.engine: the engine's.*({match})"):
        connection.answer(connection.ask([rows]))


@pytest.mark.parametrize("form", ["label", "topk"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("number_of", "match"),
    [(lambda found: found + 12, "sum to more than 1"), (lambda _: None, "TypeError")],
    ids=("logits", "null"),
)
def test_numbers_that_are_no_log_probabilities_end_the_run(stand_in, kind, form, number_of, match):
    def change(answer):
        if kind == "vllm":
            rows = answer["choices"][0]["prompt_logprobs"][1:]
            for entry in (entry for row in rows for entry in row.values()):
                entry["logprob"] = number_of(entry["logprob"])
        else:
            meta = answer["meta_info"]
            for row in (meta["input_token_logprobs"], *meta["input_top_logprobs"][1:]):
                row[:] = [[found and number_of(found), *rest] for found, *rest in row]
        return answer

    stand_in.change = change
    refusal_of_scores(stand_in, kind, form, match)


@pytest.mark.parametrize(
    ("ids", "match"), [((9, VOCAB_SIZE), "does not have"), ((9, 9), "names a token twice")]
)
def test_likeliest_tokens_that_cannot_be_end_the_run(stand_in, ids, match):
    def change(answer):
        for row in answer["meta_info"]["input_top_logprobs"][1:]:
            row[:] = [[found[0], other, None] for found, other in zip(row, ids, strict=True)]
        return answer

    stand_in.change = change
    refusal_of_scores(stand_in, "sglang", "topk", match)


def test_a_server_that_is_gone_or_slow_is_named(stand_in):
    server = connected(stand_in, retries=0, timeout_s=0.2)

    def slowly(answer):
        time.sleep(0.5)
        return answer

    stand_in.change = slowly
    with pytest.raises(DistributedError, match="no answer in time"):
        server.complete([AskedPrompt([1], frozenset(), 0)], SAMPLING)()
    stand_in.url = "http://127.0.0.1:9"
    with pytest.raises(DistributedError, match="Connection refused"):
        connected(stand_in, retries=0)


def test_an_answer_to_a_request_that_is_repeated_after_a_time_out_is_in_time(stand_in):
    server = connected(stand_in, retries=1, timeout_s=0.2)
    pauses = iter([0.3, 0.0])

    def slowly_at_first(answer):
        time.sleep(next(pauses))
        return answer

    stand_in.change = slowly_at_first
    (completion,) = server.complete([AskedPrompt([1], frozenset(), 0)], SAMPLING)()
    assert len(completion.ids) == 5


def test_a_server_that_asks_for_a_long_pause_gets_a_short_one(stand_in, monkeypatch):
    monkeypatch.setattr("megatron_ext.engines.http_client._LONGEST_PAUSE_S", 0.1)
    stand_in.statuses, stand_in.headers = [429], {"Retry-After": "86400"}
    (completion,) = connected(stand_in).complete([AskedPrompt([1], frozenset(), 0)], SAMPLING)()
    assert len(completion.ids) == 5


def test_a_process_does_not_wait_at_its_end_for_a_server_that_has_not_answered(stand_in):
    before, is_asked, may_end = set(threading.enumerate()), threading.Event(), threading.Event()
    stand_in.meet = lambda *_: is_asked.set() or (may_end.wait(5) and 200)
    server = connected(stand_in)
    server.complete([AskedPrompt([1], frozenset(), 0)], SAMPLING)
    assert is_asked.wait(5)
    assert all(thread.daemon for thread in set(threading.enumerate()) - before)
    server.close()
    may_end.set()


def test_ids_that_the_model_does_not_have_are_not_sent(stand_in):
    server = connected(stand_in)
    with pytest.raises(ConfigError, match=str(VOCAB_SIZE)):
        server.score([[1, VOCAB_SIZE]], 0)
    assert not stand_in.requests


def test_another_model_or_a_short_one_is_refused(stand_in):
    with pytest.raises(ConfigError, match=r"expected: m|expected m"):
        connected(stand_in, model="other")
    with pytest.raises(ConfigError, match="too few tokens"):
        connected(stand_in, length=4096)
    stand_in.models.append({"id": "n"})
    with pytest.raises(ConfigError, match="m or n"):
        connected(stand_in)


def test_the_key_comes_from_the_environment(stand_in, monkeypatch):
    monkeypatch.setenv("ITS_KEY", "secret-words")
    server = connected(stand_in, key_variable="ITS_KEY")
    server.complete([AskedPrompt([1], frozenset(), 0)], SAMPLING)()
    ((_, _, headers),) = stand_in.requests
    assert headers["Authorization"] == "Bearer secret-words"
    stand_in.statuses = [401]
    with pytest.raises(DistributedError) as caught:
        server.complete([AskedPrompt([1], frozenset(), 0)], SAMPLING)()
    assert "secret-words" not in str(caught.value)


@pytest.mark.parametrize("key", ["secret\nwords", "secret-wörds"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(stand_in, monkeypatch, key):
    monkeypatch.setenv("MEGATRON_EXT_ENGINE_KEY", f"{key}\r\n")
    with pytest.raises(ConfigError, match="MEGATRON_EXT_ENGINE_KEY: a key holds") as caught:
        connected(stand_in)
    assert "secret" not in str(caught.value)
    monkeypatch.setenv("MEGATRON_EXT_ENGINE_KEY", "secret-words\r\n")
    connected(stand_in).complete([AskedPrompt([1], frozenset(), 0)], SAMPLING)()
    ((_, _, headers),) = stand_in.requests
    assert headers["Authorization"] == "Bearer secret-words"


def test_an_address_may_end_as_clients_of_openai_have_it_and_a_certificate_is_there(stand_in):
    stand_in.url += "/v1/"
    connected(stand_in).complete([AskedPrompt([1], frozenset(), 0)], SAMPLING)()
    assert stand_in.paths() == ["/v1/completions"]
    with pytest.raises(ConfigError, match=r"teacher\.engine\.root_certificate: .*no-file"):
        connected(stand_in, root_certificate="no-file")


def test_log_probabilities_from_before_the_temperature_are_found_out(stand_in):
    server, prompt = connected(stand_in), AskedPrompt([1], frozenset(), 0)
    check_processed(server, SAMPLING, prompt)
    with pytest.raises(ConfigError, match="processed_logprobs"):
        check_processed(server, Sampling(max_new_tokens=5, temperature=0.5), prompt)


def test_the_rounding_of_a_model_does_not_hide_log_probabilities_from_before_it(stand_in):
    def change(answer):
        values = answer["choices"][0]["logprobs"]["token_logprobs"]
        # As of bf16, and in the second call as of a temperature.
        values[:] = [shift(at, value) for at, value in enumerate(values)]
        return answer

    server, prompt = connected(stand_in), AskedPrompt([1], frozenset(), 0)
    sampling = Sampling(max_new_tokens=5, temperature=0.5)
    stand_in.change, shift = change, lambda at, value: value + 0.05 * (-1) ** at
    with pytest.raises(ConfigError, match="processed_logprobs"):
        check_processed(server, sampling, prompt)
    shift = lambda at, value: value if at == 0 else value - 2  # noqa: E731
    check_processed(server, sampling, prompt)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_loaded_from_a_folder(stand_in, kind):
    connected(stand_in, kind).load(Path("/weights"))
    assert "/weights" in str(stand_in.requests[0][1])
    expected = ["/collective_rpc", "/reset_prefix_cache"]
    assert stand_in.paths() == (expected if kind == "vllm" else ["/update_weights_from_disk"])


def test_weights_that_a_server_cannot_load_end_the_run(stand_in):
    server = connected(stand_in, "sglang")
    stand_in.change = lambda _: {"success": False, "message": "no such folder"}
    with pytest.raises(DistributedError, match="no such folder"):
        server.load(Path("/weights"))


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"url": ()}, "no address"),
        ({"url": ("ftp://x",)}, "address"),
        ({"url": ("http://host:8000",)}, "TLS"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"concurrency": 0}, "concurrency"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(values, match):
    with pytest.raises(ConfigError, match=match):
        EngineConfig(**{"kind": "vllm", "url": ("http://localhost:1",), **values})
    EngineConfig(kind="vllm", url=("http://host:8000", "https://host"), plain_connection=True)


REAL = os.environ.get("MEGATRON_EXT_ENGINE"), os.environ.get("MEGATRON_EXT_ENGINE_MODEL")


@pytest.mark.skipif(not all(REAL), reason="MEGATRON_EXT_ENGINE and _MODEL name no server of vLLM")
def test_a_real_server_scores_and_samples_as_its_folder_says():
    from transformers import AutoModelForCausalLM

    url, folder = REAL
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    size = model.config.vocab_size
    config = EngineConfig(kind="vllm", url=(url,))
    server = InferenceServer(config, where="engine", vocab_size=size, length=40)
    texts = [[1, 17, 300, 25, 40, 9], [1, 500]]
    completions = server.complete(
        [AskedPrompt(ids, frozenset({2}), place) for place, ids in enumerate(texts)], SAMPLING
    )()
    texts += [[*ids, *its.ids] for ids, its in zip(texts, completions, strict=True)]
    for ids, found in zip(texts, server.score(texts, 4)(), strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        own = expected[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        np.testing.assert_allclose(found.log_probs, own.numpy(), atol=2e-2)
        assert found.top_ids[:, 0].tolist() == expected[:-1].argmax(-1).tolist()
    for ids, completion, found in zip(
        texts[:2], completions, server.score(texts[2:], 0)(), strict=True
    ):
        np.testing.assert_allclose(completion.log_probs, found.log_probs[len(ids) - 1 :], atol=1e-3)

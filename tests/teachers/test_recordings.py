"""Recordings of other programs are read as these programs wrote them."""

import json

import numpy as np
import pytest
import torch

from megatron_ext.engines.engine import Scores
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.teachers.distillkit_recording import (
    CompressionConfig,
    DistillKitRecording,
)
from megatron_ext.teachers.recorded_text import RecordedText, check_recorded, recorded_targets
from megatron_ext.teachers.vllm_recording import VllmRecording
from megatron_ext.typed_mapping import build_config
from tests.engines.stand_in_server import log_probs_after, vllm_answer
from tests.teachers.record_distillkit_rows import FILE, D
from tests.training.teachers import recorded_elsewhere

ROWS = json.loads(FILE.read_text())
IDS = [4, 9, 2, 7]
VOCAB = 12


def log_probs(seed=0):
    logits = 2 * np.random.default_rng(seed).standard_normal((len(IDS), VOCAB))
    return (logits - np.logaddexp.reduce(logits, axis=1)[:, None]).astype(np.float32)


def vllm_rows(top_k=3):
    import torch

    return recorded_elsewhere.prompt_logprobs(IDS, torch.from_numpy(log_probs()), top_k)


FORMS = ("request_output", "flat_output", "completions_answer", "batch_line")


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_vllm_has_the_same_text(form):
    record = json.loads(json.dumps(getattr(recorded_elsewhere, form)(IDS, vllm_rows())))
    (text,) = VllmRecording().texts(record, 3)
    expected = log_probs()[:-1]
    order = np.argsort(-expected, axis=1)[:, :3]
    assert text.ids.tolist() == IDS
    assert text.scores.top_ids.tolist() == order.tolist()
    assert np.array_equal(text.scores.top_log_probs, np.take_along_axis(expected, order, 1))
    assert np.array_equal(text.scores.log_probs, expected[range(3), IDS[1:]])
    (counted,) = VllmRecording().texts(record, None)
    assert counted.scores.top_ids.shape == (3, 3)


def test_answers_as_recorded_from_a_server_are_read():
    asked = {"prompt": [4, 700, 9], "max_tokens": 1, "prompt_logprobs": 5}
    (text,) = VllmRecording().texts(json.loads(json.dumps(vllm_answer(asked))), None)
    assert text.scores.top_ids.shape == (2, 5)
    for row, before in enumerate(([4], [4, 700])):
        expected = log_probs_after(before)
        assert text.scores.top_ids[row].tolist() == np.argsort(-expected)[:5].tolist()
        assert text.scores.log_probs[row] == np.float32(expected[asked["prompt"][row + 1]])


def changed_output(change):
    record = recorded_elsewhere.request_output(list(IDS), vllm_rows())
    change(record)
    return record


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("prompt_token_ids"), "no prompt_token_ids.*ask with return_token_ids"),
        (lambda r: r.update(prompt_logprobs=None), "no prompt_logprobs; got keys"),
        (lambda r: r.update(error="too long"), "a request that failed; got too long"),
        (lambda r: r["prompt_logprobs"].pop(), "3 prompt_logprobs of 4 tokens"),
        (lambda r: r["prompt_logprobs"].reverse(), "no entry for its id"),
        (lambda r: r["prompt_token_ids"].__setitem__(2, 8), "token 2 have no entry for its id 8"),
        (lambda r: r["prompt_logprobs"][1].clear(), "no entry"),
    ],
    ids=("ids", "none", "failed", "short", "shifted", "other", "empty"),
)
def test_a_record_that_is_not_vllms_says_why(change, message):
    with pytest.raises(DataError, match=message):
        VllmRecording().texts(changed_output(change), 3)


def test_fewer_tokens_than_asked_for_are_refused():
    with pytest.raises(DataError, match="fewer than 4 prompt_logprobs"):
        VllmRecording().texts(changed_output(lambda r: None), 4)
    with pytest.raises(DataError, match="not one of vLLM's"):
        VllmRecording().texts([1, 2], 4)


@pytest.mark.parametrize("name", ROWS)
def test_captures_of_distillkit_decompress_to_what_it_says(name):
    row = ROWS[name]
    config = build_config(CompressionConfig, row["config"], str)
    record = {**row, "input_ids": [1, 2, 3, 4]}
    (text,) = DistillKitRecording(config).texts(record, None)
    assert text.scores.top_ids.tolist() == row["token_ids"]
    # DistillKit rounds the sums of its differences once more, to its exact_dtype. linspace of bf16,
    # in which it has the places of a curve, is rounded otherwise from torch 2.15 on.
    is_rounded = row["config"].get("normalize_t") and torch.__version__ >= "2.15"
    atol = 2**-8 if is_rounded else 2e-6
    np.testing.assert_allclose(text.scores.top_log_probs, row["log_probs"], rtol=2e-7, atol=atol)
    assert np.isnan(text.scores.log_probs).all()


def test_packed_rows_are_taken_apart():
    row = ROWS["exact"]
    config = build_config(CompressionConfig, row["config"], str)
    record = {**row, "input_ids": [1, 2, 3], "attention_mask": [1, 1, 2]}
    first, second = DistillKitRecording(config).texts(record, 5)
    assert (first.ids.tolist(), second.ids.tolist()) == ([1, 2], [3])
    assert first.scores.top_ids.tolist() == [ids[:5] for ids in row["token_ids"][:2]]
    assert second.scores.top_ids.tolist() == [row["token_ids"][2][:5]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": [1, 2]}, "not of one text; got 2 input_ids, 3 compressed_logprobs"),
        ({"bytepacked_indices": [[0]] * 3}, "not compressed as its description says; got 1 bytes"),
        ({"compressed_logprobs": [[0], [1, 2], [3]]}, "no bytes of one width"),
        ({"attention_mask": [1]}, "attention_mask is not of the ids; got 1; expected 4"),
    ],
    ids=("ids", "width", "ragged", "mask"),
)
def test_a_row_that_is_not_distillkits_says_why(change, message):
    row = ROWS["exact"]
    reader = DistillKitRecording(build_config(CompressionConfig, row["config"], str))
    with pytest.raises(DataError, match=message):
        reader.texts({**row, "input_ids": [1, 2, 3, 4], **change}, None)
    with pytest.raises(DataError, match="older layouts"):
        reader.texts({"input_ids": [1], "packed_indices": []}, None)
    with pytest.raises(DataError, match="fewer tokens; got 8; expected 9"):
        reader.texts({**row, "input_ids": [1, 2, 3, 4]}, 9)


def test_a_description_that_cannot_be_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read.*--compression-config"):
        CompressionConfig.load(tmp_path / "none.yaml")
    file = tmp_path / "capture.yaml"
    for content, message in (
        ("{d: 9, k: 4, exact_k: 5}", "no such capture"),
        ("{d: 9, k: 4, exact_k: 1, polynomial_terms: [log]}", "no such term; got log"),
        ("{d: 9, k: 4, exact_k: 1, residual_bins: [{element_bits: 2}]}", "scale_dtype"),
        ("{d: 9, k: 4}", "exact_k"),
    ):
        file.write_text(content)
        with pytest.raises(ConfigError, match=message):
            CompressionConfig.load(file)


def text_of(top_ids, top, own=np.nan):
    scores = Scores(
        np.full(1, own, np.float32), np.array([top_ids]), np.log(np.array([top], np.float32))
    )
    return RecordedText(np.array([1, 2]), scores)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (text_of([3, D], [0.5, 0.2]), f"id that the teacher's.*position 0; got {D}; expected 0 to"),
        (text_of([3, 3], [0.5, 0.2]), "names a token twice; position 0; got 3, 3"),
        (text_of([3, 4], [0.5, np.nan]), "is not a number"),
        (text_of([3, 4], [0.9, 0.2]), "sum to more than 1.*got 1.1; record.*--tail renormalise"),
        (text_of([3, 4], [0.5, 0.2], np.log(0.3)), "contradicts those of the likeliest"),
        (text_of([2, 4], [0.5, 0.2], np.log(0.3)), "contradicts those of the likeliest"),
    ],
    ids=("id", "twice", "nan", "mass", "above", "other"),
)
def test_predictions_that_cannot_be_are_refused(text, message):
    with pytest.raises(DataError, match=message):
        check_recorded(text, D, most_mass=1.01, tail="exact")


def test_the_tail_is_what_is_left_of_one_or_nothing():
    text = text_of([3, 4], [0.5, 0.2], np.log(0.1))
    exact = recorded_targets(text, np.array([2]), "exact")
    probabilities = (exact["topk_logits"] - exact["log_normaliser"][:, None]).exp()
    np.testing.assert_allclose(probabilities, [[0.5, 0.2]], rtol=1e-6)
    np.testing.assert_allclose(exact["label_log_probs"].exp(), [0.1], rtol=1e-6)
    none = recorded_targets(text, np.array([2]), "renormalise")
    probabilities = (none["topk_logits"] - none["log_normaliser"][:, None]).exp()
    np.testing.assert_allclose(probabilities, [[5 / 7, 2 / 7]], rtol=1e-6)
    assert none["label_log_probs"].isnan().all()
    check_recorded(text_of([3, 4], [9.0, 2.0]), D, most_mass=1.01, tail="renormalise")


def test_a_label_is_known_from_the_likeliest_or_where_the_text_goes_on_with_it():
    text = text_of([3, 4], [0.5, 0.2], np.log(0.1))
    for label, expected in ((3, 0.5), (2, 0.1), (7, np.nan)):
        fields = recorded_targets(text, np.array([label]), "exact")
        np.testing.assert_allclose(fields["label_log_probs"].exp(), [expected], rtol=1e-6)
    assert recorded_targets(text, np.array([-100]), "exact")["label_log_probs"].tolist() == [0]

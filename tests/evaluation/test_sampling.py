"""Draws follow the model's probabilities, cut at top-p, and depend on seed and place alone."""

import pytest
import torch

from megatron_ext.errors import ConfigError
from megatron_ext.evaluation.generation import draws, next_tokens
from megatron_ext.evaluation.language_model import GenerationOptions

PROBS = torch.tensor([0.05, 0.4, 0.0, 0.3, 0.25])


def options(**values):
    return GenerationOptions(max_new_tokens=4, **values)


def shares(given):
    """Of each token over evenly spread numbers: what a draw's probability is."""
    count = 20_000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = next_tokens(PROBS.log().expand(count, -1), uniforms, given).ids
    return (torch.bincount(drawn, minlength=5) / count).tolist()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (options(temperature=1.0), [0.05, 0.4, 0.0, 0.3, 0.25]),
        (options(temperature=1.0, top_p=0.6), [0.0, 0.4 / 0.7, 0.0, 0.3 / 0.7, 0.0]),
        (options(temperature=1.0, top_p=1e-9), [0.0, 1.0, 0.0, 0.0, 0.0]),
        (options(temperature=0.5), [x * x / 0.315 for x in (0.05, 0.4, 0.0, 0.3, 0.25)]),
        (options(), [0.0, 1.0, 0.0, 0.0, 0.0]),
    ],
    ids=["all", "top-p", "least", "colder", "greedy"],
)
def test_tokens_come_as_often_as_they_are_likely(given, expected):
    assert shares(given) == pytest.approx(expected, abs=2e-4)


def test_numbers_depend_on_seed_and_place_alone():
    first = draws([0, 7], options(seed=1))
    assert torch.equal(first[1], draws([7], options(seed=1))[0])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], draws([0], options(seed=2))[0])


@pytest.mark.parametrize(
    "values", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"seed": -1}]
)
def test_options_that_cannot_be_used_are_refused(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        options(**values)

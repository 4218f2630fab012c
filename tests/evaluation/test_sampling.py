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


@pytest.mark.parametrize("given", [options(temperature=1.0), options(temperature=0.7, top_p=0.6)])
def test_log_probabilities_and_entropies_are_those_of_what_was_drawn_from(given):
    count = 2_000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = next_tokens(PROBS.log().expand(count, -1), uniforms, given)
    expected = torch.tensor(shares(given), dtype=torch.float64)
    torch.testing.assert_close(drawn.log_probs.exp(), expected[drawn.ids], atol=2e-4, rtol=0)
    entropy = -torch.special.xlogy(expected, expected).sum()
    torch.testing.assert_close(drawn.entropies, entropy.expand(count), atol=2e-3, rtol=0)


def test_likely_tokens_that_rounding_reorders_give_the_same_draws():
    logits = torch.zeros(1, 1000)
    moved = logits + 1e-7 * torch.randn(1, 1000, generator=torch.Generator().manual_seed(0))
    uniforms = (torch.arange(500, dtype=torch.float64) + 0.25) / 500
    first, second = (
        next_tokens(each.expand(500, -1), uniforms, options(temperature=1.0)).ids
        for each in (logits, moved)
    )
    assert torch.equal(first, second)


def test_the_largest_number_draws_a_token_that_can_be_drawn():
    probs = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    last = torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert next_tokens(probs.log(), last, options(temperature=1.0)).ids.tolist() == [1]

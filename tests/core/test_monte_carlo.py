"""Claims about Eq. 8 by Monte Carlo: it is unbiased and its standard error is right."""
import math

import numpy as np
import pytest
from conftest import images
from hypothesis import given
from hypothesis import strategies as st
from likelihoods import eq_8, mask_values, random_captions
from scipy.special import stdtrit
from strategies import examples

from open_clip_mdc.likelihood import draws as drawing
from open_clip_mdc.likelihood import log_likelihood as scoring


@pytest.mark.parametrize("num_tokens", [3, 4, 5, 6])
def test_monte_carlo_with_a_budget_for_every_mask_is_eq_8_exactly(mdc, num_tokens):
    image, text = images(1), random_captions(2, [num_tokens - 1], seed=num_tokens)
    found = scoring.log_likelihood(mdc, image, text[None], "monte_carlo", num_samples=1024, return_details=True)
    for c, row in enumerate(text):
        assert found.log_likelihood[0, c].item() == pytest.approx(eq_8(mask_values(mdc, image[0], row)), rel=1e-5)
    assert (found.standard_error == 0).all() and (found.draws == 2 ** num_tokens - 1).all()


def estimates(values, num_samples, seeds, interval=None):
    """The score for many seeds, [seeds], from the values of all masks."""
    found = []
    for seed in range(seeds):
        draws = drawing.draw_masks(max(map(len, values)), num_samples, seed, interval)
        drawn = np.array([[values[tuple(hidden.nonzero()[0] + 1)] for hidden in draws.hidden]])
        found.append(drawing.estimate(drawn, draws)[0].item())
    return np.array(found)


@pytest.fixture(scope="module")
def six_tokens(mdc):
    return mask_values(mdc, images(1)[0], random_captions(1, [5], seed=3)[0])


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4, 5, 6, 7, 9, 11, 12, 13, 20, 31])
def test_monte_carlo_is_unbiased_at_every_number_of_draws(six_tokens, num_samples):
    found = estimates(six_tokens, num_samples, seeds=1500)
    assert abs(found.mean() - eq_8(six_tokens)) < 4 * found.std() / math.sqrt(len(found))  # by chance once in 16,000
    assert found.std() > 0


def test_the_standard_error_is_honest_where_masks_are_too_many_to_run_out():
    score, covered = [], []
    for seed in range(500):
        draws = drawing.draw_masks(40, 160, seed)
        noise = np.random.default_rng([seed, 1]).normal(scale=5, size=len(draws.stratum))
        noise[np.isfinite(draws.population[draws.stratum])] = 0  # they would need noise that is the mask's own
        trend = draws.hidden.sum(1)
        found, error = drawing.estimate((trend + noise)[None], draws)
        score.append(found[0])
        covered.append(abs(found[0] - 40 * 20.5) < stdtrit(len(trend) - 40, 0.975) * error[0])
    assert np.mean(score) == pytest.approx(40 * 20.5, abs=4 * np.std(score) / math.sqrt(500))
    assert 0.91 < np.mean(covered) < 0.98  # 0.95 within 4 standard deviations of 500 coin tosses


def test_a_single_draw_does_not_claim_to_know_its_error(mdc):
    found = scoring.log_likelihood(mdc, images(1), random_captions(1), "monte_carlo", num_samples=1,
                                   return_details=True)
    assert found.standard_error.isinf().all() and (found.draws == 1).all()


@examples(60)
@given(st.integers(1, 77), st.integers(1, 1024))
def test_draws_are_within_budget_each_count_as_often_and_without_replacement_where_they_can_be(size, budget):
    samples = [np.bincount(drawing.systematic_sample(size, budget, k), minlength=size) for k in range(size)]
    assert (sum(samples) == budget).all() and all(np.ptp(sample) <= 1 for sample in samples)
    draws = drawing.draw_masks(size, budget)
    counts = draws.hidden.sum(1)
    assert len(counts) <= budget and (draws.stratum == counts - 1).all()
    for n in range(1, size + 1):
        of_count = draws.hidden[counts == n]
        if math.comb(size, n) <= 16 * len(of_count):
            assert len(np.unique(of_count, axis=0)) == len(of_count)


@pytest.mark.parametrize("interval, counts", [((0.5, 1.0), (3, 4, 5, 6)), ((0.3, 0.6), (2, 3)), ((0.55, 0.6), (4,)),
                                              ((0.0, 0.2), (1,)), ((0.0, 1.0), (1, 2, 3, 4, 5, 6))])
def test_an_interval_draws_its_mask_counts_only_and_averages_them(mdc, six_tokens, interval, counts):
    found = scoring.log_likelihood(mdc, images(1), random_captions(1, [5], seed=3), "monte_carlo", interval=interval)
    assert found.item() == pytest.approx(eq_8(six_tokens, counts), rel=1e-5)
    rough = estimates(six_tokens, 5, seeds=1500, interval=interval)
    assert abs(rough.mean() - eq_8(six_tokens, counts)) <= 4 * rough.std() / math.sqrt(1500) + 1e-9


def test_masks_of_different_lengths_are_independent():
    counts = [[drawing.draw_masks(n, 1, seed).hidden.sum() for n in (40, 41)] for seed in range(300)]
    assert abs(np.corrcoef(np.array(counts).T)[0, 1]) < 4 / math.sqrt(300)

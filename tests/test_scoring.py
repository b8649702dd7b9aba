"""Claims about likelihoods: what each estimator computes, how certain it is of it, and what it does not depend on."""

import itertools
import math

import numpy as np
import pytest
import torch

from open_clip_mdc import scoring
from open_clip_mdc.model import Captioner
from open_clip_mdc.tokens import eot_id, mask_id, sot_id

V = 60
SOT, EOT, MASK = sot_id(V), eot_id(V), mask_id(V)


def captioner(objective="mdc", seed=0, scale=4.0):
    """A tiny model with large weights, so that tokens, places and the image all matter to its predictions."""
    torch.manual_seed(seed)
    model = Captioner(64, dict(image_size=32, patch_size=8, width=64, head_width=32, layers=2),
                      dict(context_length=12, vocab_size=V, width=32, heads=2, layers=2), dict(objective=objective))
    with torch.no_grad():
        for parameter in model.text.parameters():
            if parameter.ndim == 2:
                parameter.mul_(scale)
    return model.eval()


@pytest.fixture(scope="module")
def mdc():
    return captioner()


@pytest.fixture(scope="module")
def arc():
    return captioner("arc")


def caption(*words, length=12, padding=0):
    return [SOT, *words, EOT] + [padding] * (length - len(words) - 2)


def random_captions(count, lengths=range(2, 10), seed=0, length=12):
    """Distinct captions of random words; the lengths take turns."""
    rng = np.random.default_rng(seed)
    lengths = itertools.cycle(lengths)
    return torch.tensor([caption(*rng.integers(1, V - 2, size=next(lengths)), length=length) for _ in range(count)])


def images(count, seed=0):
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def log_probs(model, image, text, valid):
    with torch.no_grad():
        return model.logits(image[None], text[None], valid[None])[0].double().log_softmax(-1)


def read(text):
    """The caption without padding and what a model may attend to."""
    length = text.tolist().index(EOT) + 1
    return text[:length], torch.ones(length, dtype=torch.bool)


def mean_log_likelihood(model, image, text, hidden):
    """What Eq. 8 averages: 1/n times the sum over the n hidden tokens, each a single call of the plain model."""
    text, valid = read(text)
    noisy = text.clone()
    noisy[list(hidden)] = MASK
    found = log_probs(model, image, noisy, valid)
    return sum(found[i, text[i]].item() for i in hidden) / len(hidden)


def bound_by_enumeration(model, image, text, counts=None):
    """Eq. 8, or its mean over some counts times N, by way of every mask there is."""
    positions = range(1, text.tolist().index(EOT) + 1)
    counts = list(counts or range(1, len(positions) + 1))
    means = [np.mean([mean_log_likelihood(model, image, text, hidden)
                      for hidden in itertools.combinations(positions, n)]) for n in counts]
    return len(positions) * np.mean(means)


# ---- Eq. 7 and the heuristic

def test_autoregressive_equals_a_naive_loop_over_logits(arc):
    image, text = images(1), random_captions(3)
    found = scoring.log_likelihood(arc, image, text[None], return_details=True)
    for c, row in enumerate(text):
        row, valid = read(row)
        expected = [log_probs(arc, image[0], row[:i], valid[:i])[i - 1, row[i]].item() for i in range(1, len(row))]
        assert found.log_likelihood[0, c].item() == pytest.approx(sum(expected), abs=1e-4)
        assert found.token_log_likelihood[0, c, 1:len(row)].tolist() == pytest.approx(expected, abs=1e-4)
        assert found.token_log_likelihood[0, c, 0] == 0 and not found.token_log_likelihood[0, c, len(row):].any()


def test_heuristic_equals_a_naive_loop_over_logits(mdc):
    image, text = images(1), random_captions(3)
    found = scoring.log_likelihood(mdc, image, text[None], "heuristic", return_details=True)
    for c, row in enumerate(text):
        row, valid = read(row)
        noisy = torch.tensor([SOT] + [MASK] * (len(row) - 1))
        total = 0.0
        for step in range(len(row) - 1):
            logp = log_probs(mdc, image[0], noisy, valid)
            place = max((i for i in range(1, len(row)) if noisy[i] == MASK), key=lambda i, p=logp: p[i].max())
            total += logp[place, row[place]].item()
            assert found.order[0, c, place] == step
            assert found.token_log_likelihood[0, c, place].item() == pytest.approx(logp[place, row[place]].item(), abs=1e-4)
            noisy[place] = row[place]
        assert found.log_likelihood[0, c].item() == pytest.approx(total, abs=1e-4)
        assert found.order[0, c, 0] == -1 and (found.order[0, c, len(row):] == -1).all()


def table_of(probabilities):
    """TokenLogits from a function (visible words of a row, position) -> probabilities of the ids."""
    def token_logits(text, valid, asked):
        rows = [torch.tensor(probabilities(tuple(text[r].tolist()), i)) for r, i in asked.nonzero().tolist()]
        return torch.stack(rows).log() + 7.0  # logits are log-probabilities up to a constant
    return token_logits


def test_the_heuristic_score_and_order_of_a_table_are_those_computed_by_hand():
    # Ids: words 0 and 1, SOT 2, EOT 3, MASK 4. The caption is "1 0" between SOT and EOT.
    def probabilities(text, position):
        if text == (2, 4, 4, 4):
            return {1: [.3, .2, .1, .4], 2: [.1, .1, .1, .7], 3: [.2, .2, .2, .4]}[position]  # surest of 2, truth .1
        if text == (2, 4, 0, 4):
            return {1: [.3, .3, .2, .2], 3: [.1, .1, .3, .5]}[position]  # then of 3, truth .5
        if text == (2, 4, 0, 3):
            return {1: [.6, .25, .1, .05]}[position]  # truth .25
        raise AssertionError(f"no step of the heuristic shows {text}")

    found = scoring.heuristic(table_of(probabilities), torch.tensor([[2, 1, 0, 3]]), vocab_size=4)
    assert found.order.tolist() == [[-1, 2, 0, 1]]
    assert found.token_log_likelihood[0].tolist() == pytest.approx([0, math.log(.25), math.log(.1), math.log(.5)])
    assert found.log_likelihood.item() == pytest.approx(math.log(.25 * .1 * .5))


def test_equally_confident_positions_are_revealed_from_the_left():
    even = table_of(lambda text, position: [.2, .5, .1, .2])
    found = scoring.heuristic(even, torch.tensor([[2, 1, 0, 1, 3], [2, 0, 3, 0, 0]]), vocab_size=4)
    assert found.order.tolist() == [[-1, 0, 1, 2, 3], [-1, 0, 1, -1, -1]]
    assert found.log_likelihood.tolist() == pytest.approx([math.log(.5 * .2 * .5 * .2), math.log(.2 * .2)])


def test_finished_rows_leave_the_batch(mdc):
    image_kv = mdc.text.project_image(mdc.encode_image_tokens(images(1)))
    tokens, asked_for = [], []

    def count(text, valid, asked):
        tokens.append(int(valid.sum()))
        asked_for.append(int(asked.sum()))
        return mdc.token_logits(image_kv, text, valid, asked)

    with torch.no_grad():
        scoring.heuristic(count, torch.tensor([caption(1, 2), caption(1, 2, 3, 4)]), V)  # 4 and 6 tokens with SOT
    assert tokens == [10, 10, 10, 7, 7]
    assert asked_for == [8, 6, 4, 2, 1]


# ---- Eq. 8

@pytest.mark.parametrize("num_tokens", [3, 4, 5, 6])
def test_monte_carlo_with_a_budget_for_every_mask_is_eq_8_exactly(mdc, num_tokens):
    image, text = images(1), random_captions(2, [num_tokens - 1], seed=num_tokens)
    found = scoring.log_likelihood(mdc, image, text[None], "monte_carlo", num_samples=1024, return_details=True)
    for c, row in enumerate(text):
        assert found.log_likelihood[0, c].item() == pytest.approx(bound_by_enumeration(mdc, image[0], row), rel=1e-5)
    assert (found.standard_error == 0).all()
    assert (found.draws == 2 ** num_tokens - 1).all()


def all_mask_values(model, image, text):
    """{hidden positions: mean log-likelihood} for every mask, so that draws can be looked up instead of computed."""
    positions = range(1, text.tolist().index(EOT) + 1)
    masks = [m for n in range(1, len(positions) + 1) for m in itertools.combinations(positions, n)]
    return {mask: mean_log_likelihood(model, image, text, mask) for mask in masks}


def estimates(values, num_tokens, num_samples, seeds, interval=None):
    """Score and standard error for many seeds, [seeds, 2], from a table of mask values."""
    found = []
    for seed in range(seeds):
        draws = scoring.draw_masks(num_tokens, num_samples, seed, interval)
        drawn = np.array([[values[tuple(hidden.nonzero()[0] + 1)] for hidden in draws.hidden]])
        score, error, _ = scoring.estimate(drawn, draws)
        found.append((score[0], error[0]))
    return np.array(found)


@pytest.fixture(scope="module")
def six_tokens(mdc):
    image, text = images(1)[0], random_captions(1, [5], seed=3)[0]
    return all_mask_values(mdc, image, text), bound_by_enumeration(mdc, image, text)


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4, 5, 6, 7, 9, 11, 12, 13, 20, 31])
def test_monte_carlo_is_unbiased_at_every_number_of_draws(six_tokens, num_samples):
    values, exact = six_tokens
    found = estimates(values, 6, num_samples, seeds=1500)[:, 0]
    assert abs(found.mean() - exact) < 4 * found.std() / math.sqrt(len(found))  # fails by chance once in 16,000
    assert found.std() > 0


@pytest.mark.parametrize("num_samples", [2, 4, 6, 9, 12, 15, 24, 36])
def test_the_standard_error_is_honest(six_tokens, num_samples):
    values, exact = six_tokens
    score, error = estimates(values, 6, num_samples, seeds=1500).T
    stated, true = math.sqrt((error ** 2).mean()), math.sqrt(((score - exact) ** 2).mean())
    assert stated > 0.93 * true  # 1500 seeds tell a standard deviation to about 2 %
    if num_samples >= 12:  # two draws of each count: stratification is paid for, and 1.96 standard errors cover
        assert stated < 1.07 * true
        assert (np.abs(score - exact) < 1.96 * error).mean() > (0.85 if num_samples < 24 else 0.90)


def test_the_standard_error_is_honest_without_finite_population_too():
    # 40 tokens whose log-likelihoods are iid over masks: 80 draws of 40 counts, 2^40 masks.
    exact = 40 * np.arange(1, 41).mean()
    score, error = [], []
    for seed in range(400):
        draws = scoring.draw_masks(40, 160, seed)
        noise = np.random.default_rng([seed, 1]).normal(size=(1, len(draws.stratum)))
        found = scoring.estimate(draws.hidden.sum(1) + 5 * noise, draws)
        score.append(found[0][0])
        error.append(found[1][0])
    coverage = (np.abs(np.array(score) - exact) < 1.96 * np.array(error)).mean()
    assert 0.91 < coverage < 0.98


def test_one_draw_has_no_standard_error(mdc):
    found = scoring.log_likelihood(mdc, images(1), random_captions(1), "monte_carlo", num_samples=1, return_details=True)
    assert found.standard_error.isinf().all() and (found.draws == 1).all()


@pytest.mark.parametrize("num_tokens, num_samples", [(8, 16), (24, 16), (40, 16), (12, 8), (10, 16), (77, 16), (14, 1024)])
def test_every_mask_count_is_expected_equally_often(num_tokens, num_samples):
    starts = []
    for seed in range(40 * num_tokens):
        counts = np.bincount(scoring.draw_masks(num_tokens, num_samples, seed).hidden.sum(1), minlength=num_tokens + 1)
        assert counts[0] == 0
        starts.append(counts[1:])
        if num_samples > num_tokens * 20:
            break  # dear, and the numbers differ by one at most
    share = np.mean(starts, axis=0) / np.sum(starts, axis=1).mean()
    if num_samples <= num_tokens:  # nothing is enumerated away, and every count is equally likely
        tolerance = 5 * math.sqrt(num_samples / num_tokens / len(starts)) / num_samples
        assert np.abs(share - 1 / num_tokens).max() < tolerance


@pytest.mark.parametrize("num_tokens, num_samples", [(8, 16), (24, 16), (40, 16), (12, 8), (10, 16), (77, 16), (3, 7)])
def test_the_systematic_sample_of_counts_is_exactly_uniform_over_its_starts(num_tokens, num_samples):
    total = sum(np.bincount((k + np.arange(num_samples) * num_tokens // num_samples) % num_tokens, minlength=num_tokens)
                for k in range(num_tokens))
    assert (total == num_samples).all()

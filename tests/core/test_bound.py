"""Claims about the bound of mask-and-replace diffusion as a score.

A network is a table of two tokens, small enough for sums over all x_t and for the reverse chain by matrices.
"""
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import VOCAB, captions, images, seeded, tiny_captioner
from scipy.stats import chisquare
from test_mask_replace import T, V, dense, kl, much_replacement, product, true_posteriors  # noqa: F401

from open_clip_mdc.likelihood.replace_bound import Noise, bound, bound_of_draws, draw_noise
from open_clip_mdc.likelihood.scoring import Call, Scoring
from open_clip_mdc.objectives.replace_process import make_schedule, prior_kl

SOT, EOT = V - 2, V - 1  # words 0 and 1
PRESETS = ("absorbing", "replace", "half")
# Of the first token's x_t, the second's, t and which of them is asked: logits of x_0.
TABLE = torch.randn(V + 1, V + 1, T + 1, 2, V, dtype=torch.float64, generator=seeded(0))


def token_logits(text, predicted, time):
    row, place = predicted // text.shape[1], predicted % text.shape[1]
    return TABLE[text[row, 1], text[row, 2], time[row], place - 1]


def call(x_0, schedule):
    return Call(SimpleNamespace(vocab_size=V, objective=SimpleNamespace(schedule=lambda *_: schedule)),
                lambda lengths: token_logits, torch.tensor([[SOT, *x_0]]), 1, 64, "cpu")


def chain(matrices, first: int, second: int, t: int, place: int) -> torch.Tensor:
    """p(x_{t-1} | x_t) of one of the two tokens, [V + 1], by dense matrices."""
    k = (first, second)[place]
    given, reach = true_posteriors(matrices, k, t - 1, t)
    if not (reach > 0).all():
        return torch.eye(V + 1).double()[k]
    return TABLE[first, second, t, place].softmax(0) @ given


def exact(preset: str, x_0: tuple[int, int]) -> tuple[float, list[float]]:
    """-log p(x_0) by the reverse chain, and the bound's part of each token by enumeration."""
    schedule = make_schedule(V, T, preset)
    matrices, mask = dense(schedule), float(schedule.mask[-1])
    one = torch.cat((torch.full((V,), (1 - mask) / V), torch.tensor([mask]))).double()
    state, parts = one[:, None] * one, [prior_kl(schedule)] * 2
    for t in range(T, 0, -1):
        after = torch.zeros_like(state)
        for first, second in itertools.product(range(V + 1), repeat=2):
            p = [chain(matrices, first, second, t, place) for place in (0, 1)]
            after += state[first, second] * p[0][:, None] * p[1]
            reach = [product(matrices, 0, t)[x_0[place], (first, second)[place]] for place in (0, 1)]
            for place in (0, 1):
                if reach[0] * reach[1] > 0:
                    q = true_posteriors(matrices, (first, second)[place], t - 1, t)[0][x_0[place]]
                    parts[place] += float(reach[0] * reach[1]) * kl(q, p[place])
        state = after
    assert state[V].sum() + state[:, V].sum() == pytest.approx(0, abs=1e-12)
    return -math.log(state[x_0]), parts


def every_noise(schedule, x_0: tuple[int, int]) -> Noise:
    """All t and x_t of a caption, weighted by their probability."""
    rows = []
    for t, k in itertools.product(range(1, T + 1), itertools.product(range(V + 1), repeat=2)):
        q = math.prod(float(schedule.mask[t] if j == V else schedule.keep[t] * (i == j) + schedule.replace[t])
                      for i, j in zip(x_0, k, strict=True))
        rows.append((t, [j == V for j in k], [j != V for j in k], k, q / T))
    step, masked, replaced, other, weight = map(np.array, zip(*rows, strict=True))
    return Noise(step, masked, replaced, other, weight)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("x_0", [(0, EOT), (1, EOT)])
def test_the_mean_over_all_noise_is_the_exact_bound_of_the_exact_likelihood(preset, x_0):
    schedule = make_schedule(V, T, preset)
    nll, parts = exact(preset, x_0)
    expected, noise = sum(parts), every_noise(schedule, x_0)
    values, tokens = bound_of_draws(call(x_0, schedule), {2: noise}, schedule)
    prior = prior_kl(schedule)
    assert (values[0] * noise.weight).sum() + 2 * prior == pytest.approx(expected, rel=1e-5)
    assert (tokens[0, 1:] + prior).tolist() == pytest.approx(parts, rel=1e-5)
    assert expected > nll
    score = bound(call(x_0, schedule), Scoring(num_samples=20000))
    assert abs(-float(score.log_likelihood) - expected) < 4 * float(score.standard_error) < 0.1 * expected
    assert score.token_log_likelihood[0].sum().item() == pytest.approx(float(score.log_likelihood), rel=1e-5)


def test_the_standard_error_is_that_of_repeated_estimates():
    one = call((0, EOT), make_schedule(V, T, "half"))
    scores = [bound(one, Scoring(num_samples=50, seed=s)) for s in range(300)]
    spread = torch.cat([s.log_likelihood for s in scores]).std()
    assert 0.8 < spread / torch.cat([s.standard_error for s in scores]).square().mean().sqrt() < 1.25


@pytest.mark.parametrize("preset", ["absorbing", "code", "replace"])
def test_noise_is_of_every_time_equally_often_and_of_seed_and_length_alone(preset):
    schedule = make_schedule(VOCAB, 100, preset)
    noise = draw_noise(7, 1000, 3, schedule)
    assert np.array_equal(np.bincount(noise.step)[1:], np.full(100, 10)) and noise.weight.sum() == pytest.approx(1)
    assert all(map(np.array_equal, noise, draw_noise(7, 1000, 3, schedule)))
    assert not np.array_equal(noise.masked, draw_noise(7, 1000, 4, schedule).masked)
    expected = schedule.mask.numpy()[noise.step].mean()
    assert abs(noise.masked.mean() - expected) < 5 * (0.25 / noise.masked.size) ** 0.5
    assert not (noise.masked & noise.replaced).any() and noise.replaced.any() == (preset == "replace")
    few = draw_noise(7, 30, 0, schedule)
    assert len(set(few.step)) == 30 and few.weight.sum() == pytest.approx(1)


def test_a_model_that_was_scored_still_trains():
    """Scoring caches the schedule in inference mode, where tensors cannot be part of a gradient."""
    make_schedule.cache_clear()
    model, text, image = tiny_captioner("mcd-replace", t_min=0.0), captions([5, 9]), images(2)
    model.log_likelihood(image, text, num_samples=20)
    out = model.train()(image, text)
    (out["token_weight"] * out["token_nll"]).sum().backward()
    assert model.text.output.weight.grad.isfinite().all()


def test_a_replaced_token_can_be_any_id_each_as_often():
    noise = draw_noise(20, 3000, 0, make_schedule(VOCAB, 100, "replace"))
    count = np.bincount(noise.other.ravel(), minlength=VOCAB)
    assert len(count) == VOCAB and chisquare(count).pvalue > 1e-4

"""Claims about mask-and-replace diffusion, against dense matrices."""
import functools
import itertools
import math

import pytest
import torch
from conftest import VOCAB, seeded, tiny_captioner

from open_clip_mdc.objectives import replace_process as mask_replace
from open_clip_mdc.objectives.replace_process import bound_terms, log_posterior, make_schedule, noise, prior_kl

V, T = 4, 5
PRESETS = ("absorbing", "code", "replace", "half", "late")
EYE = torch.eye(V, dtype=torch.float64)


@pytest.fixture(autouse=True)
def much_replacement(monkeypatch):
    """Return schedules with much replacement: 35 % random ids at T, and some clean ones left.

    "late" replaces nothing in the first step, after which a visible token is the true one.
    """
    monkeypatch.setitem(mask_replace.PRESETS, "half", ((0.9, 0.05), (0.05, 0.6)))
    monkeypatch.setitem(mask_replace.PRESETS, "late", ((0.9, 0.1), (0.1, 0.6)))
    yield
    make_schedule.cache_clear()


def dense(schedule) -> list[torch.Tensor]:
    """The transition matrices [V + 1, V + 1] of the T steps, from the numbers of one step."""
    matrices = []
    for t in range(1, T + 1):
        stay, to_mask, to_other = (float(x) for x in schedule.bridge(torch.tensor(t - 1), torch.tensor(t)))
        q = torch.zeros(V + 1, V + 1, dtype=torch.float64)
        q[:V, :V] = to_other + stay * EYE
        q[:V, V], q[V, V] = to_mask, 1
        matrices.append(q)
    return matrices


def product(matrices: list[torch.Tensor], s: int, t: int) -> torch.Tensor:
    """q(x_t | x_s), [V + 1, V + 1]."""
    return functools.reduce(torch.matmul, matrices[s:t], torch.eye(V + 1, dtype=torch.float64))


def true_posteriors(matrices: list[torch.Tensor], k: int, s: int, t: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q(x_s | x_t = k, x_0) for every x_0, [V, V + 1] by Bayes' rule, and q(x_t = k | x_0), [V]."""
    reach = product(matrices, 0, t)[:V, k]
    joint = product(matrices, 0, s)[:V] * product(matrices, s, t)[:, k]
    return joint / reach[:, None].where(reach[:, None] > 0, 1), reach


def kl(q: torch.Tensor, p: torch.Tensor) -> float:
    return sum(a * math.log(a / b) for a, b in zip(q.tolist(), p.tolist(), strict=True) if a > 0)


def guesses(seed: int) -> torch.Tensor:
    """A network's log p(x_0), [1, V]."""
    return (1.5 * torch.randn(1, V, dtype=torch.float64, generator=seeded(seed))).log_softmax(1)


def test_the_presets_end_where_their_sources_say():
    schedules = [make_schedule(49408, 100, name) for name in ("absorbing", "code", "replace")]
    absorbing, code, replace = schedules
    assert torch.equal(absorbing.mask, torch.arange(101, dtype=torch.float64) / 100)
    assert absorbing.absorbing and not code.absorbing
    assert (49408 * code.replace[1:]).tolist() == pytest.approx([1e-6] * 100, rel=1e-6)
    assert replace.mask[-1] == 0.9 and 49408 * replace.replace[-1].item() == pytest.approx(0.1)
    for schedule in schedules:
        assert all((x >= 0).all() for x in schedule[:3]) and schedule.keep[0] == 1


@pytest.mark.parametrize("preset", PRESETS)
def test_the_posterior_is_bayes_rule_with_dense_matrices(preset):
    """This holds for every x_t and every s < t.

    If x_t determines x_0 (nothing is replaced), the network's output is not used.
    """
    schedule = make_schedule(V, T, preset)
    matrices = dense(schedule)
    for t, k in itertools.product(range(1, T + 1), range(V + 1)):
        for s in range(t):
            log_p = guesses(seed=100 * t + 10 * k + s)
            given, reach = true_posteriors(matrices, k, s, t)
            if not reach.any():  # by step T an absorbing process has masked all
                continue
            expected = log_p[0].exp() @ given if (reach > 0).all() else given[k]
            got = log_posterior(log_p, torch.tensor([k]), torch.tensor([s]), torch.tensor([t]), schedule)[0].exp()
            torch.testing.assert_close(got, expected, atol=1e-14, rtol=0)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_bound_is_the_kl_of_dense_vectors(preset):
    schedule = make_schedule(V, T, preset)
    matrices = dense(schedule)
    for t, k, i in itertools.product(range(1, T + 1), range(V + 1), range(V)):
        log_p = guesses(seed=100 * t + 10 * k + i).requires_grad_()
        given, reach = true_posteriors(matrices, k, t - 1, t)
        if reach[i] == 0:
            continue
        p = log_p[0].exp() @ given if (reach > 0).all() else given[k]
        found = bound_terms(log_p, torch.tensor([i]), torch.tensor([k]), torch.tensor([t]), schedule)
        assert found.item() == pytest.approx(kl(given[i], p), abs=1e-13)
        if t == 1 and (k == V or preset not in ("absorbing", "late")):
            assert found.item() == pytest.approx(-log_p[0, i].item(), abs=1e-13)  # the decoder's own term
        found.sum().backward()
        assert log_p.grad.isfinite().all()


def test_prior_kl_is_that_of_dense_vectors():
    for preset, keep in (("half", 0.05), ("replace", 0.0), ("absorbing", 0.0)):
        schedule = make_schedule(V, T, preset)
        q = product(dense(schedule), 0, T)[0]
        p = torch.full((V + 1,), (1 - float(schedule.mask[-1])) / V, dtype=torch.float64)
        p[V] = schedule.mask[-1]
        assert prior_kl(schedule) == pytest.approx(kl(q, p), abs=1e-14) and (kl(q, p) > 1e-3) == (keep > 0)


@pytest.mark.parametrize("preset", PRESETS)
def test_noise_has_the_frequencies_of_the_forward_process(preset):
    """200,000 tokens: each of V + 1 shares within 5 standard errors of q(x_t | x_0)."""
    schedule, n = make_schedule(V, T, preset), 200_000
    clean, t = torch.tensor([1, 3]), torch.tensor([2, 4])
    noised = torch.arange(n).bool().expand(2, -1)  # all but the first
    x_t = noise(clean[:, None].expand(-1, n), noised, t, schedule, seeded(0))
    assert torch.equal(x_t[:, 0], clean)
    for row, i, step in zip(x_t, clean, t, strict=True):
        q = product(dense(schedule), 0, step)[i]
        share = row[1:].bincount(minlength=V + 1).double() / (n - 1)
        assert ((share - q).abs() <= 5 * (q * (1 - q) / n).sqrt() + 1e-12).all()


@pytest.mark.parametrize("preset", ["absorbing", "code", "replace"])
def test_values_and_gradients_are_finite_at_the_corners(preset):
    """The real vocabulary in float32, networks all but certain, right and wrong, at the first and last steps."""
    size = 49408
    schedule = make_schedule(size, 100, preset)
    logits = (100 * torch.randn(6, size, generator=seeded(0))).requires_grad_()
    x_0 = torch.tensor([5, 5, 5, 7, 8, 9])
    x_t = torch.tensor([size, 5, size, 7 if preset == "absorbing" else 3, 8, size])
    kl = bound_terms(logits.log_softmax(1), x_0, x_t, torch.tensor([1, 1, 100, 50, 100, 99]), schedule)
    kl.sum().backward()
    assert kl.isfinite().all() and (kl >= -1e-4).all() and logits.grad.isfinite().all()


def test_the_time_inferred_of_a_text_is_the_first_step_that_masks_as_many_exactly():
    """k of n tokens are masked, n up to CLIP's 76: the least t with t / 100 >= k / n, by integers."""
    model = tiny_captioner("mcd-absorbing", t_min=0.0, time_embedding=True)
    for n in range(1, 77):
        masked = torch.arange(n + 1) > n - torch.arange(1, n + 1)[:, None]  # 1 to n of them
        text = masked.long() * VOCAB
        assert model.infer_time(text, torch.ones_like(text)).tolist() == [-(-100 * k // n) for k in range(1, n + 1)]


def test_every_id_replaces_where_replacement_is_as_rare_as_in_the_preset_and_the_vocabulary_is_clips(monkeypatch):
    size, step = 49408, 50
    schedule = make_schedule(size, 100, "code")
    low, share = float(schedule.mask[step]), size * float(schedule.replace[step])
    grid = low + share * (torch.arange(size, dtype=torch.float64) + 0.5) / size  # a number for each id
    monkeypatch.setattr(torch, "rand", lambda shape, dtype=torch.float32, **options: grid.to(dtype).view(shape))
    text = torch.full((1, size), 7)
    found = noise(text, torch.ones_like(text, dtype=torch.bool), torch.tensor([step]), schedule)
    assert (found[0] - torch.arange(size)).abs().max() <= 1

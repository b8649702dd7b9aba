"""Claims about the forward process, time and the loss (Eqs. 1, 4, 5, Algorithm 1)."""
import ast
import math

import numpy as np
import pytest
import torch
from conftest import REPO, VOCAB, captions, images, refused, seeded, tiny_captioner
from hypothesis import given
from hypothesis import strategies as st
from likelihoods import eq_8, mask_values
from strategies import examples
from torch.testing import assert_close

from open_clip_mdc.integration import validation
from open_clip_mdc.integration.validation import nelbo
from open_clip_mdc.objectives import replace_process as mask_replace
from open_clip_mdc.objectives.config import CaptionCfg
from open_clip_mdc.objectives.loss import CaptionLoss
from open_clip_mdc.objectives.masked import loss_weight, sample_t
from open_clip_mdc.objectives.registry import OBJECTIVES
from open_clip_mdc.objectives.times import golden_ratio_points, stratified_uniform
from open_clip_mdc.text.packing import NoisedCaptions, Predicted, pack
from open_clip_mdc.text.special_tokens import mask_id, target_tokens

INTERVALS = [(0.0, 1.0), (0.3, 0.8), (0.4, 0.9), (0.5, 1.0), (0.15, 0.15), (1.0, 1.0)]


def corrupt(text, u, objective="mdc", seed=0, **cfg) -> NoisedCaptions:
    return OBJECTIVES[objective].corrupt(text, VOCAB, CaptionCfg(objective, **cfg), u, seeded(seed))


def shuffled_u(n: int, seed: int = 1) -> torch.Tensor:
    return stratified_uniform(n, 0.5)[torch.randperm(n, generator=seeded(seed))]


@examples(200)
@given(st.sampled_from(INTERVALS), st.integers(1, 40), st.integers(1, 4),
       st.floats(0, 1, exclude_max=True) | st.sampled_from((1 - 2 ** -24, 1 - 2 ** -53)))
def test_times_lie_one_in_each_stratum_of_the_global_batch_and_of_each_ranks(interval, batch, world_size, u0):
    """None is 0: 1 - alpha(t) is 0 in float32 for t < 2^-25, an infinite weight of a token that is not masked."""
    ranks = [stratified_uniform(batch, u0, rank, world_size) for rank in range(world_size)]
    for u in (torch.cat(ranks), *ranks):
        n, u = len(u), u.sort().values
        assert_close(u - u[0], torch.arange(n, dtype=torch.float64) / n)
        assert 0 < u[0] <= 1 / n + 1e-12
        t = sample_t(u, *interval)
        assert t.dtype == torch.float32 and (t > 0).all() and (t >= interval[0]).all() and (t <= interval[1]).all()
        out = corrupt(captions([5] * n), u, t_min=interval[0], t_max=interval[1])
        assert out.weight.isfinite().all() and torch.equal(out.weight >= 1, out.loss_mask)
        assert not out.weight[~out.loss_mask].any()


@examples(100)
@given(st.integers(0, 10 ** 7), st.integers(1, 99))
def test_fixed_times_cover_the_interval_evenly_from_any_index_on_however_they_are_batched(first, cut):
    u = golden_ratio_points(first, 100)
    assert torch.equal(torch.cat([golden_ratio_points(first, cut), golden_ratio_points(first + cut, 100 - cut)]), u)
    counts = torch.histc(u, bins=10, min=0, max=1)
    assert ((u > 0) & (u <= 1)).all() and counts.min() >= 8 and counts.max() <= 12


@pytest.mark.parametrize("interval", INTERVALS)
def test_expected_weight_is_the_valid_mask(interval):
    """E[1{u < t} / t] = 1 for every t > 0, whatever the distribution of t."""
    text = captions([2, 5, 12, 7])
    draws = 4000
    out = corrupt(text.repeat(draws, 1), shuffled_u(draws * len(text)), seed=2, t_min=interval[0], t_max=interval[1])
    mean = out.weight.view(draws, *text.shape).mean(0)
    # The weight has mean 1 and, given t, variance 1/t - 1; averaged over uniform t the variance of one draw is
    # log(t_max/t_min)/(t_max-t_min) - 1. For t_min = 0 that diverges: the tail is cut where 1 draw in 10^4 falls.
    low = max(interval[0], 1e-4)
    spread = math.log(interval[1] / low) / (interval[1] - low) - 1 if interval[1] > low else 1 / low - 1
    tolerance = 5 * math.sqrt(spread / draws) + 1e-6
    assert (mean - target_tokens(text, VOCAB).float()).abs().max() < tolerance


def test_cappa_reads_one_sample_in_four_left_to_right():
    text = captions([9] * 16)
    out, target = corrupt(text, stratified_uniform(16, 0.5), "cappa"), target_tokens(text, VOCAB)
    assert out.causal.sum() == 4 and torch.equal(out.weight, target.float())
    assert torch.equal(out.text, text.masked_fill(target & ~out.causal[:, None], mask_id(VOCAB)))
    assert torch.equal(out.t, 1 - out.causal.float())


def test_tokens_that_are_not_weighted_weigh_1():
    assert loss_weight(torch.tensor([0.25]), "none").tolist() == [1.0]


def test_a_loss_that_is_no_longer_of_each_token_is_refused():
    assert "losses [] of 2 tokens" in refused(ValueError, CaptionLoss(), torch.ones(()), torch.ones(2), torch.ones(1))


def exact_nelbo(model, image, text) -> float:
    """Every mask of a caption, weighted as Eq. 5 with t in (0, 1] weights it."""
    return -eq_8(mask_values(model, image[0], text[0]))


def test_loss_is_an_unbiased_estimate_of_the_exact_nelbo():
    model = tiny_captioner(t_min=0.0)
    text, image = captions([5]), images(1)  # SOT and 4 target tokens
    draws, estimates = 12000, []
    with torch.no_grad():
        for u in shuffled_u(draws, seed=5).split(2000):
            many = text.expand(len(u), -1)
            prepared = pack(many, model.corrupt(many, u, seeded(int(u[0] * 1e6))), VOCAB)
            got = model(image.expand(len(u), -1, -1, -1), prepared)
            estimates += prepared.sum_rows(got["token_weight"] * got["token_nll"])
    estimates, exact = torch.stack(estimates), exact_nelbo(model, image, text)
    # t is stratified, so the error is below that of independent draws, which the sample variance measures.
    standard_error = estimates.std() / math.sqrt(draws)
    assert abs(estimates.mean() - exact) < 4 * standard_error
    assert standard_error < 0.04 * exact  # tight enough to notice a wrong weight


def test_what_one_view_hides_the_other_shows():
    text, u = captions([5, 3, 12]), torch.tensor([0.5, 1.0, 0.1])
    out, target = corrupt(text, u, "complementary", seed=3, t_min=0.2, t_max=0.6), target_tokens(text, VOCAB)
    first, second = out.loss_mask[::2], out.loss_mask[1::2]
    assert torch.equal(first ^ second, target) and not (first & second).any() and first.any() and second.any()
    assert_close(out.t, torch.tensor([0.4, 0.6, 0.6, 0.4, 0.24, 0.76]))
    assert torch.equal(out.text, text.repeat_interleave(2, 0).masked_fill(out.loss_mask, mask_id(VOCAB)))
    assert torch.equal(out.target, target.repeat_interleave(2, 0))
    assert_close(out.weight, out.loss_mask / out.t[:, None])
    assert not torch.equal(corrupt(text, u, "complementary", seed=4, t_min=0.2, t_max=0.6).loss_mask, out.loss_mask)


def test_two_views_are_masked_independently_each_by_its_own_t():
    draws, text = 20000, captions([6])
    out = corrupt(text.expand(draws, -1), shuffled_u(draws), "two-views", t_min=0.3, t_max=0.7)
    target = target_tokens(text, VOCAB)[0]
    for view in (0, 1):
        assert (out.weight[view::2].mean(0) - target.float()).abs().max() < 0.05
    both = (out.loss_mask[::2] & out.loss_mask[1::2])[:, target].float().mean()
    assert both.item() == pytest.approx(0.25 - 0.4 ** 2 / 12, abs=0.01)  # E[t (1 - t)], t uniform on [0.3, 0.7]


def test_two_views_look_at_one_image_and_give_the_mean_of_their_losses():
    """Against each view alone, as a batch of ordinary captions with the image repeated."""
    model = tiny_captioner("complementary", t_min=0.3, t_max=0.7)
    text, image = captions([5, 9, 7]), images(3)
    corrupted = model.corrupt(text)
    looks = []
    model.visual.register_forward_hook(lambda module, args, out: looks.append(len(args[0])))
    views = (NoisedCaptions(*(x[view::2] if isinstance(x, torch.Tensor) else x for x in corrupted)) for view in (0, 1))
    both, *alone = (model(image, pack(text, rows, VOCAB)) for rows in (corrupted, *views))
    assert looks == [3] * 3
    assert_close(both["length_nll"], alone[0]["length_nll"])
    loss, *losses = (CaptionLoss()(**out | {"length_nll": None}) for out in (both, *alone))
    assert_close(loss, sum(losses) / 2, rtol=1e-5, atol=0)


@pytest.mark.parametrize("objective", ["mdc", "complementary", "two-views", "mcd"])
def test_the_bound_is_of_all_times_whatever_the_interval_trained(objective):
    u = stratified_uniform(100, 0.5)
    found = tiny_captioner(objective).corrupt_nelbo(captions([6] * 100), u, seeded(0))
    assert torch.allclose(found.t.double(), u, atol=0.006)  # diffusion in steps rounds them up


def twelve_thousand(model, image, text) -> dict[str, float]:
    """The validation of a caption as many times."""
    return nelbo(model, [(image.expand(1000, -1, -1, -1), text.expand(1000, -1))] * 12, "cpu")


@pytest.mark.parametrize("objective", ["mdc", "arc", "cappa"])
def test_validation_is_the_nelbo_whatever_the_interval_trained(objective):
    """Against enumeration (mdc) and the exact likelihood (the others)."""
    model = tiny_captioner(objective)
    text, image = captions([5]), images(1)
    exact, tolerance = (exact_nelbo(model, image, text), 0.03) if objective == "mdc" else (
        -model.log_likelihood(image, text, "autoregressive").item(), 1e-5)
    assert twelve_thousand(model, image, text)["nelbo_per_caption"] == pytest.approx(exact, rel=tolerance)


@pytest.mark.parametrize("objective", ["mdc", "arc", "mcd", "mcd-replace", "mcd-absorbing", "block-diffusion"])
def test_validation_is_of_as_many_samples_as_are_asked_for_whatever_the_batch_size(objective):
    mixture = {"block_sizes": [2, 3]} if objective == "block-diffusion" else {}
    model, lengths, image = tiny_captioner(objective, **mixture), [5, 9, 12, 4, 7, 3, 8], images(7)
    text = captions(lengths)
    for limit in (2, 3, 5, 9):
        right = nelbo(model, [(image[:limit], text[:limit])], "cpu")
        number = np.mean(lengths[:limit]) - 1  # without SOT, and without what fills a block
        assert right["nelbo_per_caption"] / right["nelbo_per_token"] == pytest.approx(number)
        for size in (1, 2, 3, 7):
            batches = zip(image.split(size), text.split(size), strict=True)
            # The relative error of a perplexity is the absolute one of its logarithm, some nats.
            assert nelbo(model, batches, "cpu", limit=limit) == pytest.approx(right, rel=1e-4)


def test_validation_of_mask_and_replace_is_the_bound_prior_included(monkeypatch):
    model, text, image = tiny_captioner("mcd-replace"), captions([5]), images(1)
    found = twelve_thousand(model, image, text)
    expected = -model.log_likelihood(image, text, "bound", num_samples=20000).item()
    assert found["nelbo_per_caption"] == pytest.approx(expected, rel=0.03)
    monkeypatch.setattr(validation, "prior_kl", lambda schedule: 2.0 + mask_replace.prior_kl(schedule))
    more = twelve_thousand(model, image, text)
    assert more["nelbo_per_token"] - found["nelbo_per_token"] == pytest.approx(2.0, rel=1e-5)
    assert more["nelbo_per_caption"] == pytest.approx(4 * more["nelbo_per_token"], rel=1e-5)  # SOT is not counted


def test_nobody_else_compares_the_name_of_an_objective():
    """The row of an objective has all of its properties.

    If another file compared a name, a new objective would be missed there.
    """
    for path in (path for folder in ("src", "clip_benchmark_ext", "benchmarks", "experiments")
                 for path in (REPO / folder).rglob("*.py")):
        if path.parent.name not in ("objectives", "extras", "foreign") and path.name != "configs.py":
            for node in ast.walk(ast.parse(path.read_text())):
                # "visual" is an image tower, too, and "concept" a folder of scenes
                named = isinstance(node, ast.Constant) and node.value in OBJECTIVES.keys() - {"visual", "concept"}
                assert not named, f"{path.relative_to(REPO)}:{node.lineno} names {node.value!r}"


@pytest.mark.parametrize("objective", ["mcd", "mcd-absorbing", "mcd-replace"])
def test_diffusion_in_steps_trains_on_the_steps_of_its_interval(objective):
    found = corrupt(captions([4] * 50), stratified_uniform(50, 0.3), objective, t_min=0.5, t_max=0.75)
    assert (100 * found.t).round().sort().values.tolist() == [step for step in range(51, 76) for _ in (1, 2)]
    for step in range(1, 101):  # one time, as BERT's, is its own step, also where 100 * t rounds up
        found = corrupt(captions([4]), stratified_uniform(1, 0.3), objective, t_min=step / 100, t_max=step / 100)
        assert found.t.item() == pytest.approx(step / 100)


@pytest.mark.parametrize("objective", ["mdc", "arc", "mcd-absorbing"])
def test_the_loss_of_a_token_is_of_float32_where_logits_are_not(objective):
    logits = torch.randn(9, VOCAB, generator=seeded(0)).mul(3).bfloat16()
    places = torch.arange(9)
    predicted = Predicted(places, places, places, torch.full((9,), VOCAB), torch.ones(9), torch.ones(9))
    expected = -logits.double().log_softmax(1)[places, places]
    found = OBJECTIVES[objective].token_loss(logits, predicted) * (100 if objective == "mcd-absorbing" else 1)
    assert found.dtype == torch.float32 and torch.allclose(found.double(), expected, rtol=1e-4)

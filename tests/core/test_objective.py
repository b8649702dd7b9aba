"""Claims about the forward process, time and the loss (Eqs. 1, 4, 5, Algorithm 1)."""
import ast
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import REPO, VOCAB, captions, images, tiny_captioner

from open_clip_mdc.integration import validation
from open_clip_mdc.integration.validation import nelbo
from open_clip_mdc.objectives import replace_process as mask_replace
from open_clip_mdc.objectives.config import CaptionCfg
from open_clip_mdc.objectives.loss import CaptionLoss
from open_clip_mdc.objectives.masked import forward_process, loss_weight, sample_t
from open_clip_mdc.objectives.registry import OBJECTIVES, Objective
from open_clip_mdc.objectives.times import golden_ratio_points, stratified_uniform
from open_clip_mdc.text.packing import NoisedCaptions, Predicted, pack
from open_clip_mdc.text.special_tokens import mask_id, target_tokens, valid_tokens

INTERVALS = [(0.0, 1.0), (0.3, 0.8), (0.4, 0.9), (0.5, 1.0), (0.15, 0.15), (1.0, 1.0)]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def corrupt(text, u, objective="mdc", seed=0, **cfg) -> NoisedCaptions:
    return OBJECTIVES[objective].corrupt(text, VOCAB, CaptionCfg(objective, **cfg), u, generator(seed))


def shuffled_u(n: int, u0: float = 0.5, seed: int = 1) -> torch.Tensor:
    return stratified_uniform(n, u0)[torch.randperm(n, generator=generator(seed))]


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_t_is_systematic_over_the_ranks(interval, world_size):
    t_min, t_max = interval
    batch, u0 = 8, 0.37
    t = torch.cat([sample_t(stratified_uniform(batch, u0, rank, world_size), t_min, t_max)
                   for rank in range(world_size)])
    n = batch * world_size
    assert t.dtype == torch.float32 and (t >= t_min).all() and (t <= t_max).all()
    if t_min < t_max:
        stratum = ((t.double() - t_min) / (t_max - t_min) * n).floor().long()
        assert sorted(stratum.tolist()) == list(range(n))  # one sample in each stratum of the global batch
        for rank in range(world_size):  # and each rank covers the interval by itself
            own = stratum[rank * batch:(rank + 1) * batch] // world_size
            assert sorted(own.tolist()) == list(range(batch))


@pytest.mark.parametrize("u0", [0.0, 0.5, 1 - 2 ** -24, 1 - 2 ** -30, 1 - 2 ** -53])
def test_t_never_reaches_zero_and_no_weight_is_infinite_or_nan(u0):
    """1 - alpha(t) is 0 in float32 for t < 2^-25: an infinite weight of a token that is not masked."""
    u = stratified_uniform(4, u0)
    assert (sample_t(u, 0.0, 1.0) > 0).all()
    out = corrupt(captions([5, 6, 7, 8]), u, t_min=0.0)
    assert out.weight.isfinite().all() and (out.weight[~out.loss_mask] == 0).all()
    assert (out.weight[out.loss_mask] >= 1).all()


def test_the_loss_of_the_smallest_t_is_finite():
    model = tiny_captioner(t_min=0.0)
    text = captions([5, 6])
    out = model(images(2), pack(text, model.corrupt(text, stratified_uniform(2, 1 - 2 ** -53)), VOCAB))
    assert CaptionLoss()(**out).isfinite()


@pytest.mark.parametrize("first", [0, 1000, 10 ** 7])
def test_fixed_times_cover_the_interval_evenly_from_any_index_on(first):
    u = golden_ratio_points(first, 100)
    assert ((u > 0) & (u <= 1)).all()
    counts = torch.histc(u, bins=10, min=0, max=1)
    assert counts.min() >= 9 and counts.max() <= 11
    assert torch.equal(torch.cat([golden_ratio_points(first, 37), golden_ratio_points(first + 37, 63)]), u)


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


def test_forward_process_masks_each_token_with_probability_t():
    text = captions([12] * 2000)
    t = torch.full((2000,), 0.7)
    noisy, masked = forward_process(text, target_tokens(text, VOCAB), t, VOCAB, generator(0))
    share = masked[:, 1:].float().mean()
    assert abs(share - 0.7) < 5 * math.sqrt(0.7 * 0.3 / (2000 * 11))
    assert (noisy[masked] == mask_id(VOCAB)).all() and (noisy[~masked] == text[~masked]).all()


@pytest.mark.parametrize("objective", ["mdc", "arc", "cappa"])
def test_sot_is_given_eot_is_learnt_padding_is_nowhere(objective):
    text = captions([2, 5, 9] * 200)
    out = corrupt(text, shuffled_u(len(text), 0.1, 3), objective, seed=4, t_min=0.0)
    valid = valid_tokens(text, VOCAB)
    assert (out.text[:, 0] == text[:, 0]).all() and (out.weight[:, 0] == 0).all()
    assert (out.text[~valid] == text[~valid]).all() and (out.weight[~valid] == 0).all()
    at_eot = valid & ~F.pad(valid[:, 1:], (0, 1))
    assert (out.weight[at_eot] > 0).any()
    assert (out.target == target_tokens(text, VOCAB)).all() and ((out.weight > 0) == out.loss_mask).all()


def test_interval_one_is_parallel_decoding():
    text = captions([4, 9, 12])
    out = corrupt(text, stratified_uniform(3, 0.3), t_min=1.0)
    target = target_tokens(text, VOCAB)
    assert (out.text == text.masked_fill(target, mask_id(VOCAB))).all()
    assert (out.weight == target.float()).all()


def test_cappa_reads_one_sample_in_four_left_to_right():
    text = captions([9] * 16)
    out = corrupt(text, stratified_uniform(16, 0.5), "cappa")
    assert out.causal.sum() == 4
    assert (out.text[out.causal] == text[out.causal]).all()
    assert (out.text[~out.causal][:, 1:9] == mask_id(VOCAB)).all()
    assert torch.equal(out.t, (out.text == mask_id(VOCAB)).sum(1) / target_tokens(text, VOCAB).sum(1))
    assert (out.weight == target_tokens(text, VOCAB).float()).all()


def test_weights_of_the_table():
    t = torch.tensor([0.25, 0.5, 1.0])
    assert loss_weight(t).tolist() == [4.0, 2.0, 1.0]
    assert loss_weight(t, "none").tolist() == [1.0, 1.0, 1.0]


def test_loss_is_the_hand_computed_sum():
    loss = CaptionLoss()
    nll = torch.tensor([[0.0, 2.0, 3.0], [0.0, 5.0, 0.0]])
    weight = torch.tensor([[0.0, 2.0, 0.0], [0.0, 4.0, 0.0]])
    num_target = torch.tensor([2.0, 1.0])
    assert loss(nll, weight, num_target).item() == pytest.approx((2 * 2 + 4 * 5) / 3)
    assert loss(nll, weight, num_target, output_dict=True).keys() == {"caption_loss"}


def exact_nelbo(model, image, text) -> float:
    """Every mask of a caption, weighted as Eq. 5 with t in (0, 1] weights it.

    The NELBO of N tokens is the integral over t of 1/t * sum over masks M of t^|M| (1-t)^(N-|M|) * NLL(M), and
    int t^(m-1) (1-t)^(N-m) dt = (m-1)! (N-m)! / N!.
    """
    positions = target_tokens(text, VOCAB)[0].nonzero().flatten().tolist()
    n, exact = len(positions), 0.0
    with torch.no_grad():
        for m in range(1, n + 1):
            beta = math.factorial(m - 1) * math.factorial(n - m) / math.factorial(n)
            for hidden in itertools.combinations(positions, m):
                noisy = text.clone()
                noisy[0, list(hidden)] = mask_id(VOCAB)
                logp = model.logits(image, noisy, valid_tokens(text, VOCAB))[0].log_softmax(-1)
                exact -= beta * sum(logp[p, text[0, p]].item() for p in hidden)
    return exact


def test_loss_is_an_unbiased_estimate_of_the_exact_nelbo():
    model = tiny_captioner(t_min=0.0)
    text, image = captions([5]), images(1)  # SOT and 4 target tokens
    draws, estimates = 12000, []
    with torch.no_grad():
        for u in shuffled_u(draws, seed=5).split(2000):
            many = text.expand(len(u), -1)
            prepared = pack(many, model.corrupt(many, u, generator(int(u[0] * 1e6))), VOCAB)
            got = model(image.expand(len(u), -1, -1, -1), prepared)
            estimates.append(prepared.sum_rows(got["token_weight"] * got["token_nll"]))
    estimates, exact = torch.cat(estimates), exact_nelbo(model, image, text)
    # t is stratified, so the error is below that of independent draws, which the sample variance measures.
    standard_error = estimates.std() / math.sqrt(draws)
    assert abs(estimates.mean() - exact) < 4 * standard_error
    assert standard_error < 0.04 * exact  # tight enough to notice a wrong weight


def test_what_one_view_hides_the_other_shows():
    """By hand: ids 7 8 9 between SOT and EOT, each hidden in one of the two rows, EOT too, SOT and padding in none."""
    text = torch.tensor([[58, 7, 8, 9, 59, 0], [58, 5, 59, 0, 0, 0]])
    out = corrupt(text, torch.tensor([0.5, 1.0]), "complementary", seed=3, t_min=0.2, t_max=0.6)
    torch.testing.assert_close(out.t, torch.tensor([0.4, 0.6, 0.6, 0.4]))
    for b, n in ((0, 5), (1, 3)):
        first, second = out.text[2 * b].tolist(), out.text[2 * b + 1].tolist()
        assert first[0] == second[0] == 58 and first[n:] == second[n:] == text[b, n:].tolist()
        for a, c, clean in zip(first[1:n], second[1:n], text[b, 1:n].tolist(), strict=True):
            assert {a, c} == {60, clean}
    hidden = out.text == 60
    assert torch.equal(out.loss_mask, hidden)
    torch.testing.assert_close(out.weight, hidden / out.t[:, None])
    assert out.target.sum(1).tolist() == [4, 4, 2, 2]
    assert {tuple(corrupt(text, torch.tensor([0.5, 1.0]), "complementary", seed).loss_mask[0].tolist())
            for seed in range(20)} != {tuple(hidden[0].tolist())}


@pytest.mark.parametrize("objective", ["complementary", "two-views"])
def test_each_of_two_views_has_the_expected_weight_of_its_own_t(objective):
    draws, text = 20000, captions([6])
    out = corrupt(text.expand(draws, -1), shuffled_u(draws), objective, t_min=0.3, t_max=0.7)
    target = target_tokens(text, VOCAB)[0]
    for view in (0, 1):
        assert (out.weight[view::2].mean(0) - target.float()).abs().max() < 0.05
    both = out.loss_mask[::2] & out.loss_mask[1::2]
    expected = 0 if objective == "complementary" else 0.25 - 0.4 ** 2 / 12  # E[t (1 - t)], t uniform on [0.3, 0.7]
    assert both[:, target].float().mean().item() == pytest.approx(expected, abs=0.01)


def test_two_views_look_at_one_image_and_give_the_mean_of_their_losses():
    """Against each view alone, as a batch of ordinary captions with the image repeated."""
    model = tiny_captioner("complementary", t_min=0.3, t_max=0.7)
    text, image = captions([5, 9, 7]), images(3)
    corrupted = model.corrupt(text)
    looks = []
    hook = model.visual.register_forward_hook(lambda module, args, out: looks.append(len(args[0])))
    out = model(image, pack(text, corrupted, VOCAB))
    hook.remove()
    assert looks == [3] and out["length_nll"].shape == (3,)
    losses = []
    for view in (0, 1):
        rows = NoisedCaptions(*(x if isinstance(x, bool) else x[view::2] for x in corrupted))
        losses.append(CaptionLoss()(**model(image, pack(text, rows, VOCAB)), output_dict=True))
    both = CaptionLoss()(**out, output_dict=True)
    assert both["caption_loss"].item() == pytest.approx(sum(x["caption_loss"].item() for x in losses) / 2, rel=1e-5)
    assert both["length_loss"].item() == pytest.approx(losses[0]["length_loss"].item(), rel=1e-5)


@pytest.mark.parametrize("objective", ["mdc", "complementary", "two-views", "mcd"])
def test_the_bound_is_of_all_times_whatever_the_interval_trained(objective):
    u = stratified_uniform(100, 0.5)
    found = OBJECTIVES[objective].corrupt_full_interval(captions([6] * 100), VOCAB, u, generator(0))
    assert torch.allclose(found.t.double(), u, atol=0.006)  # diffusion in steps rounds them up


@pytest.mark.parametrize("objective", ["mdc", "arc", "cappa"])
def test_validation_is_the_nelbo_whatever_the_interval_trained(objective):
    """Against enumeration (mdc) and the exact likelihood (the others)."""
    model = tiny_captioner(objective)
    text, image = captions([5]), images(1)
    data = [(image.expand(1000, -1, -1, -1), text.expand(1000, -1))] * 12
    exact = exact_nelbo(model, image, text) if objective == "mdc" else \
        -model.log_likelihood(image, text, "autoregressive").item()
    tolerance = 0.03 if objective == "mdc" else 1e-5
    assert nelbo(model, data, "cpu")["nelbo_per_caption"] == pytest.approx(exact, rel=tolerance)


def test_validation_uses_as_many_samples_as_are_asked_for():
    model, text, image = tiny_captioner("mdc"), captions([5, 9, 12, 4, 7, 3, 8]), images(7)
    batches = list(zip(image.split(3), text.split(3), strict=True))
    for limit in (2, 3, 5, 9):
        right = nelbo(model, [(image[:limit], text[:limit])], "cpu")
        assert nelbo(model, batches, "cpu", limit=limit) == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize("objective", ["mdc", "arc", "mcd", "mcd-replace", "mcd-absorbing"])
def test_validation_is_the_same_for_every_batch_size(objective):
    model, text, image = tiny_captioner(objective), captions([5, 9, 12, 4, 7, 3, 8]), images(7)
    results = [nelbo(model, zip(image.split(size), text.split(size), strict=True), "cpu") for size in (1, 2, 3, 7)]
    for result in results[1:]:
        assert result == pytest.approx(results[0], rel=1e-5)


def test_validation_of_mask_and_replace_is_the_bound_prior_included(monkeypatch):
    model, text, image = tiny_captioner("mcd-replace"), captions([5]), images(1)
    data = [(image.expand(1000, -1, -1, -1), text.expand(1000, -1))] * 12
    found = nelbo(model, data, "cpu")
    expected = -model.log_likelihood(image, text, "bound", num_samples=20000).item()
    assert found["nelbo_per_caption"] == pytest.approx(expected, rel=0.03)
    monkeypatch.setattr(validation, "prior_kl", lambda schedule: 2.0 + mask_replace.prior_kl(schedule))
    more = nelbo(model, data, "cpu")
    assert more["nelbo_per_token"] - found["nelbo_per_token"] == pytest.approx(2.0, rel=1e-5)
    assert more["nelbo_per_caption"] == pytest.approx(4 * more["nelbo_per_token"], rel=1e-5)  # SOT is not counted


def test_an_objective_is_one_row(monkeypatch):
    """Whoever decodes, scores, validates and trains asks the row: masking exactly n tokens is a model without more."""
    def mask_count(text, vocab_size, cfg, u, generator=None) -> NoisedCaptions:
        target = target_tokens(text, vocab_size)
        n = (u * target.sum(1)).ceil()
        noise = torch.rand(text.shape, generator=generator).masked_fill(~target, 2.0)
        masked = target & (noise.argsort(1).argsort(1) < n[:, None])
        weight = torch.where(masked, (target.sum(1) / n)[:, None].float(), 0)
        return NoisedCaptions(text.masked_fill(masked, mask_id(vocab_size)), masked, weight, target, False, u.float())

    mdc = OBJECTIVES["mdc"]
    row = Objective(mask_count, mdc.corrupt_full_interval, mdc.token_loss, "any", mdc.scorers)
    monkeypatch.setitem(OBJECTIVES, "count", row)
    model, text, image = tiny_captioner("count"), captions([5, 9, 12]), images(3)
    CaptionLoss()(**model(image, text)).backward()
    assert not model.causal and (model.corrupt(text).weight.sum(1) > 0).all()
    assert model.generate(image, length=4).shape[0] == 3 and model.log_likelihood(image, text).isfinite().all()
    assert nelbo(model, [(image, text)], "cpu")["nelbo_per_token"] > 0


def test_nobody_else_compares_the_name_of_an_objective():
    """The row of an objective has all of its properties.

    If another file compared a name, a new objective would be missed there.
    """
    folders = ("src/open_clip_mdc", "clip_benchmark_ext", "benchmarks", "experiments")
    for path in (path for folder in folders for path in sorted((REPO / folder).rglob("*.py"))):
        if path.parent.name not in ("objectives", "extras") and path.name != "configs.py":
            for node in ast.walk(ast.parse(path.read_text())):
                named = isinstance(node, ast.Constant) and node.value in OBJECTIVES
                assert not named, f"{path.relative_to(REPO)}:{node.lineno} names {node.value!r}"


@pytest.mark.parametrize("objective", ["mcd", "mcd-absorbing", "mcd-replace"])
def test_diffusion_in_steps_trains_on_the_steps_of_its_interval(objective):
    text = captions([4] * 50)
    cfg = CaptionCfg(objective=objective, t_min=0.5, t_max=0.75)
    found = OBJECTIVES[objective].corrupt(text, VOCAB, cfg, stratified_uniform(50, 0.3), generator(0))
    steps, often = (100 * found.t).round().int().unique(return_counts=True)
    assert steps.tolist() == list(range(51, 76)) and (often == 2).all()
    for step in range(1, 101):  # one time, as BERT's, is its own step, also where 100 * t rounds up
        cfg = CaptionCfg(objective=objective, t_min=step / 100, t_max=step / 100)
        found = OBJECTIVES[objective].corrupt(text[:1], VOCAB, cfg, torch.ones(1, dtype=torch.float64), generator(0))
        assert found.t.item() == pytest.approx(step / 100)


@pytest.mark.parametrize("objective", ["mdc", "arc", "mcd-absorbing"])
def test_the_loss_of_a_token_is_of_float32_where_logits_are_not(objective):
    logits = torch.randn(9, VOCAB, generator=generator(0)).mul(3).bfloat16()
    predicted = Predicted(*(torch.zeros(9, dtype=torch.long) for _ in Predicted._fields))._replace(
        token=torch.arange(9), read=torch.full((9,), VOCAB), t=torch.full((9,), 1.0))
    expected = -logits.double().log_softmax(1)[torch.arange(9), torch.arange(9)]
    found = OBJECTIVES[objective].token_loss(logits, predicted) * (100 if objective == "mcd-absorbing" else 1)
    assert found.dtype == torch.float32 and torch.allclose(found.double(), expected, rtol=1e-4)

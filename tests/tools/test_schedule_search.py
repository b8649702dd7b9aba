"""Claims about gradient noise over t and the interval proposed from it."""
import itertools

import numpy as np
import open_clip
import pytest
import torch
from conftest import VOCAB, captions, images, read_json, tiny_captioner, write_run
from PIL import Image

import open_clip_mdc
from experiments import gradient_noise
from experiments import schedule_search as tool
from experiments.gradient_noise import GROUPS, MIDDLES, Measurement, Moments, interval_scores, moments
from experiments.schedule_search import per_t, search
from open_clip_mdc.text.packing import NoisedCaptions, pack
from open_clip_mdc.text.special_tokens import mask_id, target_tokens


def encoder_gradients(model, image, text):
    """Gradient of the masked nats for every mask of one caption, [masks, D], and the number masked, [masks]."""
    valid = target_tokens(text, VOCAB)
    positions = valid[0].nonzero().squeeze(1)
    gradients, counts = [], []
    for bits in itertools.product((False, True), repeat=len(positions)):
        masked = torch.zeros_like(valid)
        masked[0, positions] = torch.tensor(bits)
        corrupted = NoisedCaptions(text.masked_fill(masked, mask_id(VOCAB)), masked, masked.float(), valid, False,
                              torch.ones(1))
        out = model(image, pack(text, corrupted, VOCAB))
        parts = torch.autograd.grad(out["token_nll"].sum(), list(model.visual.parameters()), allow_unused=True,
                                    materialize_grads=True)
        gradients.append(torch.cat([part.flatten() for part in parts]))
        counts.append(sum(bits))
    return torch.stack(gradients).double(), np.array(counts), len(positions)


@pytest.fixture(scope="module")
def enumerated():
    model, image, text = tiny_captioner(), images(1), captions([5])
    return model, image, text, *encoder_gradients(model, image, text)


def exact_moments(gradients, counts, length, times):
    """Mean gradient at each t and trace of its covariance, summed over all masks."""
    chance = np.stack([t ** counts * (1 - t) ** (length - counts) for t in times])
    mean = torch.from_numpy(chance) @ gradients
    second = chance @ gradients.square().sum(1).numpy()
    return (mean @ mean.T).numpy(), second - mean.square().sum(1).numpy()


@pytest.mark.parametrize("cap", [2 ** 20, 20_000])
def test_measured_moments_are_those_summed_over_all_masks_also_on_some_coordinates(enumerated, cap, monkeypatch):
    model, image, text, *masks = enumerated
    monkeypatch.setattr(gradient_noise, "MAX_COORDINATES", cap)
    times, size = np.array([0.3, 0.8]), 4
    data = itertools.repeat((image.repeat(size, 1, 1, 1), text.repeat(size, 1)))
    measured = gradient_noise.measure(model, data, num_batches=8, seed=0, times=times)
    scale = min(cap, masks[0].shape[1]) / masks[0].shape[1]
    products, noise = exact_moments(*masks, times)
    estimate = moments(measured)
    left_out = [moments(measured, group) for group in range(GROUPS)]
    for name, exact in (("products", scale * products), ("noise", scale * noise)):
        error = np.sqrt((GROUPS - 1) * np.var([getattr(m, name) for m in left_out], axis=0))
        slack = 0 if scale == 1 else 0.1 * np.abs(exact)  # which coordinates were drawn
        assert (np.abs(getattr(estimate, name) - exact) < 4 * error + slack).all()
        assert (error < 0.4 * exact.max()).all()  # so that the line above says something


def test_moments_are_unbiased_over_all_possible_draws():
    outcomes = np.array([[[1.0, 0.0], [2.0, 1.0]], [[-1.0, 3.0], [0.0, 1.0]], [[0.5, 0.5], [7.0, -2.0]]])  # [3, T, D]
    products, noise = np.zeros((2, 2)), np.zeros(2)
    draws = list(itertools.product(range(3), repeat=6))  # 3 groups of one micro-batch of 2 images
    for draw in draws:
        batches = outcomes[np.array(draw).reshape(3, 2)].mean(1)
        cross, within = (np.einsum(f"gtd,{h}sd->g{h if h != 'g' else ''}ts", batches, batches) for h in "hg")
        estimate = moments(Measurement(cross, within, 1, 2, None, None, 1.0))
        products += estimate.products / len(draws)
        noise += estimate.noise / len(draws)
    mean = outcomes.mean(0)
    np.testing.assert_allclose(products, mean @ mean.T)
    np.testing.assert_allclose(noise, ((outcomes - mean) ** 2).sum(2).mean(0))


def unweighted(products, noise) -> Moments:
    """Moments without the weight, of the mean products and the noise (averaged over a bin) given with it."""
    low, high = gradient_noise.EDGES[:-1].clip(gradient_noise.T_FLOOR), gradient_noise.EDGES[1:]
    return Moments(products * np.outer(MIDDLES, MIDDLES), noise * MIDDLES * (high - low) / np.log(high / low))


def row(scores, low, high):
    return scores[(scores.t_min == low) & (scores.t_max == high) & (scores.weight == "inverse_t")].iloc[0]


def test_scores_of_bins_that_agree_in_direction_are_the_hand_computed_ones():
    noise = np.array([64.0, 32, 16, 8, 8, 4, 4, 4, 4, 4])
    scores = interval_scores(unweighted(np.full((10, 10), 2.0), noise))
    for low, high, mean_noise in ((0.0, 1.0, 14.8), (0.5, 1.0, 4.0), (0.3, 0.8, 5.6), (0.9, 1.0, 4.0)):
        found = row(scores, low, high)
        assert found[["snr", "cosine", "progress"]].tolist() == pytest.approx([2 / mean_noise, 1, 2 / (2 + mean_noise)])
    assert len(scores) == 2 * 55


def test_bias_counts_against_an_interval_and_spread_over_t_as_noise():
    # Five bins pull along x, five along y; the aim is their mean (1, 1) / 2, half of it at right angles to each half.
    means = np.array([[1.0, 0.0]] * 5 + [[0.0, 1.0]] * 5)
    scores = interval_scores(unweighted(means @ means.T, np.full(10, 3.0)))
    half, whole = row(scores, 0.5, 1.0), row(scores, 0.0, 1.0)
    assert half[["snr", "cosine", "progress"]].tolist() == pytest.approx([1 / 3, 0.5 ** 0.5, 0.5 / 4])
    # |m|^2 = 1/2, E|g|^2 = 3 + 1, so tr Cov = 3.5: as much progress although twice as noisy
    assert whole[["snr", "cosine", "progress"]].tolist() == pytest.approx([0.5 / 3.5, 1, 0.5 / 4])


def test_scores_of_zero_have_no_finite_error_and_are_never_tied():
    left_out = np.array([[1.0, 2.0, 0.0], [1.0, 4.0, 3.0], [2.0, 2.0, 3.0]])
    with np.errstate(all="raise"):
        errors = gradient_noise.log_ratio_error(left_out, 0)
    assert errors[:2] == pytest.approx(gradient_noise.log_ratio_error(left_out[:, :2], 0)) and np.isinf(errors[2])
    means = np.array([1.0] * 9 + [-3.0])
    measured = rigged([9.0] * 9 + [0.01])
    cross = measured.cross * np.outer(means, means)
    scores = search(measured._replace(cross=cross, products=measured.products * np.outer(means, means)), 0.1)
    away = row(scores, 0.9, 1.0)
    assert (away.gain, away.gain_error, away.tied, away.proposed) == (0, np.inf, False, False)


def rigged(noise, unsteady=0.0) -> Measurement:
    """Return gradients with equal means and exactly the given noise.

    `unsteady` is how much groups differ for t > 0.5.
    """
    size, n = 10, 10 * GROUPS  # micro-batches of one image in a group and in all
    exact = unweighted(np.ones((10, 10)), np.asarray(noise, dtype=float))
    within = size * (exact.products + np.diag(exact.noise))
    factor = 1 + unsteady * np.outer(np.resize([1, -1], GROUPS), MIDDLES > 0.5)
    cross = size ** 2 * np.einsum("gt,hs->ghts", factor, factor) * exact.products
    cross[np.arange(GROUPS), np.arange(GROUPS)] += within - size * exact.products
    ones = np.ones((10, n))
    return Measurement(cross, np.repeat(within[None], GROUPS, 0), size, 1, ones, ones, 2.0)


def test_the_quietest_interval_of_the_least_width_is_proposed():
    noise = [9, 9, 9, 1, 1, 1, 1, 9, 9, 0.1]
    for width, best in ((0.1, [0.9, 1.0]), (0.4, [0.3, 0.7]), (1.0, [0.0, 1.0])):
        scores = search(rigged(noise), width)
        chosen = scores[scores.proposed]
        assert chosen[["t_min", "t_max"]].to_numpy().tolist() == [best]
        assert chosen.weight.tolist() == ["inverse_t"]
    whole = row(scores, 0.0, 1.0)
    assert whole.gain == 1 and whole.gain_error == 0
    assert row(scores, 0.3, 0.7).gain == pytest.approx((1 + np.mean(noise)) / 2)  # |m|^2 + noise, of [0, 1] over its
    assert (scores.t_max - scores.t_min)[scores.tied].size == 0


def test_intervals_that_differ_less_than_their_error_are_called_tied():
    noise = [9, 9, 9, 9, 4.2, 4, 4, 4, 4, 4]
    for unsteady, tied in ((0.0, set()), (0.3, {(0.4, 0.9), (0.4, 1.0)})):
        scores = search(rigged(noise, unsteady), 0.5)
        assert (scores.t_min[scores.proposed].item(), scores.t_max[scores.proposed].item()) == (0.5, 1.0)
        found = set(zip(scores.t_min[scores.tied], scores.t_max[scores.tied], strict=True))
        assert tied <= found and bool(tied) == bool(found) and (0.5, 1.0) not in found


def test_the_error_is_the_jackknifes_of_the_log_ratio():
    left_out = np.array([[1.0, 2.0], [1.0, 4.0], [2.0, 2.0]])
    logs = np.log([2.0, 4.0, 1.0])
    expected = np.sqrt(2 / 3 * ((logs - logs.mean()) ** 2).sum())
    assert gradient_noise.log_ratio_error(left_out, 0) == pytest.approx([0, expected])


def test_a_mean_gradient_that_noise_hides_is_refused():
    with pytest.raises(ValueError, match="cannot be told from zero: raise --num-samples"):
        interval_scores(Moments(-np.ones((10, 10)), np.ones(10)))


def test_the_table_over_t_holds_means_and_variances_with_and_without_the_weight():
    measured = rigged([4.0] * 10)
    nll = np.tile([1.0, 3.0], (10, 40))
    table = per_t(measured._replace(nll=nll, masked=np.full((10, 80), 4.0)))
    assert table.t.tolist() == pytest.approx(MIDDLES.tolist())
    assert table.token_nll.tolist() == pytest.approx([0.5] * 10)
    first = table.iloc[0]  # t = 0.05 and 2 tokens a caption
    assert first.loss_none == pytest.approx(1) and first.loss_inverse_t == pytest.approx(20)
    assert first.loss_variance_none == pytest.approx(80 / 79 / 4)
    assert first.loss_variance_inverse_t == pytest.approx(400 * 80 / 79 / 4)
    assert first.gradient_squared_mean_inverse_t == pytest.approx(1 / 4)
    assert first.gradient_variance_inverse_t == pytest.approx(400 * first.gradient_variance_none)


@pytest.fixture
def schedule_search(scenes, here):
    """Runs the command on a network of the whole interval in an empty folder, and returns what it wrote as JSON."""
    open_clip_mdc.register()
    torch.manual_seed(0)
    write_run(here / "run", open_clip.create_model("MDC-ViT-Ti-8").state_dict(), model="MDC-ViT-Ti-8-t0.0-1.0")

    def call(*flags, data=scenes / "train/{00000..00007}.tar"):
        tool.main(["--pretrained", "run", "--train-data", str(data), "--batch-size", "2", "--num-samples", "16",
                   "--device", "cpu", *map(str, flags)])
        return read_json(here / "schedule.json")
    return call


def test_the_command_measures_and_writes_table_numbers_and_figure(schedule_search, tmp_path, capsys):
    first = schedule_search()
    printed = capsys.readouterr().out
    proposal = first["proposal"]
    name = f"[{proposal['t_min']:.1f}, {proposal['t_max']:.1f}]"
    assert f"Proposed: t in {name}" in printed
    proposed = printed[printed.index("open_clip_train --model "):].split()[2]
    cfg = open_clip.get_model_config(proposed)["caption_cfg"]
    assert proposed.startswith("MDC-ViT-Ti-8") and [cfg["t_min"], cfg["t_max"]] == pytest.approx(
        [proposal["t_min"], proposal["t_max"]])
    for paper in ("[0.0, 1.0]", "[0.3, 0.8]", "[0.4, 0.9]", "[0.5, 1.0]"):
        assert paper in printed
    assert proposal["t_max"] - proposal["t_min"] >= 0.499 and proposal["progress"] > 0
    assert [round(line["t"], 2) for line in first["per_t"]] == MIDDLES.round(2).tolist()
    assert all(np.isfinite(list(line.values())).all() for line in first["per_t"])
    assert len(first["intervals"]) == 110 and first["num_samples"] == 16
    with Image.open(tmp_path / "schedule.png") as image:
        assert image.format == "PNG"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "schedule.json", "schedule.png"]
    assert schedule_search() == first

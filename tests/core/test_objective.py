"""Claims about the forward process, time and the loss (Eqs. 1, 4, 5, Algorithm 1)."""
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import VOCAB, captions, images, tiny_captioner

from open_clip_mdc.objective import CaptionLoss, Corrupted, corrupt, forward_process, loss_weight, sample_t
from open_clip_mdc.tokens import mask_id, target_tokens, valid_tokens

INTERVALS = [(0.0, 1.0), (0.3, 0.8), (0.4, 0.9), (0.5, 1.0), (0.15, 0.15), (1.0, 1.0)]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_t_is_systematic_over_the_ranks(interval, world_size):
    t_min, t_max = interval
    batch, u0 = 8, 0.37
    t = torch.cat([sample_t(batch, t_min, t_max, u0, rank, world_size) for rank in range(world_size)])
    n = batch * world_size
    assert t.dtype == torch.float32 and (t >= t_min).all() and (t <= t_max).all()
    if t_min < t_max:
        stratum = ((t.double() - t_min) / (t_max - t_min) * n).floor().long()
        assert sorted(stratum.tolist()) == list(range(n))  # one sample in each stratum of the global batch
        for rank in range(world_size):  # and each rank covers the interval by itself
            own = stratum[rank * batch:(rank + 1) * batch] // world_size
            assert sorted(own.tolist()) == list(range(batch))


def test_t_never_reaches_zero():
    for u0 in (0.0, 0.5, 1 - 2 ** -53):
        assert (sample_t(4, 0.0, 1.0, u0) > 0).all()


@pytest.mark.parametrize("interval", INTERVALS)
def test_expected_weight_is_the_valid_mask(interval):
    """E[1{u < t} / t] = 1 for every t > 0, whatever the law of t."""
    text = captions([2, 5, 12, 7])
    draws = 4000
    t = sample_t(draws * len(text), *interval, u0=0.5)[torch.randperm(draws * len(text), generator=generator(1))]
    out = corrupt(text.repeat(draws, 1), VOCAB, t, "mdc", "inverse_t", generator(2))
    mean = out.token_weight.view(draws, *text.shape).mean(0)
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
    t = sample_t(len(text), 0.0, 1.0, 0.1)[torch.randperm(len(text), generator=generator(3))]
    out = corrupt(text, VOCAB, t, objective, "inverse_t", generator(4))
    valid = valid_tokens(text, VOCAB)
    assert (out.text[:, 0] == text[:, 0]).all() and (out.token_weight[:, 0] == 0).all()
    assert (out.text[~valid] == text[~valid]).all() and (out.token_weight[~valid] == 0).all()
    at_eot = valid & ~F.pad(valid[:, 1:], (0, 1))
    assert (out.token_weight[at_eot] > 0).any()
    assert (out.token_target == target_tokens(text, VOCAB)).all()


def test_interval_one_is_parallel_decoding():
    text = captions([4, 9, 12])
    out = corrupt(text, VOCAB, sample_t(3, 1.0, 1.0, 0.3), "mdc", "inverse_t", generator(0))
    scored = target_tokens(text, VOCAB)
    assert (out.text == text.masked_fill(scored, mask_id(VOCAB))).all()
    assert (out.token_weight == scored.float()).all()


def test_cappa_reads_one_sample_in_four_left_to_right():
    text = captions([9] * 16)
    out = corrupt(text, VOCAB, sample_t(16, 0.0, 1.0, 0.5), "cappa", "inverse_t", generator(0))
    assert out.causal.sum() == 4
    assert (out.text[out.causal] == text[out.causal]).all()
    assert (out.text[~out.causal][:, 1:9] == mask_id(VOCAB)).all()
    assert (out.token_weight == target_tokens(text, VOCAB).float()).all()


def test_weights_of_the_table():
    t = torch.tensor([0.25, 0.5, 1.0])
    assert loss_weight(t).tolist() == [4.0, 2.0, 1.0]
    assert loss_weight(t, "none").tolist() == [1.0, 1.0, 1.0]


def test_loss_is_the_hand_computed_sum():
    loss = CaptionLoss()
    nll = torch.tensor([[0.0, 2.0, 3.0], [0.0, 5.0, 0.0]])
    weight = torch.tensor([[0.0, 2.0, 0.0], [0.0, 4.0, 0.0]])
    valid = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    assert loss(nll, weight, valid).item() == pytest.approx((2 * 2 + 4 * 5) / 3)
    assert loss(nll, weight, valid, output_dict=True).keys() == {"caption_loss"}


def test_loss_is_an_unbiased_estimate_of_the_exact_nelbo():
    """Every mask of a 4-token caption, weighted as Eq. 5 with t in (0, 1] weights it, by a real tiny model.

    The NELBO of N tokens is the integral over t of 1/t * sum over masks M of t^|M| (1-t)^(N-|M|) * NLL(M), and
    int t^(m-1) (1-t)^(N-m) dt = (m-1)! (N-m)! / N!.
    """
    model = tiny_captioner()
    text, image = captions([5]), images(1)  # SOT and 4 scored tokens
    positions = target_tokens(text, VOCAB)[0].nonzero().flatten().tolist()
    n = len(positions)
    exact = 0.0
    with torch.no_grad():
        for m in range(1, n + 1):
            beta = math.factorial(m - 1) * math.factorial(n - m) / math.factorial(n)
            for hidden in itertools.combinations(positions, m):
                noisy = text.clone()
                noisy[0, list(hidden)] = mask_id(VOCAB)
                logp = model.logits(image, noisy, valid_tokens(text, VOCAB))[0].log_softmax(-1)
                exact -= beta * sum(logp[p, text[0, p]].item() for p in hidden)
        draws = 12000
        t = sample_t(draws, 0.0, 1.0, 0.5)[torch.randperm(draws, generator=generator(5))]
        out = corrupt(text.expand(draws, -1), VOCAB, t, "mdc", "inverse_t", generator(6))
        estimates = []
        for chunk in torch.arange(draws).split(2000):
            part = Corrupted(out.text[chunk], out.token_weight[chunk], out.token_target[chunk], False)
            got = model(image.expand(len(chunk), -1, -1, -1), text.expand(len(chunk), -1), part)
            estimates.append((got["token_weight"] * got["token_nll"]).sum(1))
    estimates = torch.cat(estimates)
    # t is stratified, so the error is below that of independent draws, which the sample variance measures.
    standard_error = estimates.std() / math.sqrt(draws)
    assert abs(estimates.mean() - exact) < 4 * standard_error
    assert standard_error < 0.04 * exact  # tight enough to notice a wrong weight

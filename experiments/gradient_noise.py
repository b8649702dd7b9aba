"""Measure mean and noise of the encoder's gradient at every t, and score intervals of t by them (compare Table 5).

At time t an image gives the random gradient g_t = weight(t) * d nll / d encoder, where nll is the sum over the
caption's masked tokens. Image and mask are random. `measure` collects sums. `moments` turns them into unbiased
estimates of m_t . m_s, with m_t = E g_t, and of tr Cov(g_t). `interval_scores` turns those into the criterion.

The weight 1/t makes the noise of (0, 1] infinite. For small t a caption of n tokens has one masked token with
probability n * t and else none. So E|g_t|^2 ~ n * |d|^2 / t for the gradient d of one token's nll, and the integral of
1/t diverges at 0, but only like a logarithm. Here t starts at T_FLOOR.

BD3-LM's clipped-schedule search (Arriola et al. 2025) takes the interval with the least variance of the NELBO. Here the
noise is that of the encoder's gradient, and the bias of an interval counts against it.

Dimensions: T values of t, G groups of K micro-batches each, B images of a micro-batch, D coordinates of the gradient.
"""
from collections.abc import Iterable
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from open_clip_mdc.models.captioner import Captioner
from open_clip_mdc.objectives.config import CaptionCfg
from open_clip_mdc.objectives.masked import loss_weight, masked_diffusion
from open_clip_mdc.progress import progress_bar
from open_clip_mdc.text.packing import pack
from open_clip_mdc.text.special_tokens import target_tokens

EDGES = np.linspace(0, 1, 11).round(1)
MIDDLES = (EDGES[:-1] + EDGES[1:]) / 2
# In the paper's batch of 1,024, with stratified t on (0, 1], the lowest stratum is (0, 1/1024]. Its one t has no lower
# bound. Halving or doubling the floor changes the noise of the first bin by 15 %, and that of the others not at all.
T_FLOOR = 1 / 1024
GROUPS = 8  # for standard errors
MAX_COORDINATES = 2 ** 20


class Measurement(NamedTuple):
    """Sums over micro-batches of gradients without the loss weight."""

    cross: np.ndarray  # [G, G, T, T], inner products of the groups' summed gradients
    products: np.ndarray  # [G, T, T], sums of the inner products within a micro-batch
    num_batches: int  # K
    batch_size: int  # B
    nll: np.ndarray  # [T, G * K * B], nats of a caption's masked tokens
    masked: np.ndarray  # [T, G * K * B], number of these tokens
    mean_tokens: float  # scored tokens per caption


class Moments(NamedTuple):
    """Estimates for the gradient of one image at each t."""

    products: np.ndarray  # [T, T]: m_t . m_s
    noise: np.ndarray  # [T]: tr Cov(g_t)


def weights(kind: str) -> np.ndarray:
    return loss_weight(torch.from_numpy(MIDDLES), kind).numpy()


def measure(model: Captioner, data: Iterable[tuple[Tensor, Tensor]], num_batches: int, seed: int,
            times: np.ndarray = MIDDLES) -> Measurement:
    """Measure gradients of GROUPS * num_batches micro-batches at each of the times.

    Images and random numbers are the same at all times, so that their noise cancels in the comparison.

    Args:
        data: yields image [B, 3, height, width] on the model's device and text [B, L] on the CPU, always with the same
            B.
    """
    model.eval()
    encoder = [p for p in model.visual.parameters() if p.requires_grad]
    device, size = encoder[0].device, sum(p.numel() for p in encoder)
    generator, total = torch.Generator(), GROUPS * num_batches
    whole = CaptionCfg(t_min=0.0, t_max=1.0, loss_weight="none")
    coordinates = slice(None)
    if size > MAX_COORDINATES:  # a random subset scales all inner products by about the same factor
        coordinates = torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:MAX_COORDINATES].to(device)
    sums = torch.zeros(GROUPS, len(times), min(size, MAX_COORDINATES), device=device)
    products = np.zeros((GROUPS, len(times), len(times)))
    gradient = torch.empty_like(sums[0])
    nll, masked, tokens = [], [], []
    for k, (image, text) in zip(progress_bar(range(total), "measuring", "batch"), data, strict=False):
        caption_nll, caption_masked = [], []
        for i, t in enumerate(times):
            generator.manual_seed(seed * total + k)
            corrupted = masked_diffusion(text, model.vocab_size, whole, torch.full((len(text),), float(t)), generator)
            captions = pack(text, corrupted, model.vocab_size).to(device)
            out = model(image, captions)
            caption_nll.append(captions.sum_rows(out["token_nll"]))
            caption_masked.append(captions.sum_rows(out["token_weight"]))
            parts = torch.autograd.grad(caption_nll[-1].mean(), encoder, allow_unused=True, materialize_grads=True)
            gradient[i] = torch.cat([part.flatten() for part in parts])[coordinates]
        sums[k % GROUPS] += gradient
        products[k % GROUPS] += (gradient @ gradient.T).double().cpu().numpy()
        nll.append(torch.stack(caption_nll).detach().cpu())
        masked.append(torch.stack(caption_masked).cpu())
        tokens.append(target_tokens(text, model.vocab_size).sum(1).double().mean().item())
    flat = sums.flatten(0, 1)
    cross = (flat @ flat.T).unflatten(1, sums.shape[:2]).unflatten(0, sums.shape[:2]).transpose(1, 2)
    return Measurement(cross.double().cpu().numpy(), products, num_batches, len(text), torch.cat(nll, 1).numpy(),
                       torch.cat(masked, 1).numpy(), float(np.mean(tokens)))


def moments(measured: Measurement, leave_out: int | None = None) -> Moments:
    """Return unbiased estimates from all groups, or from all but one.

    Let x_k be the gradient of micro-batch k of n at time t, and y_k that at time s, each a mean over B independent
    images. Then E[x_k . y_l] = m_t . m_s for k != l, and E|x_k|^2 = |m_t|^2 + tr Cov(g_t) / B. So both are unbiased:

        products = (sum_k x_k . sum_l y_l - sum_k x_k . y_k) / (n (n - 1))
        noise = B * (sum_k |x_k|^2 / n - products[t, t])
    """
    kept = [group for group in range(len(measured.products)) if group != leave_out]
    n = len(kept) * measured.num_batches
    cross, within = measured.cross[np.ix_(kept, kept)].sum((0, 1)), measured.products[kept].sum(0)
    products = (cross - within) / (n * (n - 1))
    return Moments(products, measured.batch_size * (within.diagonal() / n - products.diagonal()))


def weigh(unweighted: Moments, kind: str) -> Moments:
    """Return moments with the loss weight, averaged over each bin from a measurement at its middle.

    Within a bin the unweighted noise is assumed to be proportional to t, as it is for small t (head of this file).
    Times 1/t^2 it averages to noise(middle) / middle * log(high / low) / (high - low).
    """
    noise = unweighted.noise
    if kind == "inverse_t":
        low, high = EDGES[:-1].clip(T_FLOOR), EDGES[1:]
        noise = noise / MIDDLES * np.log(high / low) / (high - low)
    return Moments(unweighted.products * np.outer(weights(kind), weights(kind)), noise)


def interval_scores(unweighted: Moments) -> pd.DataFrame:
    """Return the progress per image with t uniform on an interval, for each interval of whole bins and each weight.

    Columns: weight, t_min, t_max, snr (of one image), cosine (to the aim), progress.

    The aim is the NELBO of Eq. 5, with t in (0, 1] and weight 1/t, whose gradient has mean m. Training on an interval I
    follows gradients g with mean m_I instead, which are biased but perhaps less noisy. A step -h * g changes the aim by

        -h * m . m_I + h^2 / 2 * c * E|g|^2        (c: mean curvature, the same for all I)

    on average. The best h >= 0 gains max(m . m_I, 0)^2 / (2 c E|g|^2), which is 0 if the interval points away from the
    aim. As a share of the gain of a noiseless step along m this is

        progress = max(m . m_I, 0)^2 / (|m|^2 E|g|^2) = max(cosine(m, m_I), 0)^2 * snr / (1 + snr)

    with snr = |m_I|^2 / tr Cov(g) and E|g|^2 = |m_I|^2 + tr Cov(g), where tr Cov(g) is the noise at each t plus the
    variance of the means over t. The ratio of two intervals' progress is the ratio of the images that they need.

    Limits: (1) Noise limits a step for batches well below 1 / snr images. For much larger ones only the squared cosine
    is left, by which the whole interval is best. (2) Gradients at neighbouring t agree, so the criterion favours narrow
    intervals, although a model needs all mask ratios to decode and score. The caller sets a minimum width.
    (3) Gradients are compared as in gradient descent, without Adam's rescaling. (4) Features may gain from something
    that the NELBO does not reward. (5) Noise makes the numerator, the square of an estimate, a little too large.
    """
    kinds = {kind: weigh(unweighted, kind) for kind in ("inverse_t", "none")}
    aim = kinds["inverse_t"].products.mean()
    if aim <= 0:
        raise ValueError("the encoder's mean gradient cannot be told from zero: raise --num-samples")
    along_aim = unweighted.products @ weights("inverse_t") / len(MIDDLES)
    rows = []
    for kind, (products, noise) in kinds.items():
        for low, high in combinations(range(len(EDGES)), 2):
            bins = slice(low, high)
            squared_mean = products[bins, bins].mean()
            second_moment = (noise + products.diagonal())[bins].mean()
            inner = (weights(kind) * along_aim)[bins].mean()
            rows.append({
                "weight": kind, "t_min": EDGES[low], "t_max": EDGES[high],
                "snr": squared_mean / (second_moment - squared_mean),
                "cosine": inner / np.sqrt(squared_mean * aim) if squared_mean > 0 else np.nan,
                "progress": max(inner, 0.0) ** 2 / (aim * second_moment),
            })
    return pd.DataFrame(rows)


def log_ratio_error(left_out: np.ndarray, reference: int) -> np.ndarray:
    """Return jackknife standard errors [N] of log(score / reference), from scores [G, N] with one group left out."""
    positive = (left_out > 0).all(0) & (left_out[:, reference] > 0).all()
    ratio = np.log(np.where(positive, left_out, 1) / np.where(positive, left_out[:, [reference]], 1))
    return np.where(positive, np.sqrt((len(ratio) - 1) * ratio.var(axis=0)), np.inf)

"""The lower bound of a caption's log-likelihood by Monte Carlo (Eq. 8), with standard error and early stopping.

Exact mask counts, every count equally often; masks that depend on (seed, length) alone, so that all candidates of equal
length share them.

Dimensions: R captions (rows), L positions, N scored tokens of a caption, K draws, S mask counts.
"""
import math
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import stdtrit
from torch import Tensor

from .estimators import Likelihood, token_log_prob
from .interface import Network
from .packing import put
from .tokens import mask_id, target_tokens

FIRST_ROUND = 4  # draws per mask count before early stopping looks for the first time; doubled from look to look
MAX_ENUMERATED = 16  # masks are drawn without replacement where there are at most this many times the draws


class Draws(NamedTuple):
    """Random masks for all captions of one length. Each prefix of whole repeats is such a set of draws, too."""

    hidden: np.ndarray  # bool [K, N]
    stratum: np.ndarray  # long [K] in [0, S), which of the S mask counts a draw has
    repeat: np.ndarray  # long [K], ascending: how many draws of this count came before
    population: np.ndarray  # float [S], how many masks of a count they are drawn from; inf: with replacement


def mask_counts(num_tokens: int, interval: tuple[float, float] | None = None) -> range:
    """The mask counts n with t_min * N <= n <= t_max * N, at least one, at most 1..N."""
    t_min, t_max = interval or (0.0, 1.0)
    low = max(1, math.ceil(t_min * num_tokens - 1e-9))
    return range(low, max(low, math.floor(t_max * num_tokens + 1e-9)) + 1)


def systematic_sample(size: int, draws: int, start: int) -> np.ndarray:
    """Integers spread evenly over [0, size), long [draws]; over all starts in [0, size) each one is equally frequent.

    Rounding an evenly spaced real grid instead, as others do, is biased for many sizes and numbers of draws.
    """
    return (start + np.arange(draws) * size // draws) % size


@lru_cache(maxsize=256)
def draw_masks(num_tokens: int, num_samples: int, seed: int = 0, interval: tuple[float, float] | None = None) -> Draws:
    """At most `num_samples` random masks, equally often of each mask count.

    The counts are a systematic sample from a random start: every count has the same expected number of draws whatever
    their total, and the numbers differ by at most one. Of a count that has few masks each is drawn at most once; once
    all are drawn nothing is left to chance, and short captions need fewer draws than asked for.

    Depends on nothing but its arguments: all candidates of equal length, in any batch, get the same masks.
    """
    counts = mask_counts(num_tokens, interval)
    rng = np.random.default_rng([seed, num_tokens])
    sample = systematic_sample(len(counts), num_samples, rng.integers(len(counts)))
    hidden, stratum, repeat, population = [], [], [], []
    for s, (n, size) in enumerate(zip(counts, np.bincount(sample, minlength=len(counts)), strict=True)):
        num_masks = math.comb(num_tokens, n)
        if num_masks <= MAX_ENUMERATED * size:
            positions = rng.permutation(np.array(list(combinations(range(num_tokens), n))))[:size]
            population.append(float(num_masks))
        else:
            positions = rng.random((size, num_tokens)).argsort(axis=1)[:, :n]
            population.append(math.inf)
        masks = np.zeros((len(positions), num_tokens), dtype=bool)
        np.put_along_axis(masks, positions, True, axis=1)
        hidden.append(masks)
        stratum.append(np.full(len(masks), s))
        repeat.append(np.arange(len(masks)))
    ascending = np.concatenate(repeat).argsort(kind="stable")
    return Draws(np.concatenate(hidden)[ascending], np.concatenate(stratum)[ascending],
                 np.concatenate(repeat)[ascending], np.array(population))


def estimate(values: np.ndarray, draws: Draws) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Eq. 8 from the first draws: N times the mean over mask counts of the mean over a count's draws.

    The standard error is that of a stratified sample, from the spread within each count and with the finite population
    correction. With a single draw of some count there is no such spread, and the spread between the counts stands in:
    too large by the trend over n, and no estimate at all (inf) from a single count.

    Args:
        values: float64 [R, K], mean log-likelihood of the hidden tokens in each draw; K may be fewer than all draws.

    Returns:
        estimate, standard error and its degrees of freedom (Satterthwaite), float64 [R] each.
    """
    member = np.eye(len(draws.population))[draws.stratum[:values.shape[1]]]  # [K, S]
    size = member.sum(0)
    drawn = size > 0
    member, size, population = member[:, drawn], size[drawn], draws.population[drawn]
    mean = values @ member / size  # [R, S]
    if drawn.all() and ((size > 1) | (size >= population)).all():
        spread = (values - mean @ member.T) ** 2 @ member / np.maximum(size - 1, 1)
        variance = spread / size * (1 - size / population) / len(size) ** 2  # [R, S]
        total = variance.sum(1)
        with np.errstate(invalid="ignore", divide="ignore"):
            freedom = total ** 2 / (variance ** 2 / np.maximum(size - 1, 1)).sum(1)
        freedom[total == 0] = math.inf
    elif len(size) > 1:
        total = mean.var(axis=1, ddof=1) / len(size)
        freedom = np.full(len(mean), len(size) - 1.0)
    else:
        total, freedom = np.full(len(mean), math.inf), np.ones(len(mean))
    num_tokens = draws.hidden.shape[1]
    return num_tokens * mean.mean(1), num_tokens * np.sqrt(total), freedom


def _hidden_log_likelihood(network: Network, text: Tensor, hidden: np.ndarray, vocab_size: int,
                           max_tokens: int) -> np.ndarray:
    """Mean log-likelihood of the hidden tokens, float64 [R, K], for captions [R, N + 1] and masks [K, N]."""
    rows, length = text.shape
    asked = np.pad(hidden, ((0, 0), (1, 0)))
    values, token_logits, packed_rows = [], None, 0
    rows_per_call = max(1, max_tokens // length)
    for index in np.split(np.arange(rows * len(hidden)), range(rows_per_call, rows * len(hidden), rows_per_call)):
        if len(index) != packed_rows:
            token_logits, packed_rows = network([length] * len(index)), len(index)
        places = torch.from_numpy(asked[index % len(hidden)].ravel().nonzero()[0]).to(text.device)
        truth = text.index_select(0, torch.from_numpy(index // len(hidden)).to(text.device))
        noisy = truth.flatten().index_fill(0, places, mask_id(vocab_size)).view_as(truth)
        log_prob = token_log_prob(token_logits(noisy, places), truth.take(places))
        values.append(put(torch.zeros(truth.shape, device=text.device), places, log_prob).sum(1))
    return torch.cat(values).cpu().numpy().reshape(rows, -1) / hidden.sum(1).astype(np.float32)


def monte_carlo(
        network: Network,
        text: Tensor,
        vocab_size: int,
        num_samples: int = 1024,
        seed: int = 0,
        interval: tuple[float, float] | None = None,
        stop_confidence: float | None = None,
        max_tokens: int = 4096,
) -> Likelihood:
    """The bound of Eq. 8 for the candidate captions of one image, estimated with common random masks.

    Unbiased for every number of draws. Candidates of equal length share their masks, so that their difference is more
    certain than either score. The masks depend on (seed, length) alone; errors are thus not independent over images.

    With `interval`, only mask counts between t_min * N and t_max * N are drawn, those the model was trained on, and
    their mean stands for the mean over all counts: the training objective per caption rather than Eq. 8. It is a bound
    still where t_max = 1 and the model predicts better the more it sees.

    With `stop_confidence`, candidates drop out as soon as they are behind the leader for certain, and drawing stops
    when only the leader is left. A look after 4, 8, 16, ... draws of each mask count tests the difference to the
    leader with Student's t, draw by draw for equal lengths and by both standard errors otherwise; the error
    probability is divided by looks and rivals. The score of a candidate that dropped out is as rough as its standard
    error says.

    Args:
        network: bidirectional, of one image.
        text: long [R, L], the image's candidates; without scored tokens a row gets 0 and takes no part.
        num_samples: draws per caption, at most.
        interval: (t_min, t_max).
        stop_confidence: e.g. 0.999; None draws all.
        max_tokens: tokens per decoder call.
    """
    lengths = target_tokens(text, vocab_size).sum(1).cpu().numpy()
    values = np.zeros((len(text), num_samples))
    used = np.zeros(len(text), dtype=int)
    score, error, freedom = np.zeros(len(text)), np.zeros(len(text)), np.full(len(text), math.inf)
    draws = {n: draw_masks(n, num_samples, seed, interval) for n in np.unique(lengths[lengths > 0]).tolist()}
    running = lengths > 0
    dropped = []  # (rows, the leader they fell behind, gaps, errors of the gaps), in order
    rivals = int(running.sum()) - 1
    most = max((d.repeat[-1] + 1 for d in draws.values()), default=0)
    looks = [most]
    if stop_confidence is not None and rivals > 0:
        looks = [FIRST_ROUND << i for i in range(64) if FIRST_ROUND << i < most] + looks
    for look in looks:
        for n in np.unique(lengths[running]).tolist():
            rows = (running & (lengths == n)).nonzero()[0]
            start, stop = used[rows[0]], int(np.searchsorted(draws[n].repeat, look))
            if start < stop:
                captions = text[torch.from_numpy(rows).to(text.device), :n + 1]
                values[rows, start:stop] = _hidden_log_likelihood(
                    network, captions, draws[n].hidden[start:stop], vocab_size, max_tokens)
                used[rows] = stop
                score[rows], error[rows], freedom[rows] = estimate(values[rows, :stop], draws[n])
        if look == most:
            break
        leader = np.where(running, score, -math.inf).argmax()
        gap, gap_error = score[leader] - score, np.hypot(error[leader], error)
        gap_freedom = np.minimum(freedom[leader], freedom)
        paired = running & (lengths == lengths[leader])
        difference = values[leader, :used[leader]] - values[paired, :used[leader]]
        gap[paired], gap_error[paired], gap_freedom[paired] = estimate(difference, draws[lengths[leader]])
        error_probability = (1 - stop_confidence) / (rivals * len(looks))
        behind = gap > stdtrit(np.minimum(gap_freedom, 1e6), 1 - error_probability) * gap_error
        behind &= running
        dropped.append((behind, leader, gap[behind], gap_error[behind]))
        running &= ~behind
        if running.sum() == 1:
            break

    score = score.astype(np.float32)
    for behind, leader, gap, gap_error in reversed(dropped):  # leaders that dropped out themselves come first
        score[behind] = np.minimum(score[leader] - gap, np.nextafter(score[leader], np.float32(-math.inf)))
        error[behind] = np.hypot(error[leader], gap_error)

    def to_tensor(x, dtype=torch.float32):
        return torch.as_tensor(x, dtype=dtype).to(text.device)

    return Likelihood(to_tensor(score), standard_error=to_tensor(error), draws=to_tensor(used, torch.long))

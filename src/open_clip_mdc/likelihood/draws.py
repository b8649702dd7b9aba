"""Random masks for Eq. 8, and the estimate of Eq. 8 and its standard error from their values.

The number of masked tokens is stratified: every mask count is drawn equally often. Masks depend on (seed, length)
alone, so that all candidates of equal length share them.

Dimensions: R captions (rows), N scored tokens of a caption, K draws, S mask counts.
"""
import math
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import numpy as np

MAX_ENUMERATED = 16  # masks are drawn without replacement where there are at most this many times the draws


class Draws(NamedTuple):
    """Random masks for all captions of one length."""

    hidden: np.ndarray  # bool [K, N], True at masked tokens
    stratum: np.ndarray  # long [K] in [0, S), the index of the draw's mask count
    population: np.ndarray  # float [S], number of masks that a count's draws come from. inf is with replacement


def systematic_sample(size: int, draws: int, start: int) -> np.ndarray:
    """Return integers spread evenly over [0, size), long [draws]. A random `start` makes each equally probable."""
    # Rounding an evenly spaced grid of real numbers would be biased for many sizes and numbers of draws.
    return (start + np.arange(draws) * size // draws) % size


@lru_cache(maxsize=256)
def draw_masks(num_tokens: int, num_samples: int, seed: int = 0, interval: tuple[float, float] | None = None) -> Draws:
    """Draw at most `num_samples` random masks, equally many for each mask count.

    The counts are a systematic sample with a random start, so every count has the same expected number of draws. If a
    count has few masks, each is drawn at most once. So short captions get fewer than `num_samples` draws. The result
    depends on the arguments alone: all candidates of equal length, in any batch, get the same masks.
    """
    # The mask counts n with t_min * N <= n <= t_max * N, at least one, at most 1..N.
    t_min, t_max = interval or (0.0, 1.0)
    low = max(1, math.ceil(t_min * num_tokens - 1e-9))
    counts = range(low, max(low, math.floor(t_max * num_tokens + 1e-9)) + 1)
    rng = np.random.default_rng([seed, num_tokens])
    sample = systematic_sample(len(counts), num_samples, rng.integers(len(counts)))
    hidden, population = [], []
    for n, size in zip(counts, np.bincount(sample, minlength=len(counts)), strict=True):
        num_masks = math.comb(num_tokens, n)
        if num_masks <= MAX_ENUMERATED * size:
            positions = rng.permutation(np.array(list(combinations(range(num_tokens), n))))[:size]
            population.append(float(num_masks))
        else:
            positions = rng.random((size, num_tokens)).argsort(axis=1)[:, :n]
            population.append(math.inf)
        # Positions [size, n] to a mask [size, N] for each draw.
        masks = np.zeros((len(positions), num_tokens), dtype=bool)
        np.put_along_axis(masks, positions, True, axis=1)
        hidden.append(masks)
    drawn = list(map(len, hidden))
    stratum = np.arange(len(drawn)).repeat(drawn)
    # The first draw of every count comes before the second of any.
    ascending = np.concatenate(list(map(np.arange, drawn))).argsort(kind="stable")
    return Draws(np.concatenate(hidden)[ascending], stratum[ascending], np.array(population))


def estimate(values: np.ndarray, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """Return the estimate of Eq. 8 and its standard error, float64 [R] each, from values [R, K] of the draws.

    The estimate is N times the mean over mask counts of the mean over a count's draws. The standard error is that of a
    stratified sample with finite population correction. If some count has a single draw, the spread between counts is
    used instead of that within, which is too large as values change with the count. With one count it is inf.
    """
    # Which draw has which mask count, [K, S].
    member = np.eye(len(draws.population))[draws.stratum]
    size = member.sum(0)
    drawn = size > 0
    member, size, population = member[:, drawn], size[drawn], draws.population[drawn]
    mean = values @ member / size  # [R, S]
    # A variance within each count needs two draws of it, or all of its masks.
    if drawn.all() and ((size > 1) | (size >= population)).all():
        spread = (values - mean @ member.T) ** 2 @ member / np.maximum(size - 1, 1)
        total = (spread / size * (1 - size / population) / len(size) ** 2).sum(1)
    elif len(size) > 1:
        total = mean.var(axis=1, ddof=1) / len(size)
    else:
        total = np.full(len(mean), math.inf)
    num_tokens = draws.hidden.shape[1]
    return num_tokens * mean.mean(1), num_tokens * np.sqrt(total)

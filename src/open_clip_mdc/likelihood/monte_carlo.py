"""The lower bound of a caption's log-likelihood by Monte Carlo (Eq. 8), with standard error and early stopping.

Dimensions: R captions (rows), L positions, N scored tokens of a caption, K draws, S mask counts.
"""
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import logsumexp
from torch import Tensor

from ..models.interface import Network
from ..text.packing import scatter_flat
from ..text.special_tokens import mask_id, target_tokens
from .exact import Likelihood, decoder_calls, estimated, token_log_prob

FIRST_ROUND = 4  # draws per mask count before early stopping looks for the first time; doubled from look to look
MAX_ENUMERATED = 16  # masks are drawn without replacement where there are at most this many times the draws
BETS = np.array([0.8, 0.4, 0.2, 0.1])  # shares of the largest bet that cannot be lost whole
TINY = 1e-9  # what a bet is divided by where nothing is left to chance
CENTRES = np.array([1 / 16, 1 / 8, 1 / 4, 1 / 2])  # shares of the worst score, around which other lengths are compared


class Draws(NamedTuple):
    """Random masks for all captions of one length. Each prefix of whole repeats is such a set of draws, too."""

    hidden: np.ndarray  # bool [K, N]
    stratum: np.ndarray  # long [K] in [0, S), which of the S mask counts a draw has
    repeat: np.ndarray  # long [K], ascending: how many draws of this count came before
    population: np.ndarray  # float [S], how many masks of a count they are drawn from; inf: with replacement


def mask_counts(num_tokens: int, interval: tuple[float, float] | None = None) -> range:
    """Return the mask counts n with t_min * N <= n <= t_max * N, at least one, at most 1..N."""
    t_min, t_max = interval or (0.0, 1.0)
    low = max(1, math.ceil(t_min * num_tokens - 1e-9))
    return range(low, max(low, math.floor(t_max * num_tokens + 1e-9)) + 1)


def systematic_sample(size: int, draws: int, start: int) -> np.ndarray:
    """Return integers spread evenly over [0, size), long [draws]; over all starts each one is equally frequent."""
    # Rounding an evenly spaced real grid instead is biased for many sizes and numbers of draws.
    return (start + np.arange(draws) * size // draws) % size


@lru_cache(maxsize=256)
def draw_masks(num_tokens: int, num_samples: int, seed: int = 0, interval: tuple[float, float] | None = None) -> Draws:
    """Draw at most `num_samples` random masks, equally often of each mask count.

    The counts are a systematic sample from a random start: every count has the same expected number of draws. Of a
    count that has few masks each is drawn at most once, so that short captions need fewer draws than asked for.
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


def estimate(values: np.ndarray, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """Return Eq. 8 and its standard error, float64 [R] each, from values [R, K] of the first draws.

    The estimate is N times the mean over mask counts of the mean over a count's draws. The standard error is that of a
    stratified sample with the finite population correction. With a single draw of some count the spread between the
    counts stands in for that within, too large by the trend over n; from a single count it is inf.
    """
    member = np.eye(len(draws.population))[draws.stratum[:values.shape[1]]]  # [K, S]
    size = member.sum(0)
    drawn = size > 0
    member, size, population = member[:, drawn], size[drawn], draws.population[drawn]
    mean = values @ member / size  # [R, S]
    if drawn.all() and ((size > 1) | (size >= population)).all():
        spread = (values - mean @ member.T) ** 2 @ member / np.maximum(size - 1, 1)
        total = (spread / size * (1 - size / population) / len(size) ** 2).sum(1)
    elif len(size) > 1:
        total = mean.var(axis=1, ddof=1) / len(size)
    else:
        total = np.full(len(mean), math.inf)
    num_tokens = draws.hidden.shape[1]
    return num_tokens * mean.mean(1), num_tokens * np.sqrt(total)


def log_wealth(scores: np.ndarray, draws: Draws, bet: np.ndarray) -> np.ndarray:
    """Return the log of what bets [bets] that a score is above 0 made of 1, [bets, R], from scores of draws [R, K].

    The wealth of a score that is 0 or less passes 1/a with probability a at most, at any number of draws and whatever
    their distribution (Waudby-Smith & Ramdas 2024). Each draw multiplies it by 1 + bet * its share of the estimate, a
    count whose masks are all drawn by exp(bet * the count's share). By log(1 + x) <= x the product of the expectations
    is exp(bet * score) at most; draws without replacement are negatively associated (Joag-Dev & Proschan 1983), so that
    the expectation of the product is no more. No draw may make it negative: bet * `largest_share` * worst score <= 1.
    """
    stratum = draws.stratum[:scores.shape[1]]
    size = np.bincount(stratum, minlength=len(draws.population))
    known = (size >= draws.population)[stratum]
    won = bet[:, None, None] * (scores / (len(size) * size)[stratum])
    return np.where(known, won, np.log1p(np.where(known, 0, won))).sum(2)


def largest_share(draws: Draws, num_draws: int) -> float:
    """Return a draw's share of the estimate, the largest of the counts not fully drawn; inf if one has no draw."""
    size = np.bincount(draws.stratum[:num_draws], minlength=len(draws.population))
    size = size[size < draws.population]
    return 1 / len(draws.population) / size.min() if size.all() and len(size) else math.inf if len(size) else 0.0


def log_evidence(leader: np.ndarray, rivals: np.ndarray, draws: Draws, rival_draws: Draws, worst: float) -> np.ndarray:
    """Return the log of the mean wealth of bets that the leader's score [K] is above each rival's [R, K'], [R].

    Of equal lengths the differences of the same draws are bet on; otherwise the leader's score is bet to be above a
    centre, and the rival's below it.
    """
    length, rival_length = draws.hidden.shape[1], rival_draws.hidden.shape[1]
    share, rival_share = largest_share(draws, len(leader)), largest_share(rival_draws, rivals.shape[1])
    leader, rivals = length * leader[None], rival_length * rivals
    if length == rival_length:
        wealth = log_wealth(leader - rivals, draws, BETS / max(length * worst * share, TINY))
    else:
        wealth = []
        for centre in CENTRES * length * worst:
            bet = BETS / max((length * worst - centre) * share, centre * rival_share, TINY)
            wealth.append(log_wealth(leader + centre, draws, bet) + log_wealth(-rivals - centre, rival_draws, bet))
        wealth = np.concatenate(wealth)
    return logsumexp(wealth, axis=0) - math.log(len(wealth))


def _hidden_log_likelihood(network: Network, text: Tensor, hidden: np.ndarray, vocab_size: int,
                           max_tokens: int) -> np.ndarray:
    """Return the hidden tokens' mean log-likelihood, float64 [R, K], for captions [R, N + 1] and masks [K, N]."""
    rows, length = text.shape
    predicted = np.pad(hidden, ((0, 0), (1, 0)))
    values = []
    for index, token_logits in decoder_calls(network, rows * len(hidden), length, max_tokens):
        places = torch.from_numpy(predicted[index % len(hidden)].ravel().nonzero()[0]).to(text.device)
        truth = text.index_select(0, torch.from_numpy(index // len(hidden)).to(text.device))
        noisy = truth.flatten().index_fill(0, places, mask_id(vocab_size)).view_as(truth)
        log_prob = token_log_prob(token_logits(noisy, places), truth.take(places))
        values.append(scatter_flat(torch.zeros(truth.shape, device=text.device), places, log_prob).sum(1))
    return torch.cat(values).cpu().numpy().reshape(rows, -1) / hidden.sum(1).astype(np.float32)


def race(
        read: Callable[[np.ndarray, np.ndarray], np.ndarray],
        lengths: np.ndarray,
        draws: Mapping[int, Draws],
        stop_confidence: float | None = None,
        worst: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw until the best of some candidates is certain, or all draws are made: score, error, draws, [R] each.

    With `stop_confidence` a look after 4, 8, 16, ... draws of each mask count drops the candidates that are behind the
    leader for certain, and drawing stops when only the leader is left. The best one, by the scores that all masks would
    give, is dropped with a probability of 1 - stop_confidence at most, which looks and rivals share. For differences of
    any shape, normal or not, and any number of candidates this follows if no draw loses more than `worst` nats a token
    (a uniform guess's loss). Once a draw has lost more, the worst of any candidate so far takes its place: then the
    promise rests on races of known populations (`python -m benchmarks.early_stop`, none of which dropped the best one).

    The price is draws: of 487 a winner by 12 nats takes 65 to 283 at confidence 0.9, by 1 nat 415 to 474. The score of
    a candidate that dropped out is as rough as its standard error says.

    Args:
        read: (rows [r], masks [k, N]) -> mean log-likelihood of the hidden tokens, [r, k]; rows have one length.
        lengths: N of each candidate, [R]; with 0 it gets 0 and takes no part. `draws` are by N.
    """
    values = np.zeros((len(lengths), max((len(d.stratum) for d in draws.values()), default=0)))
    used = np.zeros(len(lengths), dtype=int)
    score, error = np.zeros(len(lengths)), np.zeros(len(lengths))
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
                values[rows, start:stop] = read(rows, draws[n].hidden[start:stop])
                used[rows] = stop
                score[rows], error[rows] = estimate(values[rows, :stop], draws[n])
        if look == most:
            break
        leader = np.where(running, score, -math.inf).argmax()
        worst = max(worst, -values.min())
        gap, gap_error, evidence = score[leader] - score, np.hypot(error[leader], error), np.zeros(len(score))
        for n in np.unique(lengths[running]).tolist():
            rows = (running & (lengths == n)).nonzero()[0]
            ahead, behind = values[leader, :used[leader]], values[rows, :used[rows[0]]]
            evidence[rows] = log_evidence(ahead, behind, draws[lengths[leader]], draws[n], worst)
            if n == lengths[leader]:
                gap[rows], gap_error[rows] = estimate(ahead - behind, draws[n])
        lost = running & (evidence > math.log(rivals * (len(looks) - 1) / (1 - stop_confidence)))
        dropped.append((lost, leader, gap[lost], gap_error[lost]))
        running &= ~lost
        if running.sum() == 1:
            break

    score = score.astype(np.float32)
    for lost, leader, gap, gap_error in reversed(dropped):  # leaders that dropped out themselves come first
        score[lost] = np.minimum(score[leader] - gap, np.nextafter(score[leader], np.float32(-math.inf)))
        error[lost] = np.hypot(error[leader], gap_error)
    return score, error, used


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
    """Estimate the bound of Eq. 8 for the candidate captions of one image, with common random masks.

    Unbiased for every number of draws. The masks depend on (seed, length) alone: the difference of candidates of equal
    length is more certain than either score, and errors are not independent over images.

    With `interval`, only mask counts between t_min * N and t_max * N are drawn, those the model was trained on, and
    their mean stands for the mean over all counts: the training objective per caption rather than Eq. 8. It is a bound
    still where t_max = 1 and the model predicts better the more it sees.

    With `stop_confidence` candidates drop out as soon as they are behind the leader for certain, see `race`.

    Args:
        network: bidirectional, of one image.
        text: long [R, L], the image's candidates; without scored tokens a row gets 0 and takes no part.
        num_samples: draws per caption, at most.
        stop_confidence: e.g. 0.999; None draws all.
        max_tokens: tokens per decoder call.
    """
    lengths = target_tokens(text, vocab_size).sum(1).cpu().numpy()
    draws = {n: draw_masks(n, num_samples, seed, interval) for n in np.unique(lengths[lengths > 0]).tolist()}

    def read(rows: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        captions = text[torch.from_numpy(rows).to(text.device), :hidden.shape[1] + 1]
        return _hidden_log_likelihood(network, captions, hidden, vocab_size, max_tokens)

    return estimated(text.device, *race(read, lengths, draws, stop_confidence, math.log(vocab_size)))

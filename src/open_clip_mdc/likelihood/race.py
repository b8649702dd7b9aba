"""Early stopping of Monte Carlo scores: an image's candidates race, and one that is surely behind needs no more draws.

Dimensions: R captions (rows), N scored tokens of a caption, K draws, S mask counts.
"""
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

import numpy as np
from scipy.special import logsumexp

from .draws import Draws, estimate

FIRST_ROUND = 4  # draws per mask count at the first look. Each later look has twice as many
BETS = np.array([0.8, 0.4, 0.2, 0.1])  # bets, as shares of the largest one that keeps the wealth positive
TINY = 1e-9  # smallest divisor of a bet, used when all masks are drawn
CENTRES = np.array([1 / 16, 1 / 8, 1 / 4, 1 / 2])  # thresholds for unequal lengths, as shares of the worst score
Race = Generator  # yields lists of requests


def log_wealth(scores: np.ndarray, draws: Draws, bet: np.ndarray) -> np.ndarray:
    """Return the log wealth [bets, R] of betting that a score is above 0, from values of its draws [R, K].

    The wealth starts at 1. If the score is 0 or less, it exceeds 1/a with probability at most a, for any number of
    draws of any distribution (Waudby-Smith & Ramdas 2024). A draw multiplies the wealth by 1 + bet * its share of the
    estimate. A count whose masks are all drawn multiplies it by exp(bet * the count's share).

    Proof: by log(1 + x) <= x, the product of expected factors is at most exp(bet * score). Draws without replacement
    are negatively associated (Joag-Dev & Proschan 1983), so the expected product is not larger. The wealth stays
    positive if bet * `largest_share` * worst score <= 1.
    """
    stratum = draws.stratum[:scores.shape[1]]
    size = np.bincount(stratum, minlength=len(draws.population))
    known = (size >= draws.population)[stratum]
    won = bet[:, None, None] * (scores / (len(size) * size)[stratum])
    return np.where(known, won, np.log1p(np.where(known, 0, won))).sum(2)


def largest_share(draws: Draws, num_draws: int) -> float:
    """Return the largest share of one draw in the estimate, among counts not fully drawn. inf if one has no draw."""
    size = np.bincount(draws.stratum[:num_draws], minlength=len(draws.population))
    size = size[size < draws.population]
    return 1 / len(draws.population) / size.min() if size.all() and len(size) else math.inf if len(size) else 0.0


def log_evidence(leader: np.ndarray, rivals: np.ndarray, draws: Draws, rival_draws: Draws, worst: float) -> np.ndarray:
    """Return the log of the mean wealth [R] of bets that the leader's score is above each rival's.

    For equal lengths, a bet is on the differences of the same draws. For others, it is on the leader's score being
    above a threshold and the rival's below it.

    Args: values of the leader's draws, [K], and of each rival's, [R, K'].
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


def run(races: Sequence[Race], read: Callable[[list[tuple]], Iterable[np.ndarray]]) -> list:
    """Return the results of races. All races take their looks together, so that one call of `read` serves them all.

    Args: `read` takes requests (race, N, rows [r], a slice of k draws) and returns the values [r, k] of each.
    """
    results: list = [None] * len(races)
    answers: dict[int, list | None] = dict.fromkeys(range(len(races)))
    while answers:
        requests = []
        for number, answer in list(answers.items()):
            try:
                requests += [(number, *request) for request in races[number].send(answer)]
            except StopIteration as end:
                results[number] = end.value
                del answers[number]
        answers = {number: [] for number in answers}
        for (number, *_), values in zip(requests, read(requests) if requests else (), strict=True):
            answers[number].append(values)
    return results


def race(lengths: np.ndarray, draws: Mapping[int, Draws], stop_confidence: float | None = None,
         worst: float = 0.0) -> Race:
    """Draw until one image's best candidate is known, or all draws are made. Returns score, error and draws, [R] each.

    With `stop_confidence`, a look after 4, 8, 16, ... draws of each mask count drops candidates that are surely behind
    the leader. Drawing stops when only the leader is left. The best candidate, by the scores that all masks would give,
    is dropped with probability at most 1 - stop_confidence, over all looks and rivals together. This holds for any
    distribution of the differences and any number of candidates, if no draw loses more than `worst` nats per token (the
    loss of a uniform guess). If a draw loses more, the worst loss so far replaces `worst`, and there is no proof. In
    simulated races the best candidate was never dropped where draws lost up to 30 nats (of 4,800, and see `python -m
    benchmarks.early_stop`). Where rare draws lost 100 nats, 9 of 1,200 races dropped it at 0.9 and as many at 0.99.

    At confidence 0.9, a candidate that is ahead by 12 nats needs 65 to 283 of 487 draws, and by 1 nat 415 to 474. The
    score of a dropped candidate has fewer draws, and a standard error that says so.

    Yields lists of requests (N, rows [r], slice of k draws). Send it, for each, the mean log-likelihood of the masked
    tokens of these rows in these draws, [r, k].

    Args: `lengths` is N of each candidate, [R]. One without tokens gets 0 and drops out. `draws` has N as its keys.
    """
    values = np.zeros((len(lengths), max((len(d.stratum) for d in draws.values()), default=0)))
    used = np.zeros(len(lengths), dtype=int)
    score, error = np.zeros(len(lengths)), np.zeros(len(lengths))
    running = lengths > 0
    dropped = []  # per look: (rows, leader, gaps to the leader, errors of the gaps)
    rivals = int(running.sum()) - 1
    most = max((d.repeat[-1] + 1 for d in draws.values()), default=0)
    looks = [most]
    if stop_confidence is not None and rivals > 0:
        looks = [FIRST_ROUND << i for i in range(64) if FIRST_ROUND << i < most] + looks
    for look in looks:
        requests = []
        for n in np.unique(lengths[running]).tolist():
            rows = (running & (lengths == n)).nonzero()[0]
            start, stop = int(used[rows[0]]), int(np.searchsorted(draws[n].repeat, look))
            requests += [(n, rows, slice(start, stop))] * (start < stop)
        for (n, rows, new), found in zip(requests, (yield requests), strict=True):
            values[rows, new] = found
            used[rows] = new.stop
            score[rows], error[rows] = estimate(values[rows, :new.stop], draws[n])
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
    for lost, leader, gap, gap_error in reversed(dropped):  # a leader may have dropped out at a later look
        score[lost] = np.minimum(score[leader] - gap, np.nextafter(score[leader], np.float32(-math.inf)))
        error[lost] = np.hypot(error[leader], gap_error)
    return score, error, used

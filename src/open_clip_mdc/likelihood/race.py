"""Monte Carlo scores of an image's candidates race: who is behind for certain drops out, and its draws are saved.

Dimensions: R captions (rows), N scored tokens of a caption, K draws, S mask counts.
"""
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

import numpy as np
from scipy.special import logsumexp

from .draws import Draws, estimate

FIRST_ROUND = 4  # draws per mask count before early stopping looks for the first time; doubled from look to look
BETS = np.array([0.8, 0.4, 0.2, 0.1])  # shares of the largest bet that cannot be lost whole
TINY = 1e-9  # what a bet is divided by where nothing is left to chance
CENTRES = np.array([1 / 16, 1 / 8, 1 / 4, 1 / 2])  # shares of the worst score, around which other lengths are compared
Race = Generator  # of lists of requests


def log_wealth(scores: np.ndarray, draws: Draws, bet: np.ndarray) -> np.ndarray:
    """Return the log of what bets [bets] that a score is above 0 made of 1, [bets, R], from scores of draws [R, K].

    The wealth of a score that is 0 or less passes 1/a with probability a at most, at any number of draws and whatever
    their distribution (Waudby-Smith & Ramdas 2024). Each draw multiplies it by 1 + bet * its share of the estimate, a
    count whose masks are all drawn by exp(bet * the count's share). By log(1 + x) <= x the product of the expectations
    is exp(bet * score) at most. Draws without replacement are negatively associated (Joag-Dev & Proschan 1983), so that
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

    Of equal lengths the differences of the same draws are bet on. Otherwise the leader's score is bet to be above a
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


def run(races: Sequence[Race], read: Callable[[list[tuple]], Iterable[np.ndarray]]) -> list:
    """Return the results of races that take their looks together, so that one reading serves all that still run.

    Args: `read` answers requests (race, N, rows [r], a slice of k draws) with values [r, k] each, in their order.
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
    """Draw until the best of some candidates is certain, or all draws are made: score, error, draws, [R] each.

    With `stop_confidence` a look after 4, 8, 16, ... draws of each mask count drops the candidates that are behind the
    leader for certain, and drawing stops when only the leader is left. The best one, by the scores that all masks would
    give, is dropped with a probability of 1 - stop_confidence at most, which looks and rivals share. For differences of
    any shape, normal or not, and any number of candidates this follows if no draw loses more than `worst` nats a token
    (a uniform guess's loss). Once a draw has lost more, the worst of any candidate so far takes its place: then the
    promise rests on races of known populations (`python -m benchmarks.early_stop`, none of which dropped the best one).

    The price is draws: of 487 a winner by 12 nats takes 65 to 283 at confidence 0.9, by 1 nat 415 to 474. The score of
    a candidate that dropped out is as rough as its standard error says.

    Yields lists of requests for the mean log-likelihood of the hidden tokens, [r, k], of rows [r] of N tokens in some
    of their draws: (N, rows, slice). It is sent their answers.

    Args: `lengths` are N of each candidate, [R]; with 0 it gets 0 and takes no part. `draws` are by N.
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
    for lost, leader, gap, gap_error in reversed(dropped):  # leaders that dropped out themselves come first
        score[lost] = np.minimum(score[leader] - gap, np.nextafter(score[leader], np.float32(-math.inf)))
        error[lost] = np.hypot(error[leader], gap_error)
    return score, error, used

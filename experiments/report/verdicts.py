"""Judge the difference of two rows: its error, its p-value, and the correction over a ledger (claims.py).

**Samples.** A claim is about a method. So the seeds that were trained are a sample of all seeds, and the test images a
sample of all images. The difference D of two rows' means is taken over the seeds that both have. Its error has a part
from seeds and a part from images.

**Seeds** that both rows have are compared pairwise. Three seeds alone say little about a standard deviation. So rows
of different trainings share it with their family: all captioners, or all CLIP models, with the same evaluation
(`pool`, from which the effect that a seed has on all rows is removed). The variance of a difference is then
(d pool + (n - 1) own) / (d + n - 1), with d + n - 1 degrees of freedom, where own is that of its n pairs and pool twice
that of the rows (Smyth 2004). With few seeds the pool is the better estimate, and with many the pairs are. Smyth
estimates d from the rows. Here it is 3, or the pool's degrees of freedom if they are fewer. This is the largest number
at which at most 5 % of ledgers have a false difference even if one row varies three times as much as the others, at any
number of seeds. If it varies four times as much, it is 6 % with two or three seeds. With d = 6 it would be 11 and 15 %.
Rows of the same trainings vary together, so that their own pairs alone are used. One seed resolves nothing: its
interval is of the images alone, and it has no p.

**Images.** Where the results of single images are kept, each image has an influence on D: its weighted deviation from
the mean on the left minus that on the right. The variance from images is the sum over images of the squared mean
influence over seeds, times C / (C - 1) for C images. Difficulty that both sides share cancels. Older evaluations kept
no single images of some metrics (BLEU, METEOR), so that some seeds have none. The variance then comes from the others:
images are the same for all seeds. Where no seed has them, but the mean of values between 0 and 1, the variance is at
most mean (1 - mean) / C (Bhatia and Davis 2000), with two added cases as in Agresti and Caffo (2000). If neither is
possible, the error is unknown and nothing is resolved.

**Both together.** The interaction of a seed with an image is part of both variances. It is subtracted from that of
images, as in the analysis of variance of crossed samples. D is compared with sqrt(sum(t[k]^2 var[k])), where t[k] is
Student's t with the degrees of freedom of seeds or of images. This is a bound whose error rate is at most the nominal
one (Banerjee 1960). The degrees of freedom of Welch and Satterthwaite are not used: with three seeds they give a false
verdict in one of seven ledgers of eleven claims.

**Two questions.** Is D different from 0 (two-sided)? Is D within a margin that was fixed before, -m < D < m (two
one-sided tests, Schuirmann 1987)? For a claim that rows are level the first question is whether D is outside of this
margin. By Holm's correction (1979) the chance that a ledger has any false difference is at most 5 %, and so is the
chance of any false equality. If results were judged before with fewer seeds (tables/looks.csv), p is corrected for
these looks at the data (Pocock 1977, with the correlations of looks after n[1], n[2], ... seeds).
"""
import math
import statistics
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

LEVEL = 0.05
PRIOR = 3  # degrees of freedom with which the pooled variance counts
Part = tuple[float, float]  # a variance, and its degrees of freedom


class Side(NamedTuple):
    """The measurements of a side of a claim, in points."""

    numbers: dict[int, float]  # by seed
    bound: float | None = None  # on the variance from images, used without `items`. None if it is unknown
    items: dict[int, dict] = {}  # by seed that kept them, the weighted deviation of each image from the mean
    trainings: frozenset | None = None  # the runs behind `numbers`, without seeds. None never equals another side's
    pool: "Pool | None" = None  # of the family

    def mean(self, seeds: Iterable[int] | None = None) -> float:
        return statistics.fmean(self.numbers[seed] for seed in seeds or self.numbers)


class Pool(NamedTuple):
    """The variance over seeds that rows of a family share, without the effect of a seed on all rows."""

    variance: float
    freedom: float
    rows: int


class Finding(NamedTuple):
    difference: float | None = None
    error: float | None = None
    interval: tuple[float, float] | None = None  # 95 %
    p: float | None = None  # of the hypothesis that D is 0, or for a level claim within the margin
    p_within: float | None = None  # of the hypothesis that D is not within the margin
    basis: str = "not run"
    seeds: int = 0  # that both sides have
    of_seeds: Part | None = None  # of the error of D. None if unknown
    of_images: Part | None = None  # of one seed alone it includes the seed's interaction with images


class Verdict(NamedTuple):
    p: float | None  # corrected
    p_within: float | None
    outcome: str  # above, below, within, not resolved, not run


# ---- the error over seeds


def pool(rows: Sequence[dict[int, float]]) -> Pool | None:
    """Return the pooled variance of rows, each with its numbers by seed, with the effect of seeds removed.

    Fewer than three rows have none, as two are compared by their own pairs.
    """
    import numpy as np
    rows = [row for row in rows if len(row) > 1 and all(map(math.isfinite, row.values()))]
    if len(rows) < 3:
        return None
    seeds = sorted(set().union(*rows))
    where = np.array([number for number, row in enumerate(rows) for _ in row])
    seed_of = np.array([seeds.index(seed) for row in rows for seed in row])
    values = np.array([value for row in rows for value in row.values()])
    design = np.hstack([np.eye(len(rows))[where], np.eye(len(seeds))[seed_of]])
    fit, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    rest, freedom = values - design @ fit, len(values) - rank
    return Pool(float(rest @ rest) / freedom, freedom, len(rows)) if freedom else None


def seed_variance(left: Side, right: Side, seeds: Sequence[int]) -> tuple[float, float, str]:
    """Return the variance of D from seeds, its degrees of freedom, and in words what it was computed from."""
    count, same = len(seeds), left.trainings is not None and left.trainings == right.trainings
    own = statistics.variance(left.numbers[seed] - right.numbers[seed] for seed in seeds)
    pooled = left.pool
    if pooled is None or pooled != right.pool or same:
        return own / count, count - 1, f"{count} seeds" + " of the same trainings" * same
    prior = min(PRIOR, pooled.freedom)
    freedom = prior + count - 1
    of_pool = pooled.variance * sum(1 / len(side.trainings or (None,)) for side in (left, right))  # a mean of trainings
    moderated = (prior * of_pool + (count - 1) * own) / freedom
    return moderated / count, freedom, f"{count} seeds, sd of {pooled.rows} rows"


# ---- the error over images


def item_variance(left: Side, right: Side, seeds: Sequence[int]) -> list[Part] | None:
    """Return the variance of D from images without the residual, and its degrees of freedom. Empty for a loss."""
    seeds = [seed for seed in seeds if seed in left.items and seed in right.items]
    if not seeds:
        return None if left.bound is None or right.bound is None else [(left.bound + right.bound, math.inf)]
    images = sorted(set().union(*(side.items[seed] for side in (left, right) for seed in seeds)), key=repr)
    if not images:  # a loss is measured on no image
        return []
    import numpy as np
    adds = np.array([[left.items[seed].get(i, 0.0) - right.items[seed].get(i, 0.0) for i in images] for seed in seeds])
    count, times = len(images), len(seeds)
    if count < 2:
        return None
    means = adds.mean(0)
    of_means = float(means @ means) * count / (count - 1)
    rest = float(((adds - means) ** 2).sum()) * count / (count - 1) / (times - 1) / times if times > 1 else 0.0
    return [(max(of_means - rest, 0.0), count - 1)]


# ---- together


def reach(parts: Sequence[Part], p: float) -> float:
    """Return the distance from the true D that is exceeded on one side with probability p at most (Banerjee 1960)."""
    from scipy.special import ndtri, stdtrit  # many times faster than scipy.stats
    return math.sqrt(sum(variance * float(stdtrit(freedom, p) if freedom < math.inf else ndtri(p)) ** 2
                         for variance, freedom in parts))


def tail(parts: Sequence[Part], distance: float) -> float:
    """Return the one-sided p of a distance, the inverse of `reach`. A negative one has 1 minus that of its size."""
    from scipy.optimize import brentq
    if distance <= 0:
        return 1 - tail(parts, -distance) if distance else 0.5
    least = 1e-12
    if reach(parts, least) <= distance:
        return least
    return math.exp(brentq(lambda log_p: reach(parts, math.exp(log_p)) - distance, math.log(least), math.log(0.5)))


def compare(left: Side | None, right: Side | None, margin: float | None = None, level: bool = False,
            earlier: tuple[int, ...] = ()) -> Finding:
    """Compare two sides. `earlier` has the numbers of seeds with which the claim was judged before.

    `level` asks whether the difference is outside of the margin, instead of whether it is not 0.
    """
    if left is None or right is None:
        return Finding()
    seeds = sorted(left.numbers.keys() & right.numbers.keys())
    if not seeds:
        return Finding(left.mean() - right.mean(), basis="no seed in common")
    difference = left.mean(seeds) - right.mean(seeds)
    if not math.isfinite(difference):
        return Finding(difference, basis=f"{len(seeds)} seeds, not a number")
    of_images = item_variance(left, right, seeds)
    known = Finding(difference, seeds=len(seeds),
                    of_images=None if of_images is None else of_images[0] if of_images else (0.0, math.inf))
    if len(seeds) < 2:
        of_seeds, basis = (), "1 seed"
    else:
        *of_seeds, basis = seed_variance(left, right, seeds)
        known = known._replace(of_seeds=tuple(of_seeds))
    if of_images is None:
        return known._replace(basis=f"{basis}, error of images unknown")
    parts = [part for part in (tuple(of_seeds), *of_images) if part and part[0]]
    if not parts:
        return known._replace(basis=f"{basis}, all alike" if of_seeds else basis)
    if of_images:
        basis += f", {of_images[0][1] + 1:,} images" if of_images[0][1] < math.inf else ", bound of the images' error"
    error, wide = math.sqrt(sum(variance for variance, _ in parts)), reach(parts, 0.025)
    known = known._replace(error=error, interval=(difference - wide, difference + wide), basis=basis)
    if not of_seeds:
        return known._replace(basis=f"{basis} alone")  # another training may differ by more, so there is no p
    looks = (*(count for count in earlier if count < len(seeds)), len(seeds))
    if len(looks) > 1:
        basis += f", {len(looks)} looks"
    within = None if margin is None else pocock(tail(parts, margin - abs(difference)), looks)
    beyond = abs(difference) - (margin if level and margin else 0.0)
    apart = pocock(min(1.0, 2 * tail(parts, beyond)), looks)
    return known._replace(p=apart, p_within=within, basis=basis)


@cache
def pocock(p: float, looks: tuple[int, ...]) -> float:
    """Correct p for looks with so many seeds (Pocock 1977). With two, equally spaced, 0.0294 becomes 0.05."""
    if len(looks) == 1 or not 0 < p < 1:
        return p
    import numpy as np
    from scipy.stats import multivariate_normal, norm
    bound = float(norm.isf(p / 2))
    covariance = np.sqrt(np.minimum.outer(looks, looks) / np.maximum.outer(looks, looks))
    inside = multivariate_normal(cov=covariance, seed=0).cdf([bound] * len(looks), lower_limit=[-bound] * len(looks))
    return float(min(max(1 - inside, p), len(looks) * p))


def holm(values: list[float]) -> list[float]:
    """Correct p-values (Holm 1979).

    The k-th smallest of m is multiplied by m - k + 1, and never ends below a smaller one.
    """
    if not all(map(math.isfinite, values)):
        raise ValueError(f"p-values that are no numbers: {', '.join(str(p) for p in values if not math.isfinite(p))}")
    corrected, largest = [0.0] * len(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        corrected[index] = largest
    return corrected


def decide(findings: Iterable[Finding]) -> list[Verdict]:
    """Judge the findings of a ledger together."""
    findings = list(findings)
    corrected = [iter(holm([p for finding in findings if (p := getattr(finding, name)) is not None]))
                 for name in ("p", "p_within")]
    verdicts = []
    for finding in findings:
        p, within = (None if given is None else next(values)
                     for given, values in zip((finding.p, finding.p_within), corrected, strict=True))
        outcome = "not run" if finding.difference is None else "not resolved"
        if within is not None and within <= LEVEL:
            outcome = "within"
        if p is not None and p <= LEVEL:
            outcome = "above" if finding.difference > 0 else "below"
        verdicts.append(Verdict(p, within, outcome))
    return verdicts

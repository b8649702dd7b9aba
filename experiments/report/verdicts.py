"""The verdict on a difference of two rows: its interval, its p, and Holm's correction over a ledger (claims.py).

**The unit.** A claim is about a method, so seeds s of all trainings and images i of all images are samples, and the
difference D of the sides' means errs by both. Seeds of different trainings are independent. Images are shared by all
seeds and by both sides, so that no number of seeds averages their error away.

**Seeds.** Of different trainings a side's mean over n seeds has the variance std^2 / n with n - 1 degrees of freedom
(Welch), and var[seeds] is the sum of the two. Of the same trainings (two scorers or lengths of one model, with guidance
and without, the judge's shares of the same answers) seeds vary together and are compared one by one: d[s] = left[s] -
right[s], var[seeds] = sum((d[s] - D)^2) / (n - 1) / n, with n - 1 degrees of freedom. One seed resolves nothing.

**Images.** Where the results of single images are kept (items/ beside a result), each image has an influence on D: its
weighted deviation from the mean on the left, averaged over seeds, minus that on the right. The sum of their squares,
times C / (C - 1) of C images, is the variance of D with C - 1 degrees of freedom. All cases of an image stand or fall
together, and what both sides find hard cancels: this is the paired test. Where only accuracies are kept, the sides are
taken as independent binomials, (k + 1) of (n + 2) right (Agresti and Caffo 2000): too large rather than too small,
unless an image has many cases. Without items the error of a metric that is no plain share of cases (CIDEr, a macro
average) is unknown, and nothing is resolved. The loss of training is measured on no test set and has none.

**Together.** var[D] = var[seeds] + var[images], in both of which their interaction counts. D / sqrt(var[D]) is
compared with Student's t of Satterthwaite's degrees of freedom, var[D]^2 / sum(var[k]^2 / df[k]). Averages over cells
of which only deviations are known take them as perfectly correlated. Means over seeds are assumed to be normal.

**Verdicts.** "Above": p is two-sided for D = 0, *shows* if D > 0, *contradicts* if D < 0. "Level", margin m: *shows* if
-m < D < m is beyond doubt (two one-sided tests), *contradicts* if |D| > m is, each p doubled. Holm's correction holds
the chance that a ledger contains a false verdict at 5 %. *not resolved*: p > 5 %, or there is none, as of a run that
diverged. *not run*: a side has no result. The interval is the claim's own 95 %, the verdict follows the corrected p.
"""
import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

LEVEL = 0.05  # of false verdicts, over the ledger


class Side(NamedTuple):
    """A side of a claim as it was measured, in points."""

    numbers: dict[int, float]  # by seed
    binomial: float | None  # variance of the mean from a finite test set, if only its size is known; None: unknown
    influence: dict | None = None  # of each image on the mean; its sum is 0
    trainings: frozenset | None = None  # of which `numbers` are, up to the seed; None: not those of another side

    @property
    def mean(self) -> float:
        return statistics.fmean(self.numbers.values())


class Finding(NamedTuple):
    difference: float | None = None
    interval: tuple[float, float] | None = None
    p: float | None = None
    supports: bool = False  # the claim, rather than its opposite
    basis: str = "not run"


class Verdict(NamedTuple):
    finding: Finding
    p: float | None  # corrected
    verdict: str


def test_variance(left: Side, right: Side) -> tuple[float, float, str] | None:
    """Return the variance of the difference from the images of the test set, its degrees of freedom, and its name."""
    if left.influence is not None and right.influence is not None:
        images = left.influence.keys() | right.influence.keys()
        count = len(images)
        if count < 2:
            return None
        squares = sum((left.influence.get(i, 0.0) - right.influence.get(i, 0.0)) ** 2 for i in images)
        return squares * count / (count - 1), count - 1, f"{count:,} images, paired"
    if left.binomial is None or right.binomial is None:
        return None
    return left.binomial + right.binomial, math.inf, "test images"


def seed_samples(left: Side, right: Side) -> tuple[list[list[float]], str]:
    if left.trainings is not None and left.trainings == right.trainings:
        both = [left.numbers[seed] - right.numbers[seed] for seed in left.numbers if seed in right.numbers]
        return [both], f"{len(both)} seed{'s' * (len(both) != 1)} of the same trainings"
    return [list(left.numbers.values()), list(right.numbers.values())], \
        f"{len(left.numbers)} + {len(right.numbers)} seeds"


def compare(left: Side | None, right: Side | None, margin: float | None = None) -> Finding:
    if left is None or right is None:
        return Finding()
    difference = left.mean - right.mean
    samples, seeds = seed_samples(left, right)
    tested = test_variance(left, right)
    if not math.isfinite(sum(map(sum, samples))):
        return Finding(difference, basis=f"{seeds}, not a number")
    if min(map(len, samples)) < 2 or tested is None:
        return Finding(difference, basis=seeds + ("" if tested else ", test error unknown"))
    variances = [*((statistics.variance(numbers) / len(numbers), len(numbers) - 1) for numbers in samples), tested[:2]]
    variance = sum(v for v, _ in variances)
    if variance == 0:
        return Finding(difference, basis=f"{seeds}, all alike")
    from scipy.stats import t as student
    spread = sum(v ** 2 / df for v, df in variances if v)
    freedom = variance ** 2 / spread if spread else math.inf
    error = math.sqrt(variance)
    reach = error * float(student.isf(0.025, freedom))

    def tail(distance: float) -> float:
        return float(student.sf(distance / error, freedom))

    if margin is None:
        p, supports = 2 * tail(abs(difference)), difference > 0
    else:
        supports = abs(difference) < margin
        p = 2 * tail(margin - abs(difference)) if supports else 2 * tail(abs(difference) - margin)
        if supports:
            p = max(p, 2 * tail(margin + abs(difference)))
    return Finding(difference, (difference - reach, difference + reach), min(p, 1.0), supports,
                   f"{seeds}, {tested[2]}" if tested[0] else seeds)


def holm(values: list[float]) -> list[float]:
    """Correct p-values: the k-th smallest of m times m - k + 1, never below that of a smaller one (Holm 1979)."""
    if not all(map(math.isfinite, values)):
        raise ValueError(f"p-values that are no numbers: {', '.join(str(p) for p in values if not math.isfinite(p))}")
    corrected, largest = [0.0] * len(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        corrected[index] = largest
    return corrected


def decide(findings: Iterable[Finding]) -> list[Verdict]:
    findings = list(findings)
    corrected = iter(holm([finding.p for finding in findings if finding.p is not None]))
    verdicts = []
    for finding in findings:
        p = None if finding.p is None else next(corrected)
        if finding.difference is None:
            verdict = "not run"
        elif p is None or p > LEVEL:
            verdict = "not resolved"
        else:
            verdict = "shows" if finding.supports else "contradicts"
        verdicts.append(Verdict(finding, p, verdict))
    return verdicts

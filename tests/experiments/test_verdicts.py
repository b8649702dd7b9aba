"""Claims about verdicts.py: formulas agree with textbooks, false verdicts are rare, and true differences are found."""
import math
from itertools import chain, combinations

import numpy as np
import pytest
from scipy import stats

from experiments.report.verdicts import LEVEL, Finding, Side, compare, decide, holm, pocock, pool, reach, tail

LEDGERS, ROWS, SEEDS, IMAGES = 200, 12, 3, 40
# A procedure that errs in exactly 5 % of ledgers is refused once in a thousand times.
MOST_FALSE = int(stats.binom.isf(0.001, LEDGERS, LEVEL))


def side(values, trainings: str | None = None, pools: tuple = ()) -> Side:
    """Make a side of values [seeds, images], or of numbers by seed, which no image makes uncertain."""
    values = np.asarray(values, dtype=float)
    if values.ndim == 1:
        return Side(dict(enumerate(values.tolist())), 0.0, {seed: {} for seed in range(len(values))},
                    trainings and frozenset({trainings}), pools)
    means = values.mean(1)
    adds = (values - means[:, None]) / values.shape[1]
    items = {seed: dict(enumerate(row.tolist())) for seed, row in enumerate(adds)}
    return Side(dict(enumerate(means.tolist())), None, items, trainings and frozenset({trainings}), pools)


# ---- the parts


def test_two_rows_are_the_paired_t_test_over_seeds_of_both():
    left, right = [60.0, 61.5, 59.0, 63.0], [58.0, 58.5, 58.2]
    finding = compare(side(left), side(right))
    expected = stats.ttest_rel(left[:3], right)
    assert finding.p == pytest.approx(expected.pvalue) and finding.difference == pytest.approx(1.9333, abs=1e-4)
    assert finding.interval == pytest.approx(tuple(expected.confidence_interval(0.95))) and finding.basis == "3 seeds"
    same = compare(side(left, "MDC"), side(right, "MDC"))
    assert same._replace(basis="3 seeds") == finding and same.basis == "3 seeds of the same trainings"


def test_with_alike_seeds_the_error_is_that_of_the_paired_test_over_images():
    rng = np.random.default_rng(0)
    hard = rng.normal(size=50)
    left, right = hard + rng.normal(0.1, 0.3, 50), hard + rng.normal(0, 0.3, 50)
    finding = compare(side([left] * 3), side([right] * 3))
    error = (left - right).std(ddof=1) / math.sqrt(50)
    assert finding.error == pytest.approx(error) and "50 images" in finding.basis
    assert finding.p == pytest.approx(stats.ttest_rel(left, right).pvalue)


def test_with_a_bound_alone_the_error_is_that_of_the_z_test():
    left, right = (side([number] * 3)._replace(bound=bound, items={})
                   for number, bound in ((90.0, 1.5), (85.0, 2.5)))
    assert compare(left, right).error == 2.0 and compare(left, right).p == pytest.approx(2 * stats.norm.sf(5 / 2))


def test_seeds_without_single_images_leave_the_images_error_to_the_others():
    rng = np.random.default_rng(2)
    hard = rng.normal(size=40)
    left, right = (side(share * hard + rng.normal(size=(4, 1)) + rng.normal(size=(4, 40))) for share in (3, 0))
    some = left._replace(items={seed: left.items[seed] for seed in (1, 2, 3)}, bound=100.0)
    found, later = compare(some, right), [one._replace(numbers={s: one.numbers[s] for s in (1, 2, 3)})
                                          for one in (left, right)]
    assert found.difference == compare(left, right).difference and found.of_seeds == compare(left, right).of_seeds
    assert found.of_images == compare(*later).of_images != compare(left, right).of_images
    assert "4 seeds" in found.basis and "40 images" in found.basis
    none = compare(left._replace(items={0: left.items[0]}), some._replace(bound=None))
    assert none.of_images is None and none.p is None


def test_the_variance_is_that_of_crossed_samples():
    """Mean squares of seeds, images and their residual, in the textbook's form (MS_s + MS_i - MS_si) / (S I)."""
    rng = np.random.default_rng(1)
    values = rng.normal(size=(5, 1)) + rng.normal(size=40) + rng.normal(size=(5, 40))
    seeds, images = values.shape
    rows, columns, all_of = values.mean(1, keepdims=True), values.mean(0), values.mean()
    squares = (images * ((rows - all_of) ** 2).sum() / (seeds - 1),
               seeds * ((columns - all_of) ** 2).sum() / (images - 1),
               ((values - rows - columns + all_of) ** 2).sum() / (seeds - 1) / (images - 1))
    expected = (squares[0] + squares[1] - squares[2]) / seeds / images
    assert compare(side(values), side(np.zeros((5, 40)))).error ** 2 == pytest.approx(expected)


def test_pooled_variances_are_the_mean_squares_of_one_and_of_two_ways():
    rng = np.random.default_rng(2)
    table = rng.normal(size=(4, 3)) + rng.normal(0, 3, 3)
    paired, within = pool([dict(enumerate(row)) for row in table.tolist()])
    rest = table - table.mean(1, keepdims=True) - table.mean(0) + table.mean()
    assert (paired.variance, paired.freedom) == (pytest.approx((rest ** 2).sum() / 6), 6)
    assert (within.variance, within.freedom) == (pytest.approx(table.var(1, ddof=1).mean()), 8)
    assert within.p == pytest.approx(stats.bartlett(*table).pvalue)
    assert pool([{0: 1.0, 1: 2.0}, {0: 1.0}, {0: math.nan, 1: 0.0}]) == (), "fewer than three rows are pairs"
    left, right = (side(row, pools=(paired._replace(p=0.3), within)) for row in table[:2])
    assert compare(left, right).error == pytest.approx(math.sqrt(2 * paired.variance / 3))
    one, two = (a_side._replace(pools=(paired._replace(p=0.2), within._replace(p=0.26))) for a_side in (left, right))
    assert compare(one, two).error == pytest.approx(math.sqrt(2 * within.variance / 3))
    alone = compare(*(a_side._replace(pools=(paired._replace(p=0.2), within._replace(p=0.2))) for a_side in (one, two)))
    assert alone.p == pytest.approx(stats.ttest_rel(*table[:2]).pvalue)
    same = compare(*(a_side._replace(trainings=frozenset({"a run"})) for a_side in (left, right)))
    assert same.p == pytest.approx(stats.ttest_rel(*table[:2]).pvalue), "of the same trainings, by their own pairs"
    wild = right._replace(numbers={0: 0.0, 1: 100.0, 2: -100.0})
    assert compare(left, wild).p == pytest.approx(stats.ttest_rel(table[0], [0, 100, -100]).pvalue)


def test_what_is_reached_by_chance_is_banerjees_bound_and_p_its_inverse():
    parts = [(2.0, 2), (1.0, 50)]
    bound = math.sqrt(2 * stats.t.isf(0.01, 2) ** 2 + stats.t.isf(0.01, 50) ** 2)
    assert reach(parts, 0.01) == pytest.approx(bound) and tail(parts, bound) == pytest.approx(0.01)
    assert tail(parts, -bound) == pytest.approx(0.99) and tail(parts, 0.0) == 0.5
    assert tail([(4.0, 7)], 3.0) == pytest.approx(stats.t.sf(1.5, 7)), "of one part it is the t test"


def test_holm_is_bonferroni_on_every_subset():
    """A claim is resolved if every set of claims that it belongs to is, at |S| times the smallest p (closed test)."""
    for p in ([0.01, 0.04, 0.03, 0.005], [0.2, 0.2, 0.9], [0.5], [0.001, 0.9, 0.02, 0.02, 0.6]):
        subsets = list(chain.from_iterable(combinations(range(len(p)), k) for k in range(1, len(p) + 1)))
        closed = [max(min(1.0, len(s) * min(p[j] for j in s)) for s in subsets if i in s) for i in range(len(p))]
        assert holm(p) == pytest.approx(closed)
    with pytest.raises(ValueError, match="p-values that are no numbers: nan"):
        holm([0.01, math.nan])


@pytest.mark.parametrize("looks, nominal", [(2, 0.0294), (3, 0.0221), (5, 0.0158)])
def test_the_level_spent_is_pococks_table(looks, nominal):
    assert pocock(nominal, looks) == pytest.approx(0.05, abs=3e-4) and pocock(nominal, 1) == nominal
    assert nominal < pocock(nominal / 100, looks) * 100 <= looks * nominal + 1e-9


@pytest.mark.parametrize("left,right,margin,outcome", [
    ([60.0, 61.0, 62.0], [50.0, 51.0, 51.5], None, "above"),
    ([50.0, 51.0, 51.5], [60.0, 61.0, 62.0], 2.0, "below"),
    ([60.0, 61.0, 62.0], [60.5, 61.5, 59.5], None, "not resolved"),
    ([60.0, 60.1, 60.2], [60.0, 60.2, 60.1], 1.0, "within"),
    ([60.0, 65.0, 55.0], [60.0, 54.0, 66.0], 1.0, "not resolved"),  # no difference seen is no equality shown
    ([60.0, 60.1, 60.2], [59.0, 59.2, 59.1], 1.0, "above"),  # on the margin
    ([60.0], [50.0], None, "not resolved"),
    ([math.nan, 61.0, 62.0], [50.0, 51.0, 51.5], 1.0, "not resolved"),
])
def test_hand_made_results_have_their_outcomes(left, right, margin, outcome):
    assert decide([compare(side(left), side(right), margin)])[0].outcome == outcome


def test_what_has_no_p_takes_no_part_in_the_correction():
    clear = compare(side([60.0, 61.0, 62.0]), side([50.0, 51.0, 51.5]))
    unknown = compare(side([60.0, 61.0])._replace(items={}, bound=None), side([50.0, 51.5]))
    assert unknown.p is None and unknown.basis == "2 seeds, error of images unknown"
    verdicts = decide([compare(None, side([1.0])), clear, compare(side([9.0]), side([1.0])), unknown])
    assert [v.outcome for v in verdicts] == ["not run", "above", "not resolved", "not resolved"]
    assert verdicts[1].p == clear.p and compare(side([9.0]), side([9.0])).basis == "1 seed"
    assert compare(side([9.0, 8.0]), side([9.0, 8.0])) == Finding(
        0.0, basis="2 seeds, all alike", seeds=2, of_seeds=(0.0, 1), of_images=(0.0, math.inf))


# ---- under the null, and under the alternative


def simulate(rng: np.random.Generator, effects: np.ndarray, common: float, spread: float) -> list[Side]:
    """Draw rows whose true means are `effects`, in standard deviations over seeds, on the same images.

    A row's trainings vary by 1, seeds move all rows by `common`, rows differ in how much they vary by `spread`, and
    each image, each image of a row, and each image of a training has a part of its own.
    """
    scale = np.exp(np.linspace(-0.5, 0.5, ROWS) * math.log(spread))[:, None] if spread > 1 else 1.0
    means = effects[:, None] + common * rng.normal(size=SEEDS) + scale * rng.normal(size=(ROWS, SEEDS))
    values = means[..., None] + 5 * rng.normal(size=IMAGES) + 2 * rng.normal(size=(ROWS, 1, IMAGES)) \
        + 3 * rng.normal(size=(ROWS, SEEDS, IMAGES))
    pools = pool([dict(enumerate(row)) for row in values.mean(2).tolist()])
    return [side(row, str(number), pools) for number, row in enumerate(values)]


def outcomes(rng: np.random.Generator, effects: np.ndarray, margin: float | None = None, common: float = 0.0,
             spread: float = 1.0) -> list[str]:
    first, *others = simulate(rng, effects, common, spread)
    return [verdict.outcome for verdict in decide(compare(one, first, margin) for one in others)]


@pytest.mark.parametrize("common, spread", [(0.0, 1.0), (1.0, 1.0), (1.0, 3.0), (1.0, 10.0)])
def test_at_most_five_percent_of_null_ledgers_hold_a_false_difference(common, spread):
    """Seeds move all rows or none, and rows vary alike or not (the last ones by 10 times the first's)."""
    rng = np.random.default_rng(3)
    false = sum(bool({"above", "below"} & set(outcomes(rng, np.zeros(ROWS), 1.0, common, spread)))
                for _ in range(LEDGERS))
    assert false <= MOST_FALSE


@pytest.mark.parametrize("common", [0.0, 1.0])
def test_at_most_five_percent_of_ledgers_hold_a_false_equality(common):
    """All rows are a margin away from the first, the nearest that is not within it."""
    rng, effects = np.random.default_rng(4), np.array([0.0] + [2.0, -2.0, 2.0] * 4)[:ROWS]
    false = sum("within" in outcomes(rng, effects, 2.0, common) for _ in range(LEDGERS))
    assert false <= MOST_FALSE

"""Claims about verdicts.py: formulas agree with textbooks, false verdicts are rare, and true differences are found."""
import math
from itertools import chain, combinations

import numpy as np
import pytest
from scipy import stats

from experiments.report.claims import says
from experiments.report.verdicts import LEVEL, Finding, Pool, Side, compare, decide, holm, pocock, pool, reach, tail

LEDGERS, ROWS, SEEDS, IMAGES = 200, 12, 3, 40
# Eleven claims of which six have a side in common.
PAIRS = (*((0, other) for other in range(1, 7)), (1, 7), (7, 8), (8, 9), (9, 10), (10, 11))
# A procedure that errs in exactly 5 % of ledgers is refused once in a thousand times.
MOST_FALSE = int(stats.binom.isf(0.001, LEDGERS, LEVEL))


def side(values, trainings: str | None = None, pooled: Pool | None = None) -> Side:
    """Make a side of values [seeds, images], or of numbers by seed, which no image makes uncertain."""
    values = np.asarray(values, dtype=float)
    if values.ndim == 1:
        return Side(dict(enumerate(values.tolist())), 0.0, {seed: {} for seed in range(len(values))},
                    trainings and frozenset({trainings}), pooled)
    means = values.mean(1)
    adds = (values - means[:, None]) / values.shape[1]
    items = {seed: dict(enumerate(row.tolist())) for seed, row in enumerate(adds)}
    return Side(dict(enumerate(means.tolist())), None, items, trainings and frozenset({trainings}), pooled)


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
    left, right = (side([number] * 3)._replace(bound=bound, items={}) for number, bound in ((90.0, 1.5), (85.0, 2.5)))
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


def test_a_pooled_variance_is_the_mean_square_of_two_ways_and_counts_as_three_degrees_of_freedom_of_the_pairs():
    rng = np.random.default_rng(2)
    table = rng.normal(size=(4, 3)) + rng.normal(0, 3, 3)
    pooled = pool([dict(enumerate(row)) for row in table.tolist()])
    rest = table - table.mean(1, keepdims=True) - table.mean(0) + table.mean()
    assert pooled == (pytest.approx((rest ** 2).sum() / 6), 6, 4)
    assert pool([{0: 1.0, 1: 2.0}, {0: 1.0}, {0: math.nan, 1: 0.0}]) is None, "fewer than three rows are pairs"
    left, right = (side(row, pooled=pooled) for row in table[:2])
    own = (table[0] - table[1]).var(ddof=1)
    found = compare(left, right)
    assert found.error ** 2 == pytest.approx((3 * 2 * pooled.variance + 2 * own) / 5 / 3)
    assert found.p == pytest.approx(2 * stats.t.sf(abs(found.difference) / found.error, 5))
    few = compare(*(one._replace(pool=pooled._replace(freedom=1)) for one in (left, right)))
    assert few.of_seeds == (pytest.approx((1 * 2 * pooled.variance + 2 * own) / 3 / 3), 3)
    same = compare(*(one._replace(trainings=frozenset({"a run"})) for one in (left, right)))
    assert same.p == pytest.approx(stats.ttest_rel(*table[:2]).pvalue), "of the same trainings, by their own pairs"


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


@pytest.mark.parametrize("looks, nominal", [((3, 6), 0.0294), ((2, 4, 6), 0.0221), ((1, 2, 3, 4, 5), 0.0158)])
def test_the_level_spent_is_pococks_table(looks, nominal):
    assert pocock(nominal, looks) == pytest.approx(0.05, abs=3e-4) and pocock(nominal, (3,)) == nominal
    assert nominal < pocock(nominal / 100, looks) * 100 <= len(looks) * nominal + 1e-9


def test_looks_with_nearly_the_same_seeds_cost_less_and_later_seeds_than_there_are_were_no_look():
    draws = np.random.default_rng(0).normal(size=(3, 1_000_000))  # of three seeds
    either = np.maximum(abs(draws[:2].sum(0)) / math.sqrt(2), abs(draws.sum(0)) / math.sqrt(3))
    assert pocock(0.0104, (2, 3)) == pytest.approx((either > stats.norm.isf(0.0052)).mean(), abs=4e-4)
    assert 0.01 < pocock(0.01, (21, 22)) < pocock(0.01, (11, 22)) < pocock(0.01, (3, 22)) < 0.02
    left, right = side([60.0, 61.5, 59.0]), side([58.0, 58.5, 58.2])
    once, twice = compare(left, right), compare(left, right, earlier=(2, 3, 4))
    assert twice.p == pocock(once.p, (2, 3)) > once.p and twice.basis == once.basis + ", 2 looks"


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


@pytest.mark.parametrize("left, verdict", [
    ([62.5, 62.7, 62.6], "shows"), ([64.9, 65.2, 65.1], "not resolved"), ([68.5, 68.7, 68.6], "contradicts"),
    ([51.5, 51.7, 51.6], "contradicts")])
def test_level_has_one_margin_for_both_answers(left, verdict):
    """A difference of 5.1 is surely not 0. With a margin of 5 it neither shows nor contradicts that rows are level."""
    right = [60.0, 60.1, 60.1]
    (found,) = decide([compare(side(left), side(right), 5.0, level=True)])
    assert says(found, True) == verdict
    assert decide([compare(side(left), side(right), 5.0)])[0].p <= LEVEL or verdict == "shows"


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


def simulate(rng: np.random.Generator, effects: np.ndarray, common: float, wild: float, seeds: int) -> list[Side]:
    """Draw rows whose true means are `effects`, in standard deviations over seeds, on the same images.

    A row's trainings vary by 1, and the first row's by `wild`. Seeds move all rows by `common`. Each image, each image
    of a row, and each image of a training has a part of its own.
    """
    scale = np.array([wild] + [1.0] * (ROWS - 1))[:, None]
    means = effects[:, None] + common * rng.normal(size=seeds) + scale * rng.normal(size=(ROWS, seeds))
    values = means[..., None] + 5 * rng.normal(size=IMAGES) + 2 * rng.normal(size=(ROWS, 1, IMAGES)) \
        + 3 * rng.normal(size=(ROWS, seeds, IMAGES))
    pooled = pool([dict(enumerate(row)) for row in values.mean(2).tolist()])
    return [side(row, str(number), pooled) for number, row in enumerate(values)]


def outcomes(rng: np.random.Generator, effects: np.ndarray, margin: float | None = None, common: float = 0.0,
             wild: float = 1.0, seeds: int = SEEDS) -> list[str]:
    rows = simulate(rng, effects, common, wild, seeds)
    return [verdict.outcome for verdict in decide(compare(rows[i], rows[j], margin) for i, j in PAIRS)]


@pytest.mark.parametrize("seeds, common, wild", [(3, 0.0, 1.0), (3, 1.0, 1.0), (2, 1.0, 3.0), (3, 0.0, 3.0),
                                                 (5, 1.0, 3.0)])
def test_at_most_five_percent_of_null_ledgers_hold_a_false_difference(seeds, common, wild):
    """Seeds move all rows or none, and a row that is a side of six claims varies as the others, or three times more."""
    rng = np.random.default_rng(3)
    false = sum(bool({"above", "below"} & set(outcomes(rng, np.zeros(ROWS), 1.0, common, wild, seeds)))
                for _ in range(LEDGERS))
    print(f"{seeds} seeds, common {common}, a row x {wild}: {false} of {LEDGERS} ledgers")
    assert false <= MOST_FALSE


@pytest.mark.parametrize("common, wild", [(0.0, 1.0), (1.0, 3.0)])
def test_at_most_five_percent_of_ledgers_hold_a_false_equality(common, wild):
    """The sides of each claim are a margin apart, the nearest that is not within it."""
    rng, effects = np.random.default_rng(4), np.array([0.0, 2, -2, 2, -2, 2, -2, 0, 2, 0, 2, 0])
    assert all(abs(effects[i] - effects[j]) == 2 for i, j in PAIRS)
    false = sum("within" in outcomes(rng, effects, 2.0, common, wild) for _ in range(LEDGERS))
    assert false <= MOST_FALSE

"""Claims about needed.py: planned power is that of the verdicts, and costs are counted once."""
import math

import numpy as np
import pytest
from conftest import REPO
from scipy import stats

from experiments.report import needed, publish
from experiments.report.verdicts import Side, compare, pocock

CLAIMS = publish.read_claims((REPO / "experiments" / "results" / "claims.csv").read_text(encoding="utf-8"))
DRAWS = 800
LEVELS = {"different": 0.01, "within": 0.01}


def row(name: str = "scenes.a", trainings: str = "MDC ARC", **changed: object) -> dict[str, str]:
    """A claim of three seeds, whose pairs of seeds have a standard deviation of sqrt(3)."""
    fields = {"difference": 2, "seed error": 1, "seed freedom": 2, "image error": 0.1, "margin": "", "p": 0.2,
              "p within": "", "seeds": 3, "errors of": "3 seeds", "verdict": "not resolved", "ledger": "claims"}
    return {key: str(value) for key, value in (fields | changed).items()} | {
        "id": name, "trainings": trainings, "claim": "", "command": ""}


@pytest.mark.parametrize("how, seeds, difference", [("different", 4, 4.8), ("within", 6, 0.3)])
def test_power_is_how_often_the_verdicts_rule_decides(how, seeds, difference):
    """Seeds of sd 1 and images of sd 0.5 are drawn. The interval holds in 999 of 1,000 cases."""
    rng, images, margin = np.random.default_rng(seeds), 0.25, 3.0
    zero, found = Side(dict.fromkeys(range(seeds), 0.0), 0.0), 0
    for _ in range(DRAWS):
        numbers = difference + rng.normal(0, 1, seeds) + rng.normal(0, 0.5)
        finding = compare(Side(dict(enumerate(numbers.tolist())), images), zero, margin)
        found += (finding.p if how == "different" else finding.p_within) <= LEVELS[how]
    parts = (1 / seeds, seeds - 1), (images, math.inf)
    power = (needed.power_different(*parts, difference, 0.01) if how == "different" else
             needed.power_within(*parts, difference, margin, 0.01))
    low, high = stats.binom.interval(0.999, DRAWS, power)
    assert 0.5 < power < 0.95 and low <= found <= high, (power, found / DRAWS)


@pytest.mark.parametrize("freedom", [2, 5, 30])
def test_without_images_power_is_that_of_the_non_central_t(freedom):
    limit = stats.t.isf(0.005, freedom)
    found = needed.power_different((0.25, freedom), (0.0, math.inf), 0.5 * (limit + 1), 0.01)
    assert found == pytest.approx(stats.nct.sf(limit, freedom, limit + 1), abs=0.01)  # of 100 estimates


def test_a_ledger_shares_the_level_of_a_second_look():
    assert needed.first_step(1) == pytest.approx(0.0294, abs=1e-4), "Pocock 1977"
    assert pocock(needed.first_step(7), 2) == pytest.approx(0.05 / 7, rel=0.01)
    ledger = [row(), row(p=0.01, verdict="shows", **{"p within": 1}), row(p="", verdict="not resolved")]
    assert needed.levels(ledger) == {"different": needed.first_step(2), "within": needed.first_step(2)}


def test_the_least_number_of_seeds_is_found_or_why_there_is_none():
    one = needed.need(row(), LEVELS)
    power = [needed.power_different((3 / seeds, seeds - 1), (0.01, math.inf), 2, 0.01)
             for seeds in (one.seeds - 1, one.seeds)]
    assert power[0] < 0.8 <= power[1] and one.how == "different" and one.added == one.seeds - 3
    level = needed.need(row(difference=0.1, margin=3, **{"p within": 0.3}), LEVELS)
    assert level.how == "within" and level.seeds < 12
    for changed, why in ((dict(difference=0.5), "more than 100"), (dict(difference=0.3), "not with these images"),
                         (dict(p="", seeds=1), "unknown")):
        none = needed.need(row(**changed), LEVELS)
        assert (none.seeds, none.how, none.added) == (None, why, 2 * (why == "unknown"))


@pytest.mark.parametrize("how, changed, distance, tail", [
    ("different", dict(difference=0.1), 0.1, 0.005), ("within", dict(difference=0.9, margin=1, p=""), 0.1, 0.01)])
def test_the_images_that_seeds_cannot_replace_are_those_of_the_textbook(how, changed, distance, tail):
    """n = ((z[1 - alpha] + z[power]) sd / distance)^2, for one-sided alpha and the distance to 0 or to the margin."""
    claim = row(**changed, **{"p within": 0.2 if how == "within" else "", "errors of": "3 seeds, 1,000 images"})
    deviation = 0.1 * math.sqrt(1000)
    images = ((stats.norm.isf(tail) + stats.norm.isf(0.2)) * deviation / distance) ** 2
    found = needed.need(claim, LEVELS)
    assert (found.how, found.images) == ("not with these images", 100 * math.ceil(images / 100))
    assert f"at least {found.images:,}" in needed.line(found)[6]
    alike = needed.need(claim | {"difference": "0" if how == "different" else "1"}, LEVELS)
    assert (alike.how, alike.images) == ("not with these images", None), "no number of images decides it either"
    unnamed = needed.need(claim | {"errors of": "3 seeds, bound of the images' error"}, LEVELS)
    assert (unnamed.how, unnamed.images) == ("not with these images", None)


def test_errors_that_seeds_would_measure_cost_and_ratios_without_a_number_do_not():
    one, kept = row(p="", seeds=1, trainings="MDC"), row(p="", trainings="ARC", **{"image error": ""})
    assert [needed.need(each, LEVELS).added for each in (one, kept)] == [2, 3], "without single images all run again"
    none = needed.need(row(p="", difference=math.nan, **{"errors of": "3 seeds, not a number"}), LEVELS)
    assert (none.how, none.added, needed.unknown([none])) == ("no number", 0, 0)
    assert needed.line(none)[6:] == ["3 seeds, not a number", ""]
    assert needed.to_share([none.row] * 3, [none]) == "cannot: 0 of the 1 claims it takes"
    blind = [needed.need(each, LEVELS) for each in (one, kept)]
    assert "So 1 of the 2 whose error is unknown would have to be decided, too. To measure it takes 0.2 core" in (
        needed.spent(blind, 4)) and "It cannot be reached." in needed.spent([none], 3)
    few = needed.need(row(), LEVELS)
    assert few.seeds and "So it is reached." in needed.spent([few, none], 4)
    assert "That is reached already." in needed.spent(blind, 8)


def test_trainings_that_claims_share_are_paid_once_and_the_cheapest_claims_first():
    few, more, other = (needed.Need(row(trainings=trainings), seeds, "different") for trainings, seeds in (
        ("MDC ARC", 5), ("MDC BERT", 9), ("CLIP-e4 MCD-cfg--short-e4", 5)))
    assert needed.hours([few]) == 2 * 2 * 3 / 60 and needed.hours([other]) == 2 * (9 + 30) / 60
    assert needed.hours([few, more]) == (6 + 2 + 6) * 3 / 60
    assert needed.cheapest_first([other, more, few]) == [few, more, other]
    assert needed.to_share([few.row] * 8, [few, more, other]) == f"{needed.hours([few]):.1f}"
    assert needed.to_share([few.row] * 3, [few, needed.Need(row(), None, "unknown")]).startswith("unknown: 1 of the 2")
    with pytest.raises(ValueError, match="no measured time of MDC at paper"):
        needed.hours([needed.Need(row("paper.a", "MDC"), 5, "different")])


def test_parts_of_the_archived_errors_make_the_whole_and_every_open_claim_is_listed():
    for claim in (claim for claim in CLAIMS if claim["standard error"]):
        parts = math.hypot(float(claim["seed error"]), float(claim["image error"]))
        assert parts == pytest.approx(float(claim["standard error"]), rel=1e-3) and claim["trainings"], claim["id"]
    shown = needed.page(CLAIMS).rpartition("## Every open claim")[2]
    assert [line.split(" | ")[0][2:] for line in shown.splitlines() if line.startswith("| ")][2:] == [
        claim["id"] for claim in CLAIMS if claim["verdict"] == "not resolved"]

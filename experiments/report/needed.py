"""Find the seeds that would decide the claims that are not resolved, and what they cost (results/open.md).

It reads claims.csv alone. A claim's error has a part from seeds, which shrinks with more of them, and a part from
images, which does not. verdicts.py says where both come from, and when a claim is decided.
"""
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from .claims import PAPER
from .verdicts import LEVEL, pocock, reach

POWER = 0.8
MOST = 100  # seeds. A claim that needs more is not planned
LOOKS = 2  # the results have been judged before the seeds are added
HOURS = 25  # core-hours to plan with
SHARE = 0.25  # of the claims of a ledger, those that may stay open
FIRST = 3  # seeds that measure an error which one seed cannot
ENDLESS = 10_000_000  # seeds, where their part of the error is gone
ESTIMATES = [(number + 0.5) / 100 for number in range(100)]
# Core-minutes of one seed of a training with its evaluation, by scale and name. They were measured with two at a time
# on two cores of an AMD EPYC (results/rich.md, scenes.md, mcdiffusion.md, flickr8k.md, position.md).
COSTS = (("rich", "", 16), ("scenes", "-(cfg|mcs)--", 30), ("scenes", "-e4$", 9), ("scenes", "", 3),
         ("flickr8k", "", 8), ("position", "", 3))

Part = tuple[float, float]  # variance of the difference, degrees of freedom


class Need(NamedTuple):
    """An open claim with the seeds that it needs."""

    row: dict[str, str]  # of claims.csv
    seeds: int | None  # in all. None if no number of seeds up to MOST is known to decide it
    how: str  # different, within, or why `seeds` is None
    images: int | None = None  # in hundreds, without which no number of seeds decides it. None if these are enough

    @property
    def scale(self) -> str:
        return self.row["id"].partition(".")[0]

    @property
    def added(self) -> int:
        if self.seeds is None and self.how != "unknown":
            return 0
        now = int(self.row["seeds"] or 0)
        if self.seeds is None and now >= FIRST:  # older evaluations kept no single images: all seeds run again
            return now
        return max((self.seeds or FIRST) - now, 0)


# ---- the number of seeds


def at(of_seeds: Part, now: int, seeds: int) -> Part:
    """Return the seeds' part of the error with another number of seeds: a variance of means, S^2 / n."""
    variance, freedom = of_seeds
    return variance * now / seeds, freedom + seeds - now


def estimates(of_seeds: Part, of_images: Part) -> Iterator[list[Part]]:
    """Yield equally likely estimates of the error: that of f degrees of freedom is chi^2(f) / f times the true one."""
    from scipy.special import gammaincinv
    (variance, freedom), half = of_seeds, of_seeds[1] / 2
    return ([(variance * float(gammaincinv(half, share)) / half, freedom), of_images] for share in ESTIMATES)


def power_different(of_seeds: Part, of_images: Part, difference: float, level: float) -> float:
    """Return the chance that a difference is found: the non-central t distribution, as a mean over estimates of the
    error (Owen 1965), for the bound that verdicts.py uses. The wrong sign is left out."""
    from scipy.special import ndtr
    error = math.sqrt(of_seeds[0] + of_images[0])
    return fmean(float(ndtr((abs(difference) - reach(found, level / 2)) / error))
                 for found in estimates(of_seeds, of_images))


def power_within(of_seeds: Part, of_images: Part, difference: float, margin: float, level: float) -> float:
    """Return the chance that both one-sided tests find a difference within the margin (Phillips 1990)."""
    from scipy.special import ndtr
    error = math.sqrt(of_seeds[0] + of_images[0])
    rooms = [margin - reach(found, level) for found in estimates(of_seeds, of_images)]
    return fmean(max(0.0, float(ndtr((room - difference) / error) - ndtr((-room - difference) / error)))
                 for room in rooms)


def first_step(count: int) -> float:
    """Return the level of a question that `count` claims share, with three digits: the inverse of Pocock's p."""
    from scipy.optimize import brentq
    level = LEVEL / max(count, 1)
    return float(f"{brentq(lambda p: pocock(p, LOOKS) - level, level / LOOKS, level, xtol=1e-6):.3g}")


def levels(ledger: Sequence[dict[str, str]]) -> dict[str, float]:
    """Return the level of each question in a ledger. A claim that was never tested counts in both questions."""
    new = sum(row["verdict"] == "not resolved" and not row["p"] and not row["p within"] and
              math.isfinite(float(row["difference"])) for row in ledger)
    return {how: first_step(new + sum(row[p] != "" and float(row[p]) > LEVEL for row in ledger))
            for how, p in (("different", "p"), ("within", "p within"))}


def times_the_images(power: Callable[[float], float]) -> float | None:
    """Return how many times the images are needed for POWER, the seeds' part of the error being gone. None: never.

    `power` takes the share of the images' variance that is left: 1 / k of it with k times the images, S^2 / C.
    """
    from scipy.optimize import brentq
    if power(1 / ENDLESS) < POWER:
        return None
    return 1 / brentq(lambda share: power(share) - POWER, 1 / ENDLESS, 1)


def need(row: dict[str, str], level: dict[str, float]) -> Need:
    """Return the seeds that an open claim needs at the levels of its ledger."""
    if not math.isfinite(float(row["difference"])):
        return Need(row, None, "no number")
    if not row["p"] and not row["p within"]:
        return Need(row, None, "unknown")
    now, difference, margin = int(row["seeds"]), float(row["difference"]), float(row["margin"] or 0)
    of_seeds = float(row["seed error"]) ** 2, float(row["seed freedom"])
    of_images = float(row["image error"]) ** 2, math.inf
    powers = {"different": lambda parts: power_different(*parts, difference, level["different"]),
              "within": lambda parts: power_within(*parts, difference, margin, level["within"])}
    found, times = [], []
    for how, p in (("different", row["p"]), ("within", row["p within"])):
        def decides(seeds: int, how: str = how) -> bool:
            return powers[how]((at(of_seeds, now, seeds), of_images)) >= POWER
        if p and decides(ENDLESS):
            found.append((now + 1 + bisect_left(range(now + 1, MOST + 1), True, key=decides), how))
        elif p:
            times.append(times_the_images(lambda share, how=how: powers[how](
                (at(of_seeds, now, ENDLESS), (of_images[0] * share, math.inf)))))
    if not found:
        count = re.search(r"([\d,]+) images", row["errors of"])
        more = min((one for one in times if one), default=None)
        return Need(row, None, "not with these images",
                    100 * math.ceil(int(count[1].replace(",", "")) * more / 100) if count and more else None)
    seeds, how = min(found)
    return Need(row, seeds, how) if seeds <= MOST else Need(row, None, f"more than {MOST}")


# ---- the cost


def minutes(scale: str, training: str) -> float:
    for name, pattern, cost in COSTS:
        if name == scale and re.search(pattern, training):
            return cost
    raise ValueError(f"needed.COSTS has no measured time of {training} at {scale}: add it")


def hours(needs: Iterable[Need]) -> float:
    """Return the core-hours of all seeds that are added for some claims. A training that they share counts once."""
    added: dict[tuple[str, str], int] = {}
    for one in needs:
        for training in one.row["trainings"].split():
            added[one.scale, training] = max(one.added, added.get((one.scale, training), 0))
    return sum(count * minutes(*key) for key, count in added.items() if count) / 60


def cheapest_first(needs: Iterable[Need]) -> list[Need]:
    """Return the claims that seeds can decide. Each is the one that adds least to the cost of those before it."""
    rest, chosen = [one for one in needs if one.seeds], []
    while rest:
        chosen.append(min(rest, key=lambda one: hours([*chosen, one])))
        rest.remove(chosen[-1])
    return chosen


def affordable(order: Sequence[Need]) -> int:
    return sum(hours(order[:number]) <= HOURS for number in range(1, len(order) + 1))


# ---- the page


def by_ledger(rows: Iterable[dict[str, str]]) -> dict[tuple[str, str], list[dict[str, str]]]:
    """Return the claims of each ledger and scale that could have a verdict here."""
    found: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows:
        if row["verdict"] not in (PAPER, "not run"):
            found.setdefault((row["ledger"], row["id"].partition(".")[0]), []).append(row)
    return found


def to_share(ledger: Sequence[dict[str, str]], needs: Sequence[Need]) -> str:
    """Return the core-hours after which at most SHARE of the claims are open, or that seeds cannot reach it."""
    order, must = cheapest_first(needs), len(needs) - int(SHARE * len(ledger))
    if must <= len(order):
        return f"{hours(order[:max(must, 0)]):.1f}"
    known = f"{len(order)} of the {must} claims it takes"
    return f"unknown: {known}" if must <= len(order) + unknown(needs) else f"cannot: {known}"


def unknown(needs: Iterable[Need]) -> int:
    return sum(one.how == "unknown" for one in needs)


def line(one: Need) -> list[str]:
    row, cost = one.row, f"{hours([one]):.1f}"
    difference, *errors = (float(row[name] or "nan") for name in ("difference", "seed error", "image error"))
    shown = [f"{error:.3g}" if math.isfinite(error) else "unknown" for error in errors]
    needed = (row["errors of"] if one.how in ("unknown", "no number") else f"{one.seeds}, {one.how}" if one.seeds else
              one.how + (f", at least {one.images:,}" if one.images else ""))
    return [row["id"], row["claim"], f"{difference:+.3g}" if math.isfinite(difference) else "no number", shown[0],
            "at most " * (row["seeds"] == "1") + shown[1], row["margin"], needed,
            cost if one.seeds else f"({cost})" if cost != "0.0" else ""]


def spent(needs: Sequence[Need], count: int) -> str:
    """Return in words what HOURS decide, and whether at most SHARE of `count` claims then stay open."""
    bought, most = affordable(cheapest_first(needs)), int(SHARE * count)
    left, blind = len(needs) - bought, unknown(needs)
    if len(needs) <= most:
        said = "That is reached already."
    elif left <= most:
        said = "So it is reached."
    elif left - blind > most:
        said = "It cannot be reached."
    else:
        measured = hours(one for one in needs if one.how == "unknown")
        said = (f"So {left - most} of the {blind} whose error is unknown would have to be decided, too. "
                f"To measure it takes {measured:.1f} core-hours more.")
    return (f"{HOURS} core-hours, spent on the cheapest claims first, decide {bought} of {len(needs)} open ones.\n"
            f"{left} of {count} claims then stay open. A quarter is {most}. {said}\n")


def page(rows: Iterable[dict[str, str]]) -> str:
    """Return the tables of results/open.md for the rows of claims.csv, as Markdown."""
    from open_clip_mdc.data.markdown import markdown_table
    needs, totals, ledgers = [], [], by_ledger(rows)
    for (ledger, scale), of_ledger in ledgers.items():
        level = levels(of_ledger)
        found = [need(row, level) for row in of_ledger if row["verdict"] == "not resolved"]
        order, blind = cheapest_first(found), [one for one in found if one.how == "unknown"]
        cost = f" ({hours(blind):.1f})" if hours(blind) else ""
        totals.append([ledger, scale, len(of_ledger), len(found), len(order), f"{hours(order):.1f}",
                       len(found) - len(order) - len(blind), f"{len(blind)}{cost}", to_share(of_ledger, found)])
        needs += found
    order = cheapest_first(needs)
    return "\n".join([
        "## What each ledger needs\n", markdown_table(
            ["ledger", "scale", "claims", "open", "decided by seeds", "core-hours for these", "not by seeds", "unknown",
             "core-hours until a quarter is open"], totals),
        f"\n## What {HOURS} core-hours decide\n", spent(needs, sum(map(len, ledgers.values()))), markdown_table(
            ["", "claim", "seeds in all", "core-hours so far", "to repeat what is archived"],
            [[number, one.row["id"], one.seeds, f"{hours(order[:number]):.1f}", f"`{one.row['command']}`"]
             for number, one in enumerate(order[:affordable(order)], 1)]),
        "\n## Every open claim\n", markdown_table(
            ["id", "claim", "difference", "error of seeds", "error of images", "margin", "seeds needed", "core-hours"],
            map(line, needs)), ""])

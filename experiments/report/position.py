"""Compare the second mention of a word with the first (experiments/mentions.py): ratios, verdicts and a figure.

Ratios are compared by their logarithms (verdicts.py), over seeds and over held-out images. For each image let x be the
sum over its mentions of weight times measure, and w the sum of the weights. X and W are sums over images, 1 and 2 the
places. Then log ratio = log(X2 / W2) - log(X1 / W1), and the influence of an image is
x2 / X2 - w2 / W2 - x1 / X1 + w1 / W1. The logarithm does not exist where X1 or X2 is not positive.
"""
import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from ..tables import position as tables
from ..tables.cells import Cell
from ..tables.scales import Scale
from . import claims
from .claims import Claim
from .results import parts
from .verdicts import Finding, Side, compare, decide

MARGIN = math.log(1.1)  # ratios within a tenth of 1 count as level
LEDGERS = ("position", "position-beside")  # the paper's claims, and those on other objectives
LOG = " (log of the ratio)"
TESTED = {"gap": "gap to the mean image", "gain": "gain on the words alone", "gradient": "gradient at the encoder"}


class Row(NamedTuple):
    data: str  # key of tables.REDUNDANCIES
    objective: str


def log_ratio(values: dict[str, list[float]], measure: str) -> tuple[float, list[float]]:
    """Return the log of second over first of a measure, and the influence of each image. NaN if it does not exist."""
    first, second = ([values[f"{name}_{place}"] for name in (measure, "weight")] for place in tables.PLACES)
    x1, w1, x2, w2 = map(sum, (*first, *second))
    if min(x1, x2) <= 0:
        return math.nan, [math.nan] * len(first[0])
    influence = [a2 / x2 - b2 / w2 - a1 / x1 + b1 / w1 for a1, b1, a2, b2 in zip(*first, *second, strict=True)]
    return math.log(x2 / w2) - math.log(x1 / w1), influence


def side(results: dict, scale: Scale, cell: Cell, statistic=log_ratio) -> Side | None:
    """Return a statistic of a row's runs in a cell's measure, with the influence of images. None if none ran."""
    numbers, adds, measure = {}, {}, cell.column.partition(",")[0]
    for seed, result in sorted(parts(results, scale, cell)[0].items()):
        items = json.loads((result.path.parent / "items" / result.path.name).read_text(encoding="utf-8"))
        numbers[seed], influence = statistic(items["values"], measure)
        adds[seed] = dict(zip(items["images"], influence, strict=True))
    return Side(numbers, None, adds, frozenset([cell.run])) if numbers else None


def row_of(cell: Cell) -> Row:
    return Row(cell.block, cell.row.partition(", ")[2])


def against(found: Side | None, value: float, margin: float | None = None, level: bool = False,
            earlier: tuple[int, ...] = ()) -> Finding:
    """Compare a side with a number, as `compare` does with another side."""
    constant = found and Side(dict.fromkeys(found.numbers, value), 0.0, {seed: {} for seed in found.numbers},
                              found.trainings)
    return compare(found, constant, margin, level, earlier)


def against_one(found: Side | None, margin: float | None = None, earlier: tuple[int, ...] = ()) -> Finding:
    """Compare the log of a ratio with that of 1. No claim says that a ratio is not 1, so it has no such p."""
    return against(found, 0.0, margin, earlier=earlier)._replace(p=None)


def give_verdicts(ledger: list[Claim], results: dict, scale: Scale) -> list[claims.Row]:
    """Return the claims of a ledger with their verdicts, corrected together.

    A level claim compares second with first, the others compare two ratios, each that of the row of its cell.
    """
    def found(claim: Claim) -> Finding:
        left = side(results, scale, claim.left[0])
        if claim.level:
            return against_one(left, MARGIN, claims.earlier_looks(claim, scale, [left]))
        right = side(results, scale, claim.right[0])
        return compare(left, right, earlier=claims.earlier_looks(claim, scale, [left, right]))
    return [claims.Row(claim, claims.says(verdict, claim.level), "", verdict.finding, verdict.p, verdict.p_within,
                       MARGIN if claim.level else None)
            for claim, verdict in zip(ledger, decide(map(found, ledger)), strict=True)]


def shown_ratio(finding: Finding) -> str:
    if finding.difference is None or not math.isfinite(finding.difference):
        return ""
    low, high = (math.exp(x) for x in finding.interval or (math.nan, math.nan))
    return f"{math.exp(finding.difference):.3f}" + (f" ({low:.3f} to {high:.3f})" if finding.interval else "")


def verdict_table(what: str, shown: Callable[[Finding], str], ledger: list[claims.Row]) -> str:
    """Return the claims of a ledger on ratios with their verdicts, as Markdown. `what` heads the column of `shown`."""
    from open_clip_mdc.data.markdown import markdown_table
    return markdown_table(
        ["id", "claim", what, "p (Holm)", "p within a tenth", "errors of", "verdict"],
        [[row.claim.id, row.claim.text.removesuffix(LOG), shown(row.finding), claims.number(row.p),
          claims.number(row.p_within), "" if row.verdict == "not run" else row.finding.basis,
          f"*{row.shown}*" + (f": {row.why}" if row.why else "")] for row in ledger])


def page(results: dict, scale: Scale, cells: list[Cell], numbers: list[dict[int, float]],
         ledgers: list[list[claims.Row]], path: Path) -> str:
    """Return the tables as Markdown, and write PATH.png."""
    from open_clip_mdc.data.files import new_file
    from open_clip_mdc.data.markdown import markdown_table
    means = {(row_of(cell), cell.column): fmean(by_seed.values())
             for cell, by_seed in zip(cells, numbers, strict=True) if by_seed}
    of_rows = list(dict.fromkeys(map(row_of, cells)))
    sides = {measure: {row_of(cell): side(results, scale, cell) for cell in cells
                       if cell.column == f"{measure}, {tables.PLACES[0]}"} for measure in TESTED}
    ratios = {measure: {row: against_one(found) for row, found in of.items()} for measure, of in sides.items()}
    lines = []
    for row in of_rows:
        if (row, "gap, first") not in means:
            continue
        seeds = len(sides["gap"][row].numbers)
        pairs = {measure: [means[row, f"{measure}, {place}"] for place in tables.PLACES] for measure in tables.MEASURES}
        lines.append([f"{tables.REDUNDANCIES[row.data]:g}", row.objective,
                      *(" / ".join(f"{x:.3f}" for x in pairs[measure]) for measure in ("loss", "gap", "gain")),
                      *(shown_ratio(ratios[measure][row]) for measure in TESTED), str(seeds)])
    with new_file(path.with_suffix(".png")) as partial:
        plot(means, ratios).savefig(partial, format="png", dpi=100)
    verdicts = [verdict_table("ratio, or ratio of ratios (95 %)", shown_ratio, ledger) for ledger in ledgers]
    absent = [f"r = {tables.REDUNDANCIES[row.data]:g}, {row.objective}" for row in of_rows
              if (row, "gap, first") not in means]
    return "\n".join([
        markdown_table(["redundancy", "", *(f"{measure}, first / second" for measure in ("loss", "gap", "gain")),
                        *(f"{measure}, ratio (95 %)" for measure in TESTED), "seeds"], lines),
        *(["", f"Not run: {'; '.join(absent)}."] if absent else []), "", verdicts[0], "", verdicts[1], ""])


def plot(means: dict[tuple[Row, str], float], ratios: dict[str, dict[Row, Finding]]):
    from matplotlib.figure import Figure
    figure = Figure(figsize=(12, 3.4), layout="constrained", facecolor="white")
    bars, *others = figure.subplots(1, 1 + len(TESTED), width_ratios=(1.5, *[1] * len(TESTED)))
    shown = [objective for objective in tables.OBJECTIVES if (Row("r90", objective), "gap, first") in means]
    for number, place in enumerate(tables.PLACES):
        bars.bar([x + 0.4 * number - 0.2 for x in range(len(shown))],
                 [means[Row("r90", objective), f"gap, {place}"] for objective in shown], 0.38,
                 color=("C0", "C1")[number], label=f"said {place}")
    bars.set(title="redundancy 0.9: gap to the mean image", ylabel="nats")
    bars.set_xticks(range(len(shown)), [objective.replace(" ", "\n", 1) for objective in shown], fontsize=8)
    bars.margins(y=0.25)
    bars.legend(frameon=False, fontsize=8, loc="upper right", ncols=2)
    for axes, (measure, title) in zip(others, TESTED.items(), strict=True):
        axes.axhline(1, color="grey", linewidth=0.8, linestyle=":")
        for number, objective in enumerate(tables.MAIN):
            points = sorted((tables.REDUNDANCIES[row.data], finding) for row, finding in ratios[measure].items()
                            if row.objective == objective and finding.difference is not None
                            and math.isfinite(finding.difference))
            if points:
                x, y = zip(*((share, math.exp(finding.difference)) for share, finding in points), strict=True)
                reach = [[abs(math.exp((finding.interval or (math.log(ratio),) * 2)[end]) - ratio)
                          for (_, finding), ratio in zip(points, y, strict=True)] for end in (0, 1)]
                axes.errorbar(x, y, reach, marker="o", markersize=4, capsize=2, color=f"C{number + 2}",
                              label=objective)
        axes.set(title=title, xlabel="redundancy", ylabel="said second / said first", xlim=(-0.05, 1.05),
                 ylim=(0, 1.35))
        axes.legend(frameon=False, fontsize=8, loc="lower left")
    return figure



"""Ledgers: lists of claims (tables/claims.csv), each with the verdict of our results.

A claim compares two sides: "left is above right", or "left is level with right". A side is the mean over some cells of
a table, each of them a mean over seeds. verdicts.py judges the difference. Some claims get no verdict, however large
their difference is:

- *needs the paper's scale*: a small scale lacks something that the claim is about. The difference is shown, not judged.
- *at the floor*: a probe is not two standard errors above the same probe of pixels, or of the untrained network.
- *no image*: the image adds no more than 10 points to the accuracy on pairs of captions. Where it adds more, claims on
  captioners are judged by debiased accuracy.
- *saturated*: both sides have 99 % or more. *cannot fail* or *cannot show*: the data decide it (`Scale.void`).
"""
import csv
import io
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ..tables.cells import Cells, floors
from ..tables.paper_tables import averages, tables_of
from ..tables.scales import Scale
from .sides import Measured, is_captioner, names_of_trainings
from .verdicts import Finding, Pool, Side, Verdict, compare, decide

CLAIM_SEPARATOR = ", here "  # between a claim of the paper and the rows that are compared
PAPER = "needs the paper's scale"
MIN_IMAGE_GAIN = 10.0  # points that the image has to add to the accuracy on pairs
SATURATED = 99.0
IN_PERCENT = ("image_caption_selection", "linear_probe")
KINDS = ("shows", "contradicts", "within", "not resolved", "no verdict", "not run")


class Claim(NamedTuple):
    ledger: str
    id: str
    where: str
    text: str
    left: Cells  # empty if the scale has no such row
    right: Cells
    level: bool = False  # True: left is level with right. False: left is above right
    paper: str = ""  # the paper's numbers
    needs: str = ""  # what a small scale lacks

    @property
    def sentence(self) -> str:
        # Name the rows that are compared, if they have other lengths than the paper's sentence says.
        rows = [cells[0].row.rpartition(", ")[2] for cells in (self.left, self.right) if cells]
        others = set(re.findall(r"MDC-\d+", self.text)) - set(rows)
        return self.text + (CLAIM_SEPARATOR + " / ".join(rows) if others and len(rows) == 2 else "")


class Row(NamedTuple):
    """A claim with its verdict."""

    claim: Claim
    verdict: str  # one of KINDS, or PAPER
    why: str = ""
    finding: Finding = Finding()
    p: float | None = None  # corrected
    p_within: float | None = None
    margin: float | None = None

    @property
    def shown(self) -> str:
        return {"within": f"within {self.margin:g}"}.get(self.verdict, self.verdict) if self.margin else self.verdict


# ---- the claims


def rows_of_file(name: str) -> list[list[str]]:
    """Return the lines of a CSV file in tables/, without its header."""
    with Path(__file__).parents[1].joinpath("tables", name).open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))[1:]


def names_of(scale: Scale) -> dict[str, str]:
    """Return the values for {name} in claims.csv: the scale's data, network and lengths."""
    captioning = scale.captioning[0]
    fixed = [length for length in captioning.lengths if length != "auto"] or ["auto"]
    labels = {name: scale.data[name].label for name in (scale.alt, scale.long, scale.search) if name in scale.data}
    found = {"alt": labels.get(scale.alt), "long": labels.get(scale.long), "search": labels.get(scale.search),
             "net": scale.backbone, "test": captioning.label, "ours": captioning.lengths[0], "longest": fixed[-1],
             "free": "auto" if "auto" in captioning.lengths else captioning.lengths[0],
             "probe": "Average" if len(scale.probes) > 1 else next(iter(scale.probes), ""),
             "debiased": "" if scale.name == "paper" else ", debiased"}
    found |= {of: scale.data[name].label for of, name in zip(("ratio", "ratio2"), scale.ratios, strict=False)}
    return found | {f"amount{i}": f"{scale.data[name].samples:,} pairs" for i, name in enumerate(scale.amounts)}


def claims_of(name: str, scale: Scale) -> list[Claim]:
    """Return the claims of a ledger. The paper's is named "claims".

    Ledgers are corrected separately, as each further claim in a ledger makes all of its verdicts harder to reach.
    """
    cells = {table: {(c.row, c.column): c for c in of_table} for table, of_table in tables_of(scale).items()}
    names, found = names_of(scale), []
    labels = {group: [s.label + next(iter(averages(s))) for s in scale.selection
                      if s.subsets[0].startswith("aro/") == (group == "{aro}")] for group in ("{aro}", "{pairs}")}
    for ledger, short, table, kind, text, left, right, column, other, paper, needs in rows_of_file("claims.csv"):
        if ledger != name:
            continue
        if any(name not in names for name in re.findall(r"{((?:ratio|amount)\d?)}", left + right + column)):
            continue  # the scale has fewer data sets for ratios or amounts than the claim names
        sides = [[(row.format(**names), label) for row in rows.split(" + ")
                  for label in (labels[of_side] if of_side in labels else [of_side.format(**names)])]
                 for rows, of_side in ((left, column), (right, other or column))]
        named = {"stability": "Section 4.3", "own": "own rates", "longer": "length of training"} | dict.fromkeys(
            ("contexts", "sentences"), column.partition(",")[0])
        title = named.get(table, re.sub(r"(\D+)(\d+)", lambda m: f"{m[1].title()} {m[2]}", table))
        here = [tuple(cells[table][place] for place in side if place in cells.get(table, ())) for side in sides]
        here = [of_side if len(of_side) == len(side) else () for of_side, side in zip(here, sides, strict=True)]
        if not all(here) and not needs:
            continue  # the scale has no such rows
        found.append(Claim(ledger, short, title, text, *here, kind == "level", paper,
                           "" if scale.name == "paper" else needs))
    return found


def margin_of(claim: Claim, scale: Scale) -> float | None:
    """Return the difference up to which sides count as level, from scales.py. A loss has none."""
    evaluation = (claim.left or claim.right)[0].evaluation
    return None if evaluation.task == "log" else scale.cider_margin if evaluation.metric == "CIDEr" else scale.margin


# ---- claims without a verdict


def at_the_floor(measured: Measured, side: Cells) -> str:
    """Return why a side stands on no ground: any of its probes, as another row must not hide one at the floor."""
    for cell in side if side[0].evaluation.task == "linear_probe" else ():
        mine = measured.side((cell,))
        for row, (run, flags) in floors(measured.scale).items():
            floor = measured.side((cell._replace(run=run, evaluation=cell.evaluation._replace(flags=flags)),))
            finding = compare(mine, floor)  # an unknown error counts as 0
            if mine and floor and finding.difference <= 2 * (finding.error or 0.0):
                return f"{cell.row} ({mine.mean():.1f}) is not two standard errors above {row} ({floor.mean():.1f})"
    return ""


def without_image(measured: Measured, side: Cells) -> str:
    if side[0].evaluation.task != "image_caption_selection" or not is_captioner(side[0].run):
        return ""
    plain, blind = (measured.numbers(tuple(cell._replace(evaluation=cell.evaluation._replace(
        metric=cell.evaluation.metric.replace("_debiased", "") + kind)) for cell in side)) for kind in ("", "_blind"))
    if not plain or not blind:
        return ""
    gain = statistics.fmean(plain.values()) - statistics.fmean(blind.values())
    row = side[0].row.partition(",")[0]
    return f"the image adds {gain:+.1f} points to the accuracy of {row}" if gain <= MIN_IMAGE_GAIN else ""


# ---- verdicts


def give_verdicts(claims: Iterable[Claim], measured: Measured) -> list[Row]:
    """Return a verdict on each claim of a ledger."""
    return together([judged_alone(claim, measured) for claim in claims])


def together(rows: list[Row]) -> list[Row]:
    """Return the rows of a ledger with the verdicts that they lack. Their p-values are corrected together."""
    verdicts = iter(decide(row.finding for row in rows if not row.verdict))
    return [row if row.verdict else row._replace(verdict=says(verdict := next(verdicts), row.claim.level), p=verdict.p,
                                                 p_within=verdict.p_within) for row in rows]


def says(verdict: Verdict, level: bool) -> str:
    """Return the verdict on a claim. "Level" is shown within the margin, and contradicted outside of it."""
    shown = {"within": "shows", "above": "contradicts"} if level else {"above": "shows"}
    return {"below": "contradicts", **shown}.get(verdict.outcome, verdict.outcome)


LOOKS = {claim: tuple(map(int, seeds.split())) for claim, seeds, _ in rows_of_file("looks.csv")}


def earlier_looks(claim: Claim, scale: Scale, sides: Iterable[Side | None]) -> tuple[int, ...]:
    """Return with how many seeds a claim was judged before (looks.csv), or the scale's if seeds were added to them."""
    added = set.intersection(*(set(side.numbers) if side else set() for side in sides)) - set(scale.seeds)
    return LOOKS.get(f"{scale.name}.{claim.id}", (len(scale.seeds),) if added and len(scale.seeds) > 1 else ())


def judged_alone(claim: Claim, measured: Measured) -> Row:
    scale = measured.scale
    sides = measured.side(claim.left, claim.right), measured.side(claim.right, claim.left)
    if claim.needs:
        return Row(claim, PAPER, claim.needs, compare(*sides))
    if None in sides:
        return Row(claim, "not run")
    margin = margin_of(claim, scale)
    finding = compare(*sides, margin, claim.level, earlier_looks(claim, scale, sides))
    if claim.left[0].evaluation.task in IN_PERCENT and min(s.mean() for s in sides) >= SATURATED:
        return Row(claim, "no verdict", "saturated", finding)
    if claim.id in scale.void:
        return Row(claim, "no verdict", scale.void[claim.id], finding)
    for side in (claim.left, claim.right):
        if why := at_the_floor(measured, side) or without_image(measured, side):
            return Row(claim, "no verdict", why, finding)
    return Row(claim, "", "", finding, margin=margin)


def pools_of(rows: Iterable[Row], measured: Measured) -> dict[Pool, str]:
    """Return each pooled standard deviation that a ledger could use, with the name of its rows."""
    found = {}
    for row in rows:
        for side, other in ((row.claim.left, row.claim.right), (row.claim.right, row.claim.left)):
            if side and (one := measured.family(side, other)):
                kind, evaluation = "captioners" if is_captioner(side[0].run) else "CLIP", side[0].evaluation
                found.setdefault(one, f"{evaluation.task.replace('_', ' ')}, {evaluation.metric}, {kind}")
    return found


# ---- the page


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value >= 0.001 else "< 0.001"


def interval(finding: Finding) -> str:
    return "{:+.1f} to {:+.1f}".format(*finding.interval) if finding.interval else ""


def ledger(rows: list[Row], measured: Measured) -> str:
    """Return a ledger as Markdown: judged claims, standard deviations, and the claims that need the paper's scale."""
    from open_clip_mdc.data.markdown import markdown_table
    judged = [row for row in rows if row.verdict != PAPER]
    page = markdown_table(
        ["id", "paper", "claim", "its numbers", "here", "95 %", "p (Holm)", "p within", "errors of", "verdict"],
        [[row.claim.id, row.claim.where, row.claim.sentence, row.claim.paper,
          "" if row.finding.difference is None else f"{row.finding.difference:+.1f}", interval(row.finding),
          number(row.p), f"{number(row.p_within)} ({row.margin:g})" if row.p_within is not None else "",
          row.finding.basis if row.verdict != "not run" else "",
          f"*{row.shown}*" + (f": {row.why}" if row.why else "")] for row in judged])
    found = Counter(row.verdict for row in judged)
    page += f"\n\n{len(judged)} claims: {', '.join(f'{found[kind]} {kind}' for kind in KINDS)}.\n"
    pools = [[what, f"{math.sqrt(one.variance):.2f}", one.rows, one.freedom]
             for one, what in pools_of(judged, measured).items()]
    if pools:
        page += "\n" + markdown_table(["standard deviation over seeds of", "points", "rows", "degrees of freedom"],
                                      pools) + "\n"
    if far := [row for row in rows if row.verdict == PAPER]:
        page += "\n" + markdown_table(
            [PAPER, "its numbers", "what is lacking", "here, not judged"],
            [[row.claim.text, row.claim.paper, row.why, "" if row.finding.difference is None else
              f"{row.finding.difference:+.1f}" + (f" ({interval(row.finding)})" if row.finding.interval else "")]
             for row in far]) + "\n"
    return page


COLUMNS = ("id", "ledger", "paper", "claim", "its numbers", "difference", "low", "high", "standard error", "margin",
           "p", "p within", "errors of", "seeds", "seed error", "seed freedom", "image error", "trainings", "verdict",
           "why", "command")


def errors(finding: Finding) -> tuple[str, ...]:
    """Return seeds, their part of the standard error, its degrees of freedom, and the images' part, as text."""
    # Below a millionth of a point there is rounding alone, which another machine does in another way.
    seeds, images = ("" if part is None else f"{math.sqrt(part[0]) if part[0] > 1e-12 else 0:.4g}"
                     for part in (finding.of_seeds, finding.of_images))
    return str(finding.seeds or ""), seeds, f"{finding.of_seeds[1]:g}" if finding.of_seeds else "", images


def table(rows: Iterable[Row], scale: Scale) -> str:
    """Return all rows of a ledger as CSV."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in rows:
        finding, claim = row.finding, row.claim
        numbers = (finding.difference, *(finding.interval or (None, None)), finding.error, row.margin)
        writer.writerow([f"{scale.name}.{claim.id}", claim.ledger, claim.where, claim.sentence, claim.paper,
                         *("" if value is None else f"{value:.6g}" for value in numbers),
                         *("" if value is None else f"{value:.3g}" for value in (row.p, row.p_within)),
                         finding.basis, *errors(finding),
                         " ".join(names_of_trainings((*claim.left, *claim.right))) if finding.seeds else "", row.shown,
                         row.why,
                         f"make reproduce CLAIM={scale.name}.{claim.id}" if finding.difference is not None else ""])
    return out.getvalue()

"""Compare two contexts of one network (experiments/contexts.py): ratios of second to first mention, and verdicts.

For each image let x be the sum over its mentions of weight times measure, and w the sum of the weights. X and W are
sums over images, 1 and 2 the places. The ratio of a measure is (X2 / W2) / (X1 / W1). The gain of the second mention
may be as small as 0, where a logarithm does not exist. So ratios themselves are compared here. An image adds
(x2 - r2 w2) / W2 / r1 - ratio (x1 - r1 w1) / (r1 W1), where r = X / W at each place.
"""
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import fmean

from ..tables import contexts as tables
from ..tables.cells import Cell, Numbers
from . import claims
from .claims import Claim
from .results import parts
from .sides import Measured
from .verdicts import Finding, Side, compare

MARGIN = 0.1  # ratios within a tenth of 1, or of each other, count as level
LEDGERS = ("contexts", "sentences")
Values = dict[str, list[float]]  # of images, by name
Weighed = tuple[float, list[float]]  # a statistic, and the influence of each image
CHECK = "left gain"  # of the second mention: above 0 where a network predicts better than the other words alone


def share(values: Values, measure: str) -> Weighed:
    """Return the ratio of second to first of a measure, and the influence of each image."""
    (first, of_first), (second, of_second) = (mean_at(place, values, measure) for place in tables.PLACES)
    ratio = second / first
    return ratio, [(b - ratio * a) / first for a, b in zip(of_first, of_second, strict=True)]


def mean_at(place: str, values: Values, measure: str) -> Weighed:
    """Return the weighted mean of a measure at a place, and the influence of each image."""
    context, _, name = measure.rpartition(" ")
    prefix = context and f"{context}_"
    x, w = values[f"{prefix}{name}_{place}"], values[f"{prefix}weight_{place}"]
    mean, total = sum(x) / sum(w), sum(w)
    return mean, [(a - mean * u) / total for a, u in zip(x, w, strict=True)]


def fall(values: Values, measure: str) -> Weighed:
    """Return by how much a measure is lower at the second place, and the influence of each image."""
    (first, of_first), (second, of_second) = (mean_at(place, values, measure) for place in tables.PLACES)
    return first - second, [a - b for a, b in zip(of_first, of_second, strict=True)]


def side(measured: Measured, cell: Cell, measure: str, statistic) -> Side | None:
    """Return a statistic of a measure of a row's runs, with the influence of images. None if none ran."""
    numbers, adds = {}, {}
    for seed, result in sorted(parts(measured.results, measured.scale, cell)[0].items()):
        items = json.loads((result.path.parent / "items" / result.path.name).read_text(encoding="utf-8"))
        numbers[seed], influence = statistic(items["values"], measure)
        adds[seed] = dict(zip(items["images"], influence, strict=True))
    return Side(numbers, None, adds, frozenset([cell.run])) if numbers else None


def against(found: Side | None, value: float = 0.0, margin: float | None = None, level: bool = False) -> Finding:
    """Compare a side with a number, as `compare` does with another side."""
    constant = found and Side(dict.fromkeys(found.numbers, value), 0.0, {seed: {} for seed in found.numbers},
                              found.trainings)
    return compare(found, constant, margin, level)


def uses_words(measured: Measured, cell: Cell) -> Finding:
    """Return by how much a row with the words to the left beats the best guess from these words, at a second mention.

    The words alone are worth nothing at the first mention. A network that ignores words is below 0 here. Of people's
    sentences nobody knows the best guess. There it is by how much the blind twin loses less on a sentence said second.
    """
    if cell.evaluation.task == "sentences":
        left = "" if tables.always_left(cell.row) else "left "
        return against(side(measured, cell, f"{left}blind", fall))
    return against(side(measured, cell, CHECK, partial(mean_at, "second")))


def uses_image(measured: Measured, cell: Cell) -> Finding:
    """Return the gain of a row at the first place. Without one, the ratio of both places says nothing."""
    return against(side(measured, cell, "gain", partial(mean_at, "first")))


CHECKS = {"does not use the other words": uses_words, "gains nothing by the image": uses_image}


def passes(check: Finding) -> bool:
    return check.interval is not None and check.interval[0] > 0


def give_verdicts(ledger: list[Claim], measured: Measured) -> list[claims.Row]:
    """Return the claims of a ledger with their verdicts, corrected together.

    A level claim is that a ratio is 1, or that two are equal. A claim has no verdict if one of its rows fails one of
    CHECKS.
    """
    rows, faults = [], {}
    for cell in (cells[0] for claim in ledger for cells in (claim.left, claim.right)):
        if cell.row not in faults:
            faults[cell.row] = [why for why, check in CHECKS.items() if not passes(check(measured, cell))]
    for claim in ledger:
        sides = [(cells[0], cells[0].column.partition(",")[0]) for cells in (claim.left, claim.right)]
        left, right = (side(measured, *one, share) for one in sides)
        margin = MARGIN if claim.level else None
        one = claim.level and len({(cell.row, measure) for cell, measure in sides}) == 1
        finding = against(left, 1.0, margin, level=True) if one else compare(left, right, margin, claim.level)
        why = next((f"{cell.row} {fault}" for cell, _ in sides for fault in faults[cell.row]
                    if finding.difference is not None), "")
        rows.append(claims.Row(claim, "no verdict" if why else "", why, finding, margin=margin))
    return claims.together(rows)


def shown(finding: Finding) -> str:
    if finding.difference is None:
        return ""
    low_high = " ({:.3f} to {:.3f})".format(*finding.interval) if finding.interval else ""
    return f"{finding.difference:.3f}{low_high}"


def verdict_table(ledger: list[claims.Row]) -> str:
    """Return the claims of a ledger on ratios with their verdicts, as Markdown."""
    from open_clip_mdc.data.markdown import markdown_table
    return markdown_table(
        ["id", "claim", "ratio minus 1, or difference of ratios (95 %)", "p (Holm)", "p within a tenth", "errors of",
         "verdict"],
        [[row.claim.id, row.claim.text, shown(row.finding), claims.number(row.p), claims.number(row.p_within),
          "" if row.verdict == "not run" else row.finding.basis,
          f"*{row.shown}*" + (f": {row.why}" if row.why else "")] for row in ledger])


def read_rows(measured: Measured, numbers: Numbers,
              *measures: str) -> Iterator[tuple[Cell, str, dict[str, Finding], list]]:
    """Yield each row in each of its contexts: a cell, the context, its ratios, and its text in a table."""
    means = {(cell.row, cell.column): fmean(by_seed.values()) for cell, by_seed in numbers.items() if by_seed}
    for cell, by_seed in numbers.items():
        if cell.column != "gain, first" or not by_seed:
            continue
        check, alone = uses_words(measured, cell), tables.always_left(cell.row)
        for context, label in list(tables.CONTEXTS.items())[:1 if alone else None]:
            ratios = {measure: against(side(measured, cell, f"{context}{measure}", share))
                      for measure in measures}
            yield cell, label, ratios, [label, *(
                " / ".join(f"{means[cell.row, f'{context}{measure}, {place}']:.3f}" for place in tables.PLACES)
                for measure in ("loss", "gain")), *map(shown, ratios.values()),
                f"{'yes' if passes(check) else 'no'}: {shown(check)}" if context or alone else "", check.seeds]


def page(measured: Measured, numbers: Numbers, ledger: list[claims.Row], path: Path) -> str:
    """Return the table of ratios in both contexts, and the verdicts, as Markdown, and write PATH.png."""
    from open_clip_mdc.data.files import new_file
    from open_clip_mdc.data.markdown import markdown_table
    lines, drawn = [], {}
    for cell, label, ratios, line in read_rows(measured, numbers, "gain", "gradient", "gap"):
        objective = cell.row.partition(", ")[2]
        if cell.block == "r90":
            drawn.setdefault(label, {})[objective] = ratios
        lines.append([f"{tables.REDUNDANCIES[cell.block]:g}", objective, *line])
    with new_file(path.with_suffix(".png")) as partial:
        plot(drawn).savefig(partial, format="png", dpi=100)
    return "\n".join([
        markdown_table(["redundancy", "", "context", "loss, first / second", "gain, first / second",
                        "gain, ratio (95 %)", "gradient, ratio (95 %)", "gap, ratio (95 %)",
                        "uses the other words", "seeds"], lines), "", verdict_table(ledger), ""])


def page_of_sentences(measured: Measured, numbers: Numbers, ledger: list[claims.Row]) -> str:
    """Return the ratios of both sentences' gains, and the verdicts, as Markdown."""
    from open_clip_mdc.data.markdown import markdown_table
    lines = [[cell.row, *line] for cell, _, _, line in read_rows(measured, numbers, "gain")]
    return "\n".join([markdown_table(["", "context", "loss a word, first / second", "gain a word, first / second",
                                      "gain, ratio (95 %)", "uses the other words", "seeds"], lines),
                      "", verdict_table(ledger), ""])


def plot(drawn: dict[str, dict[str, dict[str, Finding]]]):
    """Draw the ratios of gain and of gap: by context, a bar for each objective."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(10, 3.6), layout="constrained", facecolor="white")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, measure, title in ((panels[0], "gain", "what the image tells beyond the words (exact)"),
                                 (panels[1], "gap", "loss against a mean image: fails the control")):
        for shift, (label, rows) in zip((-0.2, 0.2), drawn.items(), strict=True):
            found = [findings[measure] for findings in rows.values()]
            heights = [one.difference for one in found]
            axes.bar([x + shift for x in range(len(found))], heights, 0.38, label=label,
                     yerr=[max(one.interval[1] - one.difference, 0) if one.interval else 0 for one in found],
                     capsize=2)
            axes.set_xticks(range(len(found)), [name.replace(" ", "\n", 1) for name in rows], fontsize=7)
        axes.axhline(1, color="grey", linewidth=0.8, linestyle=":")
        axes.set_title(title, fontsize=10)
    panels[0].set_ylabel("second word / first word")
    panels[0].legend(frameon=False, fontsize=8, loc="upper right")
    return figure

"""The ledger: every claim of the paper that can be tested by numbers, and what our results say of it.

A row compares two sides, "left is above right" or "left is level with right, within a margin". A side is the mean over
some cells of a table (tables/), each the mean over seeds. verdicts.py decides what a difference comes to.
"""
import csv
import json
import re
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ..tables import paper
from ..tables.cells import Cell, Evaluation
from ..tables.paper_tables import BACKBONES, TABLES, averages
from ..tables.scales import Scale
from .results import parts as parts_of
from .results import shares as shares_of
from .results import values as values_of
from .verdicts import Side, compare, decide

MARGIN = 1.0  # points within which "comparable" and "close" are called level
CLAIM_SEPARATOR = "; here "  # between a claim of the paper and the rows that are compared


class Claim(NamedTuple):
    where: str
    text: str
    left: tuple[Cell, ...]  # empty: the scale has no such row
    right: tuple[Cell, ...]
    paper: tuple[float, float] | None = None
    margin: float | None = None  # None: left is above right

    @property
    def sentence(self) -> str:
        # With the rows that are compared, where they are of other lengths than the paper's sentence names.
        rows = [cells[0].row.rpartition(", ")[2] for cells in (self.left, self.right) if cells]
        others = set(re.findall(r"MDC-\d+", self.text)) - set(rows)
        return self.text + (CLAIM_SEPARATOR + " / ".join(rows) if others and len(rows) == 2 else "")


# ---- the paper's claims


def claims_of(sentences: Iterable[tuple], scale: Scale) -> list[Claim]:
    """Return claims from sentences: (table, text, label of the left row, of the right row, columns, numbers, margin).

    Columns may be a pair, of both sides. Ledgers are apart: a correction over all would weaken the paper's.
    """
    cells = {name: {(c.row, c.column): c for c in table(scale)} for name, table in TABLES.items()}
    rows = []
    for table, text, left, right, columns, *known in sentences:
        sides = columns if isinstance(columns, tuple) else (columns, columns)
        found = [tuple(cells[table][row, column] for column in side if (row, column) in cells[table])
                 for row, side in zip((left, right), sides, strict=True)]
        title = {"stability": "Section 4.3"}.get(table, table.replace("table", "Table ").replace("figure", "Figure "))
        rows.append(Claim(title, text, *found, *known))
    return rows


def read_sentences() -> dict[str, list[tuple]]:
    """Return by ledger the sentences beside the paper's, for `claims_of`."""
    ledgers: dict[str, list[tuple]] = {}
    with Path(__file__).parents[1].joinpath("tables", "sentences.csv").open(newline="", encoding="utf-8") as file:
        for ledger, table, text, left, right, column, other in list(csv.reader(file))[1:]:
            ledgers.setdefault(ledger, []).append((table, text, left, right, ([column], [other or column])))
    return ledgers


SENTENCES = read_sentences()


def claims(scale: Scale) -> list[Claim]:
    return claims_of(sentences(scale), scale)


def sentences(scale: Scale) -> Iterator[tuple]:
    """Yield the paper's claims for `claims_of`.

    A small scale stands in with its own data and its one network: short captions for CC12M and CC3M, long ones for
    Recap-DataComp-10M, its probe for ImageNet and for the average, its own pairs for SugarCrepe, its captions for COCO.
    """
    def averages_of(captions: str, network: str, *methods: str) -> tuple[float, ...]:
        return tuple(paper.average(captions, network, method) for method in methods)

    # Table 1
    probes = [*scale.probes, *(["Average"] if len(scale.probes) > 1 else [])]
    networks = [*scale.backbones, *BACKBONES[len(scale.backbones):]]
    alt, long = (scale.data[name].label for name in (scale.alt, scale.long))
    for network, ours in zip(BACKBONES, networks, strict=True):
        yield ("table1", f"{network}, CC12M: MDC level with ARC", f"{alt}, {ours}, MDC", f"{alt}, {ours}, ARC",
               probes[-1:], averages_of("CC12M", network, "MDC", "ARC"), MARGIN)
        yield ("table1", f"{network}, Recap: MDC above CLIP-LB", f"{long}, {ours}, MDC", f"{long}, {ours}, CLIP-LB",
               probes[-1:], averages_of("Recap-10M", network, "MDC", "CLIP-LB"))
    first = networks[0]
    yield ("table1", "ViT-B-32, CC12M: CLIP above MDC", f"{alt}, {first}, CLIP", f"{alt}, {first}, MDC", probes[-1:],
           averages_of("CC12M", "ViT-B-32", "CLIP", "MDC"))
    yield ("table1", "ViT-B-32, CC12M, ImageNet: MDC above ARC", f"{alt}, {first}, MDC", f"{alt}, {first}, ARC",
           probes[:1] if "ImageNet" in probes else probes[-1:], (54.8, 54.2))
    yield ("table1", "ViT-B-32: MDC on Recap above MDC on CC12M", f"{long}, {first}, MDC", f"{alt}, {first}, MDC",
           probes[-1:], (paper.average("Recap-10M", "ViT-B-32", "MDC"), paper.average("CC12M", "ViT-B-32", "MDC")))

    # Table 2: the mean over a benchmark's columns, each by the data set's own average
    aro, pairs = [], []
    for selection in scale.selection:
        of_aro = selection.subsets[0].startswith("aro/")
        (aro if of_aro else pairs).append(selection.label + next(iter(averages(selection))))
    for other in ("ARC", "CLIP", "MDC (Monte Carlo)"):
        for name, columns, numbers in (("ARO", aro, slice(0, 4)), ("SugarCrepe", pairs, slice(4, 7))):
            means = tuple(round(statistics.fmean(paper.TABLE2[row][numbers]), 1) for row in ("MDC (heuristic)", other))
            yield ("table2", f"{name}: MDC (heuristic) above {other}", "MDC (heuristic)", other, columns, means)

    # Table 3
    test, short = scale.captioning[0].label, scale.captioning[0].lengths[0]
    longest = [length for length in scale.captioning[0].lengths if length != "auto"][-1]
    yield ("table3", "COCO, CIDEr: MDC-10 above ARC", f"{test}, MDC-{short}", f"{test}, ARC", ["CIDEr"], (64.7, 48.8))
    yield ("table3", "COCO, CIDEr: MDC-10 above MDC-20", f"{test}, MDC-{short}", f"{test}, MDC-{longest}", ["CIDEr"],
           (64.7, 24.1))
    yield ("table3", "Flickr30k, CIDEr: MDC-15 above ARC", "Flickr30k, MDC-15", "Flickr30k, ARC", ["CIDEr"],
           (28.6, 19.3))
    yield ("table3", "COCO, judge: ARC above MDC-10", f"{test}, ARC", f"{test}, MDC-{short}", ["LLM"], (33.9, 19.2))

    # Tables 4 and 5, Section 4.3, Figures 4 and 5
    for captions, ours in (("CC12M", alt), ("Recap-10M", long)):
        yield ("table4", f"{captions}: MDC above MDC without 1/t", "MDC", "MDC (w/o t)", [ours],
               (paper.TABLE4[captions, "MDC"], paper.TABLE4[captions, "MDC (w/o t)"]))
    *others, best = paper.TABLE5
    search = scale.data[scale.search].label
    for other in others:
        yield ("table5", f"t in {best} above {other}", best, other, [search], (paper.TABLE5[best], paper.TABLE5[other]))
    yield ("stability", f"loss less stable for t in {others[0]} than in {best}", others[0], best,
           [f"{search}, variation of the loss in %"])
    for captions, data in zip(("CC12M", "Recap-10M"), scale.ratios, strict=False):
        label = scale.data[data].label
        yield ("figure4", f"{captions}: MDC above BERT 15 %", "MDC", "BERT 15 %", [label])
        yield ("figure4", f"{captions}: MDC above parallel decoding", "MDC", "Parallel 100 %", [label])
        yield ("figure4", f"{captions}: BERT 75 % level with MDC", "BERT 75 %", "MDC", [label], None, MARGIN)
    amounts = [f"{scale.data[data].samples:,} pairs" for data in scale.amounts]
    for names, fewer, more in zip(("10 M above 5 M", "20 M above 10 M", "30 M above 20 M"), amounts, amounts[1:],
                                  strict=False):
        yield ("figure5", f"{names} pairs", more, fewer, ["MDC"])


# ---- what was measured


def trainings(cells: tuple[Cell, ...]) -> frozenset:
    # What a side's seeds are seeds of: the judge compares all systems of a test set in each of its answers.
    return frozenset((cell.evaluation.task, cell.evaluation.datasets) if cell.evaluation.task == "judge"
                     else cell.run._replace(at=None) for cell in cells)


def of_results(results: dict, scale: Scale, cells: tuple[Cell, ...], other: tuple[Cell, ...] = ()) -> Side | None:
    """Return a side; if `other` is of the same trainings, of the seeds that both have."""
    numbers = [values_of(results, scale, cell) for cell in cells]
    needed = numbers + [values_of(results, scale, cell) for cell in other if trainings(other) == trainings(cells)]
    seeds = sorted(set.intersection(*map(set, needed))) if cells else []
    if not seeds:
        return None
    means = {seed: statistics.fmean(by_seed[seed] for by_seed in numbers) for seed in seeds}
    binomials, influences = [], []
    for cell in cells:
        evaluation = cell.evaluation
        parts = [[by_seed[seed] for seed in seeds] for by_seed in parts_of(results, scale, cell)]
        shares = shares_of(evaluation, [part[0] for part in parts])
        sizes = evaluation.sizes or (0,) * len(parts)
        for dataset, part, share, size in zip(evaluation.datasets, parts, shares, sizes, strict=True):
            share *= evaluation.scale / len(cells)
            binomials.append(binomial(evaluation, part, share, size))
            influences.append(influence(evaluation, dataset, part, share))
    of_images: dict = {}
    for image, value in (pair for one in influences if None not in influences for pair in one.items()):
        of_images[image] = of_images.get(image, 0.0) + value
    return Side(means, None if None in binomials else sum(binomials), of_images or None, trainings(cells))


def binomial(evaluation: Evaluation, part: list, share: float, size: int) -> float | None:
    """Return the variance that a data set adds by its size alone; None if its metric is no plain share of cases."""
    if evaluation.task == "log":
        return 0.0
    size = part[0].metrics.get("cases_in_groups") or part[0].metrics.get("cases") or size
    if evaluation.task in ("captioning", "judge") or "macro" in evaluation.metric or not size:
        return None
    return share ** 2 * binomial_variance(statistics.fmean(one.metrics[evaluation.metric] for one in part), size)


def influence(evaluation: Evaluation, dataset: str, part: list, share: float) -> dict | None:
    """Return what each image adds to a side beyond its weight in the mean, over seeds; None if items are missing."""
    if evaluation.task == "log":
        return {}
    found: dict = {}
    family = evaluation.root if evaluation.task == "image_caption_selection" else dataset  # subsets share images
    for result in part:  # seeds may have other images: the judge's malformed answers are left out
        items = read_items(result.path, evaluation)
        if items is None:
            return None
        mean = sum(weight * value for _, weight, value in items)
        for image, weight, value in items:
            found[family, image] = found.get((family, image), 0.0) + share * weight * (value - mean) / len(part)
    return found


def binomial_variance(accuracy: float, size: int) -> float:
    adjusted = (accuracy * size + 1) / (size + 2)
    return adjusted * (1 - adjusted) / (size + 2)


def read_items(path: Path, evaluation: Evaluation) -> list[tuple[str, float, float]] | None:
    if evaluation.task == "judge":
        votes = path.with_suffix(".jsonl")
        if not votes.exists():
            return None
        rows = [row for row in map(json.loads, votes.read_text(encoding="utf-8").splitlines()) if row.get("chosen")]
        return [(row["id"], 1 / len(rows), (evaluation.metric in row["chosen"]) / len(row["chosen"])) for row in rows]
    items = path.parent / "items" / path.name
    content = json.loads(items.read_text(encoding="utf-8")) if items.exists() else {"values": {}}
    values = content["values"].get(evaluation.metric)
    if values is None:
        return None
    weights = content.get("weights", {}).get(evaluation.metric) or [1.0] * len(values)
    total = sum(weights)
    return list(zip(content["images"], (weight / total for weight in weights), values, strict=True))


# ---- the page


def ledger(rows: list[Claim], results: dict, scale: Scale) -> str:
    from open_clip_mdc.data.markdown import markdown_table
    verdicts = decide(compare(of_results(results, scale, claim.left, claim.right),
                             of_results(results, scale, claim.right, claim.left), claim.margin) for claim in rows)
    lines = []
    for claim, (finding, p, verdict) in zip(rows, verdicts, strict=True):
        numbers = "{:.1f} / {:.1f}".format(*claim.paper) if claim.paper else ""
        interval = "{:+.1f} to {:+.1f}".format(*finding.interval) if finding.interval else ""
        lines.append([claim.where, claim.sentence, numbers,
                      "" if finding.difference is None else f"{finding.difference:+.1f}", interval,
                      "" if p is None else f"{p:.3f}" if p >= 0.001 else "< 0.001",
                      "" if verdict == "not run" else finding.basis, f"*{verdict}*"])
    counts = ", ".join(f"{sum(v.verdict == kind for v in verdicts)} {kind}"
                       for kind in ("shows", "contradicts", "not resolved", "not run"))
    return markdown_table(["paper", "claim", "its numbers", "here", "95 %", "p (Holm)", "errors of", "verdict"],
                          lines) + f"\n\n{len(rows)} claims: {counts}.\n"


def resolved(page: str) -> str:
    """Return the paper's claims that a ledger in a page shows or contradicts, as Markdown, one column a scale."""
    from open_clip_mdc.data.markdown import markdown_table
    found: dict[tuple[str, ...], dict[str, str]] = {}
    scales = re.findall(r"<!-- (\w+) claims -->", page)
    for scale in scales:
        text = re.search(rf"<!-- {scale} claims -->\n(.*?)<!-- end -->", page, re.DOTALL)[1]
        for line in [line for line in text.splitlines() if line.startswith("| ")][2:]:
            where, text, numbers, here, interval, _, _, verdict = (cell.strip() for cell in line.strip("|").split("|"))
            claim, _, compared = text.partition(CLAIM_SEPARATOR)
            found.setdefault((where, claim, numbers), {})[scale] = (
                verdict + (f", {here}" if here else "") + (f" ({interval})" if interval else "")
                + (f", {compared}" if compared else ""))
    rows = [[*claim, *(verdicts.get(scale) for scale in scales)] for claim, verdicts in found.items()
            if any(verdict.startswith(("*shows*", "*contradicts*")) for verdict in verdicts.values())]
    return markdown_table(["paper", "claim", "its numbers", *scales], rows) + "\n"

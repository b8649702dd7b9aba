"""Collect the measurements of a side of a claim, and of the rows with which it shares a standard deviation."""
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from ..tables.cells import Cell, Cells, Evaluation, Run
from ..tables.paper_tables import tables_of
from ..tables.scales import Scale
from .results import Results, parts, shares, values
from .verdicts import Pool, Side, pool

# Metrics that are not means over images of values between 0 and 1. Their variance is unknown without the results of
# single images.
UNBOUNDED = ("Bleu", "CIDEr", "CLIPScore", "macro", "guidance_kl", "div_", "mBLEU", "distinct", "mean_")


class Measured:
    """The results of a scale, by side."""

    def __init__(self, results: Results, scale: Scale):
        self.results, self.scale = results, scale
        self.cells = [cell for cells in tables_of(scale).values() for cell in cells]  # candidates for a family
        self.families: dict[tuple, Pool | None] = {}

    def numbers(self, cells: Cells) -> dict[int, float]:
        """Return the means of a side by seed, for the seeds that all of its cells have."""
        found = [values(self.results, self.scale, cell) for cell in cells]
        return {seed: statistics.fmean(by_seed[seed] for by_seed in found)
                for seed in sorted(set.intersection(*map(set, found)))} if cells else {}

    def side(self, cells: Cells, other: Cells = ()) -> Side | None:
        """Return the measurements of a side. Its family are the rows that were evaluated as it or as `other`."""
        numbers = self.numbers(cells)
        if not numbers:
            return None
        bound, items = 0.0, {seed: defaultdict(float) for seed in numbers}
        for cell in cells:
            evaluation = cell.evaluation
            for_datasets = parts(self.results, self.scale, cell)
            weights = shares(evaluation, [by_seed[next(iter(numbers))] for by_seed in for_datasets])
            sizes = evaluation.sizes or (0,) * len(for_datasets)
            for dataset, by_seed, weight, size in zip(evaluation.datasets, for_datasets, weights, sizes, strict=True):
                weight *= evaluation.scale / len(cells)
                # Subsets of a selection set share images, so that an image counts once for all of them.
                family = evaluation.root if evaluation.task == "image_caption_selection" else dataset
                added = largest_variance(evaluation, [by_seed[seed].metrics for seed in numbers], weight, size)
                bound = None if added is None or bound is None else bound + added
                for seed in list(items):
                    found = read_items(by_seed[seed].path, evaluation)
                    if found is None:  # an older evaluation, which kept no single images
                        del items[seed]
                        continue
                    mean = sum(share * value for _, share, value in found)
                    for image, share, value in found:
                        items[seed][family, image] += weight * share * (value - mean)
        return Side(numbers, bound, items, trainings(cells), self.family(cells, other))

    def family(self, cells: Cells, other: Cells) -> Pool | None:
        if any(cell.evaluation.task == "judge" for cell in cells):
            return None
        wanted = [tuple(measure(cell.evaluation) for cell in side) for side in (cells, other) if side]
        kind, at = is_captioner(cells[0].run), cells[0].run.at
        key = frozenset(wanted), kind, at
        if key not in self.families:
            rows = {}
            for measures in wanted:
                for run, known in self.by_run.items():
                    if (is_captioner(run), run.at) == (kind, at) and run not in rows and known.keys() >= set(measures):
                        rows[run] = self.numbers(tuple(known[one] for one in measures))
            self.families[key] = pool(list(rows.values()))
        return self.families[key]

    @cached_property
    def by_run(self) -> dict[Run, dict[tuple, Cell]]:
        found = defaultdict(dict)
        for cell in self.cells:
            if not cell.run.untrained:
                found[cell.run].setdefault(measure(cell.evaluation), cell)
        return found


def measure(evaluation: Evaluation) -> tuple:
    return evaluation._replace(sizes=(), root="")


def is_captioner(run: Run) -> bool:
    return not run.model.startswith("ViT-")


def trainings(cells: Cells) -> frozenset:
    # Two sides with the same trainings vary together over seeds. The judge compares all systems of a test set in each
    # answer, so that its sides always do.
    return frozenset((cell.evaluation.task, cell.evaluation.datasets) if cell.evaluation.task == "judge"
                     else cell.run._replace(at=None) for cell in cells)


def names_of_trainings(cells: Iterable[Cell]) -> list[str]:
    """Return the names, without seed, of all trainings that the results of cells need."""
    needed = dict.fromkeys(
        run for cell in cells if cell.evaluation.task != "judge"
        for run in (cell.run.start, cell.run._replace(at=None), cell.evaluation.guide, cell.evaluation.clipscore)
        if isinstance(run, Run))
    return [run.name(0).rpartition("--s")[0] for run in needed]


def largest_variance(evaluation: Evaluation, metrics: list[dict], weight: float, size: int) -> float | None:
    """Return a bound on the variance from the images of a data set, by their number alone. None if there is none."""
    if evaluation.task == "log":
        return 0.0
    size = metrics[0].get("cases_in_groups") or metrics[0].get("cases") or metrics[0].get("images") or size
    if any(name in evaluation.metric for name in UNBOUNDED) or not size:
        return None
    mean = (statistics.fmean(one[evaluation.metric] for one in metrics) * size + 1) / (size + 2)
    return weight ** 2 * mean * (1 - mean) / (size + 2)


def read_items(path: Path, evaluation: Evaluation) -> list[tuple[str, float, float]] | None:
    """Return (image, share of the mean, value) of each image. A loss is measured on no image and has none."""
    if evaluation.task == "log":
        return []
    if evaluation.task == "judge":
        votes = path.with_suffix(".jsonl")
        if not votes.exists():
            return None
        rows = [row for row in map(json.loads, votes.read_text(encoding="utf-8").splitlines()) if row.get("chosen")]
        return [(row["id"], 1 / len(rows), (evaluation.metric in row["chosen"]) / len(row["chosen"])) for row in rows]
    items = path.parent / "items" / path.name
    content = json.loads(items.read_text(encoding="utf-8")) if items.exists() else {"values": {}}
    found = content["values"].get(evaluation.metric)
    if found is None:
        return None
    weights = content.get("weights", {}).get(evaluation.metric) or [1.0] * len(found)
    total = sum(weights)
    return list(zip(content["images"], (weight / total for weight in weights), found, strict=True))

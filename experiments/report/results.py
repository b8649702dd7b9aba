"""Read the results of a scale's runs from files, and find the number of a cell by seed."""
import json
import math
import re
import statistics
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from .. import commands
from ..tables.cells import Cell, Evaluation
from ..tables.scales import Scale

# Epoch, samples, percent of the epoch, and loss in a line of a training log. The loss of a length head is left out.
TRAIN_LOG_LINE = re.compile(r"Train Epoch: (\d+) \[\s*(\d+)/.*?\((\d+)%\).*?Caption_loss: (\S+) \(")


class Result(NamedTuple):
    metrics: dict
    path: Path


Results = dict[tuple[str, str, str], dict[int, Result]]  # (variant, data set, run without seed) -> by seed


def loss_variation(log: str) -> dict[str, float]:
    """Return how much the loss varies from one logged step to the next, as a share of its mean, in the second half.

    It is the root mean square of successive differences over sqrt(2): the standard deviation of the noise around any
    trend that is slow beside the steps. NaN with fewer than two lines. Steps that a resumed training repeated count
    once. Verdicts compare the logarithm, as a single spike makes the tail of the share itself heavy.
    """
    lines: list[tuple[tuple[int, int], float]] = []
    for epoch, samples, _, loss in TRAIN_LOG_LINE.findall(log):
        place = int(epoch), int(samples)
        while lines and lines[-1][0] >= place:
            lines.pop()
        lines.append((place, float(loss)))
    losses = [loss for _, loss in lines]
    losses = losses[len(losses) // 2:]
    if len(losses) < 2:
        return dict.fromkeys(("variation", "log_variation"), math.nan)
    squares = statistics.fmean((b - a) ** 2 for a, b in pairwise(losses))
    variation = math.sqrt(squares / 2) / statistics.fmean(losses)
    return {"variation": variation, "log_variation": math.log(variation) if variation > 0 else math.nan}


def read_results(out: Path) -> Results:
    """Read all results in an experiment's folder: clip_benchmark's, the judge's, and losses and bounds of trainings."""
    results: Results = {}

    def add(key: tuple[str, str, str], seed: str, metrics: dict, path: Path) -> None:
        seeds = results.setdefault(key, {})
        if int(seed) in seeds:
            raise ValueError(f"{seeds[int(seed)].path} and {path} are results of the same run: remove one")
        seeds[int(seed)] = Result(metrics, path)

    for path in sorted((out / "results").glob("*/*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            if path.parent.name == "judge":
                label, _, seed = path.stem.rpartition("--s")
                add(("judge", label, ""), seed, result["selection_rate"] | {"cases": result["judged"]}, path)
            elif name := re.search(r"([^/\\]+)--s(\d+)[/\\]checkpoints[/\\](epoch_\d+)\.pt$", result["pretrained"]):
                add((path.parent.name, result["dataset"], f"{name[1]}/{name[3]}"), name[2], result["metrics"], path)
        except (KeyError, TypeError, json.JSONDecodeError) as problem:
            raise ValueError(f"{path} is no result of clip_benchmark eval: {problem!r}") from problem
    for path in sorted((out / "runs").glob("*/out.log")):
        name, _, seed = path.parent.name.rpartition("--s")
        log = path.read_text(encoding="utf-8", errors="replace")
        *_, (epoch, _, percent, _) = TRAIN_LOG_LINE.findall(log) or [("0", "0", "0", "0")]
        if percent == "100":  # the epoch has ended
            bounds = path.parent / "checkpoints" / "results.jsonl"
            bound = json.loads(bounds.read_text(encoding="utf-8").splitlines()[-1]) if bounds.exists() else {}
            add(("log", "", f"{name}/epoch_{int(epoch) + 1}"), seed, bound | loss_variation(log), path)
    return results


def parts(results: Results, scale: Scale, cell: Cell) -> list[dict[int, Result]]:
    name = f"{cell.run.name(0).rpartition('--s')[0]}/epoch_{commands.checkpoint_epoch(scale, cell.run)}"
    folder, run = commands.variant(cell.evaluation), "" if cell.evaluation.task == "judge" else name
    return [results.get((folder, dataset, run), {}) for dataset in cell.evaluation.datasets]


def shares(evaluation: Evaluation, seed_results: list[Result]) -> list[float]:
    counts = [result.metrics[evaluation.weight] if evaluation.weight else 1 for result in seed_results]
    return [count / sum(counts) for count in counts]


def values(results: Results, scale: Scale, cell: Cell) -> dict[int, float]:
    found, evaluation, numbers = parts(results, scale, cell), cell.evaluation, {}
    for seed in sorted(set.intersection(*(set(seeds) for seeds in found))):
        of_seed = [seeds[seed] for seeds in found]
        metrics = [result.metrics.get(evaluation.metric) for result in of_seed]
        if None not in metrics:
            numbers[seed] = evaluation.scale * sum(
                share * metric for share, metric in zip(shares(evaluation, of_seed), metrics, strict=True))
    return numbers

"""Learning curves: metrics at eighths of a training run. All objectives have the same data, steps and schedule.

    make curves SCALE=rich

Rows are the checkpoints of the runs of Tables 1 and 2 on short captions, and of CapPa and MC-Diffusion. An objective
that learns later looks worse at any early checkpoint, so no claim is judged by these curves.
"""
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from statistics import fmean

from .cells import Cell, Numbers, Run, captioning, length_flags, probes, selections
from .scale import Scale

OBJECTIVES = {"CLIP": "", "ARC": "ARC-", "MDC": "MDC-", "CapPa": "CapPa-", "MCD": "MCD-"}
PROBE, BOUND, ENOUGH = "Average", "swap_att", 90.0
DRAWS = 16  # of MCD's bound. With the default of 1,024 the selection at eight checkpoints would take ten hours


def curves(scale: Scale) -> Iterator[Cell]:
    """Yield selection at every checkpoint, and probes and captions at those of `scale.curve`."""
    for objective, prefix in OBJECTIVES.items():
        flags = ("--num_samples", str(DRAWS)) if objective == "MCD" else ()
        for epoch in range(1, scale.epochs + 1):
            run = Run(f"{prefix}{scale.backbone}", scale.alt, at=epoch if epoch < scale.epochs else None)
            row, columns = f"{objective}, {Fraction(epoch, scale.epochs)}", {}
            if epoch in scale.curve:
                columns |= probes(scale)
            columns |= selections(scale, flags=flags)
            if epoch in scale.curve and objective != "CLIP":
                columns |= {column: captioning(scale, column, length_flags(scale, objective, "auto"))
                            for column in ("CIDEr", "exact match")}
            for column, evaluation in columns.items():
                yield Cell(row, column, run, evaluation, block=row.partition(", ")[2])


def images_until(scale: Scale, numbers: Numbers) -> dict[str, str]:
    """Return how many images an objective has seen when it first has `ENOUGH` % on `BOUND`, as a range over seeds."""
    points = defaultdict(list)  # of each objective: images, and the numbers by seed
    for cell, by_seed in numbers.items():
        objective, _, share = cell.row.partition(", ")
        if cell.column == BOUND:
            points[objective].append((int(Fraction(share) * scale.images), by_seed))

    def shown(images: float) -> str:
        return f"{images:,}" if images < math.inf else f"> {scale.images:,}"

    found = {}
    for objective, curve in points.items():
        firsts = [next((images for images, by_seed in curve if by_seed.get(seed, 0) >= ENOUGH), math.inf)
                  for seed in curve[0][1]]  # only seeds that were evaluated from the first checkpoint on
        if firsts:
            found[objective] = " to ".join(dict.fromkeys((shown(min(firsts)), shown(max(firsts)))))
    return found


def note(scale: Scale, numbers: Numbers) -> str:
    from open_clip_mdc.data.markdown import markdown_table
    table = markdown_table(["", f"images until {ENOUGH:.0f} % of {BOUND}"], images_until(scale, numbers).items())
    return (f"\nA whole run: {scale.images:,} images, {scale.images // scale.batch:,} steps of {scale.batch}.\n\n"
            f"{table}\n")


def draw_bands(path: Path, columns: dict[str, str], objectives: Iterable[str], numbers: Numbers,
               x_of: Callable[[Cell], float], **settings) -> None:
    """Draw a panel for each column, with the label of its axis, and in it a line for each objective.

    A line is the mean over seeds at each x, and its band reaches from the lowest to the highest. Further arguments are
    settings of all axes.
    """
    from matplotlib.figure import Figure
    figure = Figure(figsize=(3 * len(columns), 3), layout="constrained")
    for axes, (column, label) in zip(figure.subplots(1, len(columns)), columns.items(), strict=True):
        axes.set(ylabel=label, **settings)
        for number, objective in enumerate(objectives):
            points = {x_of(cell): by_seed.values() for cell, by_seed in numbers.items()
                      if cell.column == column and by_seed and cell.row.startswith(f"{objective},")}
            if points:
                low, mean, high = ([of(values) for values in points.values()] for of in (min, fmean, max))
                axes.plot(list(points), mean, marker="o", markersize=3, color=f"C{number}", label=objective)
                axes.fill_between(list(points), low, high, color=f"C{number}", alpha=0.2, linewidth=0)
    if (axes := max(figure.axes, key=lambda one: len(one.lines))).lines:  # the first that has all objectives
        axes.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=100)


def plot(scale: Scale, numbers: Numbers, path: Path) -> None:
    columns = {PROBE: "probes, average, %", **{s.label: f"{s.label}, %" for s in scale.selection}, "CIDEr": "CIDEr"}
    draw_bands(path, columns, OBJECTIVES, numbers,
               lambda cell: float(Fraction(cell.row.partition(", ")[2])) * (scale.images / 1000),
               xlabel="thousands of images seen")

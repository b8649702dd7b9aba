"""Learning curves: every metric at eighths of one training, of all objectives by the same data, steps and schedule.

    make curves SCALE=rich

The paper compares trained models; at one early point an objective that learns later only looks worse. Rows are the
checkpoints of the runs of Tables 1 and 2 on short captions, with CapPa and MC-Diffusion beside them. Below the table
stands after how many images swapped attributes are told apart. No claim of a ledger: compare them at the end.
"""
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path

from article import asked, captioning
from cells import Cell, Evaluation, Run, probes
from scale import Scale

OBJECTIVES = {"CLIP": "", "ARC": "ARC-", "MDC": "MDC-", "CapPa": "CapPa-", "MCD": "MCD-"}
PROBE, BOUND, ENOUGH = "Average", "swap_att", 90.0
DRAWS = 16  # of MCD's bound; with the default's 1,024 the selection of eight checkpoints would take ten hours


def curves(scale: Scale) -> Iterator[Cell]:
    """Selection at every checkpoint, probes and captions at those of `scale.curve`."""
    for objective, prefix in OBJECTIVES.items() if scale.curve else ():
        flags = ("--num_samples", str(DRAWS)) if objective == "MCD" else ()
        for epoch in range(1, scale.epochs + 1):
            run = Run(f"{prefix}{scale.backbone}", scale.alt, at=epoch if epoch < scale.epochs else None)
            row, columns = f"{objective}, {Fraction(epoch, scale.epochs)}", {}
            if epoch in scale.curve:
                columns |= probes(scale)
            columns |= {s.label: Evaluation("image_caption_selection", s.root, s.subsets, "text_acc", flags,
                                            sizes=(s.cases,)) for s in scale.selection}
            if epoch in scale.curve and objective != "CLIP":
                columns |= {label: captioning(scale, metric, asked(objective, "auto"))
                            for label, metric in (("CIDEr", "CIDEr"), ("exact match", "exact_match"))}
            for column, evaluation in columns.items():
                yield Cell(row, column, run, evaluation, block=row.partition(", ")[2])


def images_until(scale: Scale, cells: Iterable[Cell], means: Iterable[float | None]) -> dict[str, str]:
    """By objective, the images that were seen at the first checkpoint with `ENOUGH` % on swapped attributes."""
    found: dict[str, str] = {}
    for cell, mean in zip(cells, means, strict=True):
        objective, _, share = cell.row.partition(", ")
        if cell.column == BOUND and mean is not None:
            seen = int(Fraction(share) * scale.epochs) * scale.data[scale.alt].samples
            if not found.get(objective, ">").startswith(">"):
                continue
            found[objective] = f"{seen:,}" if mean >= ENOUGH else f"> {seen:,}"
    return found


def note(scale: Scale, cells: list[Cell], means: list[float | None]) -> str:
    """What stands below the table."""
    from open_clip_mdc.data.markdown import markdown_table
    if not scale.curve:
        return ""
    samples = scale.data[scale.alt].samples * scale.epochs
    return (f"\nA whole run: {samples:,} images, {samples // scale.batch:,} steps of {scale.batch}.\n\n" +
            markdown_table(["", f"images until {ENOUGH:.0f} % of {BOUND}"],
                             list(images_until(scale, cells, means).items())) + "\n")


def plot(scale: Scale, cells: list[Cell], means: list[float | None], path: Path) -> None:
    """A panel for each of four metrics, over images seen."""
    from matplotlib.figure import Figure
    columns = [PROBE, *(s.label for s in scale.selection), "CIDEr"]
    figure = Figure(figsize=(3 * len(columns), 3), layout="constrained")
    for axes, column in zip(figure.subplots(1, len(columns)), columns, strict=True):
        label = {PROBE: "probes, average, %", "CIDEr": column}.get(column, f"{column}, %")
        axes.set(xlabel="images seen", ylabel=label)
        axes.ticklabel_format(axis="x", style="sci", scilimits=(3, 3))
        for number, objective in enumerate(OBJECTIVES):
            points = [(Fraction(cell.row.partition(", ")[2]), mean) for cell, mean in zip(cells, means, strict=True)
                      if cell.column == column and mean is not None and cell.row.startswith(f"{objective},")]
            if points:
                images = scale.data[scale.alt].samples * scale.epochs
                axes.plot([float(share) * images for share, _ in points], [mean for _, mean in points], marker="o",
                          markersize=3, color=f"C{number}", label=objective)
    if figure.axes[0].lines:
        figure.axes[0].legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=100)

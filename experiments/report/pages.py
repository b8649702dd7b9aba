"""Write cells and their numbers as Markdown, CSV and Figures 4, 5 and 6.

Imports at the top are of the standard library alone, as `make -n` runs where nothing is installed.
"""
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from .. import commands
from ..commands import Place
from ..tables.cells import Cell
from ..tables.paper_tables import systems
from ..tables.scales import Captioning, Scale

IMAGES = 4  # shown in Figure 6


class Summary(NamedTuple):
    mean: float
    std: float | None  # over seeds, None for one seed
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.1f}" + (f" ± {self.std:.1f}" if self.std is not None else "")


Summaries = dict[Cell, Summary | None]


def summarise(numbers: Iterable[float]) -> Summary | None:
    numbers = list(numbers)
    if not numbers:
        return None
    return Summary(statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None, len(numbers))


def markdown(cells: Summaries) -> str:
    """Return a table whose rows and columns have the order of the cells, with the paper's numbers in brackets.

    The best number of a column and block is bold and the second italic, as in the paper. Rows and columns without a
    number are named below the table.
    """
    from open_clip_mdc.data.markdown import markdown_table
    rows, columns = (list(dict.fromkeys(getattr(cell, what) for cell in cells)) for what in ("row", "column"))
    ranks = defaultdict(list)
    for cell, summary in cells.items():
        if summary and cell.competes:
            ranks[cell.block, cell.column].append(round(summary.mean, 1))
    text, empty, absent = {}, set(), set()
    if any(cells.values()):
        empty = set(columns) - {c.column for c, s in cells.items() if s or c.paper is not None}
        absent = set(rows) - {c.row for c, s in cells.items() if s}
    for cell, summary in cells.items():
        shown = str(summary) if summary else "missing"
        if summary and cell.competes:
            others = ranks[cell.block, cell.column]
            place = sorted(set(others), reverse=True).index(round(summary.mean, 1))
            shown = f"**{shown}**" if place == 0 else f"*{shown}*" if place == 1 and len(others) > 2 else shown
        text[cell.row, cell.column] = shown + (f" [{cell.paper}]" if cell.paper is not None else "")
    shown_columns = [column for column in columns if column not in empty]
    table = markdown_table(["", *shown_columns],
                           [[row, *(text.get((row, column), "") for column in shown_columns)]
                            for row in rows if row not in absent])
    seeds = sorted({s.seeds for s in cells.values() if s}) or [0]
    count = " to ".join(map(str, sorted({seeds[0], seeds[-1]})))
    outside = sorted({cell.row.rpartition(", ")[2] for cell in cells if cell.row not in absent} & {"CLIP-LB", "CoCa"})
    notes = [f"Seeds: {count}" + (", mean ± standard deviation" if seeds[-1] > 1 else ""),
             any(cell.paper is not None for cell in cells) and "The paper's number is in brackets",
             outside and f"{' and '.join(outside)} stands outside the comparison",
             empty and f"Not measured: {', '.join(c for c in columns if c in empty)}",
             absent and f"Not run: {'; '.join(r for r in rows if r in absent)}"]
    return f"{table}\n\n{'. '.join(filter(None, notes))}.\n"


def csv(cells: Summaries) -> str:
    import pandas as pd
    frame = pd.DataFrame([
        dict(row=c.row, column=c.column, mean=s and s.mean, std=s and s.std, seeds=s.seeds if s else 0, paper=c.paper)
        for c, s in cells.items()])
    return frame.to_csv(index=False)


def plot(name: str, cells: Summaries, path: Path) -> None:
    """Draw Figure 4 or 5: a line of what varies, a band for MDC in Figure 4, and dotted lines for the floors."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.add_subplot(ylabel="linear probe, %")
    unit, axis = {"figure4": (" %", "masking ratio, % (100: parallel decoding)"),
                  "figure5": (" pairs", "image-text pairs")}[name]
    axes.set_xlabel(axis)
    level = {}
    for colour, column in enumerate(dict.fromkeys(cell.column for cell in cells)):
        points = [(c.row, s) for c, s in cells.items() if s and c.column == column]
        line = [(row.removesuffix(unit).rpartition(" ")[2], s) for row, s in points if row.endswith(unit)]
        level |= {row: s for row, s in points if not row.endswith(unit) and row != "MDC"}
        for row, s in points:
            if row == "MDC":
                axes.axhline(s.mean, color=f"C{colour}", linestyle="--", label=f"MDC, {column}")
                axes.axhspan(s.mean - (s.std or 0), s.mean + (s.std or 0), color=f"C{colour}", alpha=0.15)
        if line:
            axes.errorbar([int(x) if name == "figure4" else x for x, _ in line], [s.mean for _, s in line],
                          [s.std or 0 for _, s in line], marker="o", color=f"C{colour}", capsize=2,
                          label=f"fixed ratio, {column}" if name == "figure4" else column)
    for (row, s), colour in zip(level.items(), ("black", "grey"), strict=False):
        axes.axhline(s.mean, color=colour, linestyle=":", label=row)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=100)


def captions(scale: Scale, captioning: Captioning, place: Place) -> list[dict]:
    rows = {}
    for system in systems(scale, captioning):
        path = commands.caption_file(scale, captioning, system, 0, place)
        saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"captions": {}}
        for image in list(saved["captions"])[:IMAGES]:
            row = rows.setdefault(image, {"image": image, "reference": saved["references"][image][0]})
            row[system] = saved["captions"][image]
    return list(rows.values())


def figure6(scale: Scale, place: Place, path: Path) -> str:
    from matplotlib.figure import Figure

    from open_clip_mdc.data.images import sample_image
    from open_clip_mdc.data.shards import read_samples
    pages = []
    for captioning in scale.captioning:
        if not (rows := captions(scale, captioning, place)):
            continue
        root = Path(place.fill(captioning.root))
        samples = islice(read_samples(str(root / "test" / "0.tar")), IMAGES)
        images = {sample["__key__"]: sample_image(sample) for sample in samples}
        figure = Figure(figsize=(3.2 * len(rows), 3.2))  # the text below is added by bbox_inches
        for axes, row in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
            axes.imshow(images[row["image"]])
            axes.axis("off")
            text = [fill(f"{system}: {caption}", 38) for system, caption in row.items() if system != "image"]
            axes.set_title("\n".join(text), y=-0.05, va="top", loc="left", fontsize=8)
        figure.savefig(path.with_name(f"{path.stem}-{captioning.label}.png"), dpi=80, bbox_inches="tight")
        pages += [f"{captioning.label} {row.pop('image')}\n\n"
                  + "\n".join(f"- {system}: {caption}" for system, caption in row.items()) for row in rows]
    return "\n\n".join(pages or ["missing"]) + "\n"

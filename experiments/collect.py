"""Results of clip_benchmark as the paper's tables: Markdown, CSV and, for a figure, a PNG.

    python experiments/collect.py table1 table5 --scale scenes --out build/scenes

A result is recognised by the folder it lies in (commands.variant), its data set and the name of its run; mean and
standard deviation are over the seeds that are there. What is missing is shown as missing.
"""
import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from commands import variant
from scales import RATIOS, SCALES, Scale
from tables import TABLES, Cell

TITLES = {
    "table1": "Table 1: linear probes", "table2": "Table 2: compositionality, accuracy in %",
    "table3": "Table 3: captioning", "table4": "Table 4: the weight 1/t", "table5": "Table 5: intervals of t",
    "figure3": "Figure 3: caption lengths", "figure4": "Figure 4: fixed masking ratios",
    "figure5": "Figure 5: amount of data", "figure6": "Figure 6: captions of different length",
}
Results = dict[tuple[str, str, str], dict[int, dict]]  # (variant, data set, run without seed) -> {seed: metrics}


class Summary(NamedTuple):
    """A cell's number over its seeds."""

    mean: float
    std: float | None  # of one seed
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.1f}" + (f" ± {self.std:.1f}" if self.std is not None else "")


def read_results(folder: Path) -> Results:
    """All results below a folder.

    Raises:
        ValueError: a file that clip_benchmark did not write.
    """
    results: Results = {}
    for path in sorted(folder.glob("*/*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            name = re.search(r"([^/\\]+)--s(\d+)", result["pretrained"])
            if name:
                key = (path.parent.name, result["dataset"], name[1])
                results.setdefault(key, {})[int(name[2])] = result["metrics"]
        except (ValueError, KeyError, TypeError) as problem:
            raise ValueError(f"{path} is no result of clip_benchmark eval: {problem!r}") from problem
    return results


def summarise(results: Results, cell: Cell) -> Summary | None:
    """Mean and sample standard deviation over the seeds that have all of the cell's data sets; None if none has."""
    name = cell.run.name(0).rpartition("--s")[0]
    found = [results.get((variant(cell.evaluation), dataset, name), {}) for dataset in cell.evaluation.datasets]
    values = []
    for seed in set.intersection(*(set(seeds) for seeds in found)):
        numbers = [seeds[seed].get(cell.evaluation.metric) for seeds in found]
        if None not in numbers:
            values.append(cell.evaluation.scale * statistics.mean(numbers))
    if not values:
        return None
    return Summary(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def markdown(cells: list[Cell], summaries: list[Summary | None]) -> str:
    """Rows and columns in the order of the cells; best of a column in bold, the paper's numbers in brackets."""
    rows, columns = (list(dict.fromkeys(getattr(cell, what) for cell in cells)) for what in ("row", "column"))
    best = {column: max((s.mean for c, s in zip(cells, summaries, strict=True)
                         if s and c.column == column and c.competes), default=None) for column in columns}
    text = {}
    for cell, summary in zip(cells, summaries, strict=True):
        shown = str(summary) if summary else "missing"
        if summary and cell.competes and round(summary.mean, 1) == round(best[cell.column], 1):
            shown = f"**{shown}**"
        text[cell.row, cell.column] = shown + (f" [{cell.paper}]" if cell.paper is not None else "")
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    lines += [[row, *(text.get((row, column), "") for column in columns)] for row in rows]
    seeds = sorted({s.seeds for s in summaries if s}) or [0]
    count = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    note = f"\n\nSeeds: {count}" + (", mean ± standard deviation" if seeds[-1] > 1 else "")
    note += "; in brackets the paper's number." if any(cell.paper is not None for cell in cells) else "."
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + note + "\n"


def csv(cells: list[Cell], summaries: list[Summary | None]) -> str:
    import pandas as pd
    frame = pd.DataFrame([
        dict(row=c.row, column=c.column, mean=s and s.mean, std=s and s.std, seeds=s.seeds if s else 0, paper=c.paper)
        for c, s in zip(cells, summaries, strict=True)])
    return frame.to_csv(index=False)


def plot(name: str, cells: list[Cell], summaries: list[Summary | None], path: Path) -> None:
    """Figure 4 (ratios, MDC as a line across) or Figure 5 (amounts of data)."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.add_subplot(ylabel="linear probe, %")
    ratios = {f"BERT {ratio} %": ratio for ratio in RATIOS} | {"Parallel 100 %": 100}
    for colour, column in enumerate(dict.fromkeys(cell.column for cell in cells)):
        points = [(c.row, s) for c, s in zip(cells, summaries, strict=True) if s and c.column == column]
        style = dict(color=f"C{colour}", capsize=2)
        if name == "figure4":
            fixed = [(ratios[row], s) for row, s in points if row in ratios]
            for row, s in points:
                if row == "MDC":
                    axes.axhline(s.mean, color=f"C{colour}", linestyle="--", label=f"MDC, {column}")
                    axes.axhspan(s.mean - (s.std or 0), s.mean + (s.std or 0), color=f"C{colour}", alpha=0.15)
            axes.set_xlabel("masking ratio, % (100: parallel decoding)")
            label = f"fixed ratio, {column}"
        else:
            fixed, label = points, column
            axes.set_xlabel("image-text pairs")
        if fixed:
            axes.errorbar([x for x, _ in fixed], [s.mean for _, s in fixed], [s.std or 0 for _, s in fixed],
                          marker="o", label=label, **style)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=100)


def captions(scale: Scale, folder: Path, images: int = 4) -> str:
    """Figure 6: the same pictures' captions by each system of Table 3, those of its first seed."""
    rows: dict[tuple[str, str], list[str]] = {}
    for cell in TABLES["table3"](scale):
        name = cell.run.name(0).rpartition("0")[0]
        files = sorted(path for path in (folder / variant(cell.evaluation) / "captions").glob("*.json")
                       if name in path.name)
        if not files or cell.column != "CIDEr":
            continue
        saved = json.loads(files[0].read_text(encoding="utf-8"))
        for image in list(saved["captions"])[:images]:
            row = rows.setdefault((cell.row.partition(",")[0], image), ["reference: " + saved["references"][image][0]])
            row.append(f"{cell.row.partition(', ')[2]}: {saved['captions'][image]}")
    lines = [f"{data} {image}\n" + "\n".join(f"- {text}" for text in row) for (data, image), row in rows.items()]
    return "\n\n".join(lines or ["missing"]) + "\n"


def write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def collect(scale: Scale, out: Path, names: Iterable[str]) -> str:
    """Makes tables/NAME.md, .csv and figures of `out`/results; tables.md holds all of them, and is returned.

    Raises:
        ValueError: see `read_results`.
    """
    folder = out / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    results, pages = read_results(out / "results"), []
    for name in names:
        if name == "figure3":
            page = "```\n" + (out / "logs" / "figure3.log").read_text(encoding="utf-8") + "```\n"
        elif name == "figure6":
            page = captions(scale, out / "results")
        else:
            cells = list(TABLES[name](scale))
            summaries = [summarise(results, cell) for cell in cells]
            page = markdown(cells, summaries)
            write(folder / f"{name}.csv", csv(cells, summaries))
            if name.startswith("figure"):
                plot(name, cells, summaries, folder / f"{name}.png")
        write(folder / f"{name}.md", page)
        pages.append(f"## {TITLES[name]}\n\n{page}")
    write(folder / "tables.md", "\n".join(pages))
    return "\n".join(pages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", choices=TITLES)
    parser.add_argument("--scale", required=True, choices=SCALES)
    parser.add_argument("--out", required=True, type=Path, help="folder of the experiment, with results/")
    args = parser.parse_args()
    try:
        print(collect(SCALES[args.scale], args.out, args.tables))
    except (ValueError, OSError) as problem:
        sys.exit(f"error: {problem}")


if __name__ == "__main__":
    main()

"""Results of clip_benchmark as the paper's tables: Markdown, CSV and, for a figure, a PNG.

    python experiments/collect.py table1 table5 --scale scenes --out build/scenes --insert experiments/RESULTS.md

A result is recognised by the folder it lies in (commands.variant), its data set and the name of its run; mean and
standard deviation are over the seeds that are there. What is missing is shown as missing.
"""
import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

import commands
from commands import Place, variant
from scales import RATIOS, SCALES, Scale
from tables import TABLES, Cell

TITLES = {
    "table1": "Table 1: linear probes", "table2": "Table 2: compositionality, accuracy in %",
    "table3": "Table 3: captioning", "table4": "Table 4: the weight 1/t", "table5": "Table 5: intervals of t",
    "figure3": "Figure 3: caption lengths", "figure4": "Figure 4: fixed masking ratios",
    "figure5": "Figure 5: amount of data", "figure6": "Figure 6: captions of different length",
}
PICTURES = 4  # of Figure 6
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
            fixed, label = [(row.removesuffix(" pairs"), s) for row, s in points], column
            axes.set_xlabel("image-text pairs")
        if fixed:
            axes.errorbar([x for x, _ in fixed], [s.mean for _, s in fixed], [s.std or 0 for _, s in fixed],
                          marker="o", label=label, **style)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=100)


def captions(scale: Scale, results: Path) -> dict[str, list[dict]]:
    """Captions of the same pictures by each system of Table 3, those of its first seed: {test set: rows}.

    A row has the picture's "image" (its key), a "reference" and a caption by system.
    """
    tables: dict[str, dict[str, dict]] = {}
    for cell in TABLES["table3"](scale):
        files = sorted((results / variant(cell.evaluation) / "captions").glob(f"*{cell.run.name(0)[:-1]}*.json"))
        if not files:
            continue
        dataset, _, system = cell.row.partition(", ")
        saved = json.loads(files[0].read_text(encoding="utf-8"))
        for image in list(saved["captions"])[:PICTURES]:
            row = tables.setdefault(dataset, {}).setdefault(
                image, {"image": image, "reference": saved["references"][image][0]})
            row[system] = saved["captions"][image]
    return {dataset: list(rows.values()) for dataset, rows in tables.items()}


def figure6(scale: Scale, place: Place, path: Path) -> str:
    """A contact sheet, and the same captions as Markdown."""
    from io import BytesIO

    from matplotlib.figure import Figure
    from PIL import Image

    from open_clip_mdc.data.shards import find_picture, read_samples
    tables, pages = captions(scale, place.out / "results"), []
    for captioning in scale.captioning:
        rows = tables.get(captioning.label, [])
        if not rows:
            continue
        root = Path(commands.fill(captioning.root, place))
        samples = islice(read_samples(str(root / "test" / "0.tar")), PICTURES)
        pictures = {sample["__key__"]: sample[find_picture(sample)] for sample in samples}
        figure = Figure(figsize=(3.2 * len(rows), 3.2))  # the text below is added by bbox_inches
        for axes, row in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
            axes.imshow(Image.open(BytesIO(pictures[row["image"]])).convert("RGB"))
            axes.axis("off")
            text = [fill(f"{system}: {caption}", 38) for system, caption in row.items() if system != "image"]
            axes.set_title("\n".join(text), y=-0.05, va="top", loc="left", fontsize=8)
        figure.savefig(path.with_name(f"{path.stem}-{captioning.label}.png"), dpi=80, bbox_inches="tight")
        pages += [f"{captioning.label} {row.pop('image')}\n\n"
                  + "\n".join(f"- {system}: {caption}" for system, caption in row.items()) for row in rows]
    return "\n\n".join(pages or ["missing"]) + "\n"


def write(path: Path, text: str) -> None:
    from open_clip_mdc.data.files import new_file  # here: `make -n` runs where nothing is installed
    with new_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def collect(scale: Scale, place: Place, names: Iterable[str]) -> dict[str, str]:
    """Makes tables/NAME.md, .csv and figures of what is in results/, both in `place.out`; returns the Markdown by name.

    Raises:
        ValueError: see `read_results`.
    """
    folder = place.out / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    results, pages = read_results(place.out / "results"), {}
    for name in names:
        if name == "figure3":
            log = place.out / "logs" / "figure3.out"
            page = f"```\n{log.read_text(encoding='utf-8')}```\n" if log.exists() else "missing\n"
        elif name == "figure6":
            page = figure6(scale, place, folder / name)
        else:
            cells = list(TABLES[name](scale))
            summaries = [summarise(results, cell) for cell in cells]
            page = markdown(cells, summaries)
            write(folder / f"{name}.csv", csv(cells, summaries))
            if name.startswith("figure"):
                plot(name, cells, summaries, folder / f"{name}.png")
        write(folder / f"{name}.md", page)
        pages[name] = page
    return pages


def insert(pages: dict[str, str], scale: str, path: Path) -> None:
    """Renews the tables of a page, each between <!-- SCALE NAME --> and <!-- end -->; the words around them stay.

    Raises:
        ValueError: the page has no place for a table.
    """
    text = path.read_text(encoding="utf-8")
    for name, page in pages.items():
        text, found = re.subn(rf"(<!-- {scale} {name} -->\n).*?(<!-- end -->)", lambda m, page=page: m[1] + page + m[2],
                              text, flags=re.DOTALL)
        if not found:
            raise ValueError(f"{path} has no <!-- {scale} {name} --> ... <!-- end -->")
    write(path, text)


def show(pages: dict[str, str]) -> str:
    return "\n".join(f"## {TITLES[name]}\n\n{page}" for name, page in pages.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", choices=TITLES)
    parser.add_argument("--scale", required=True, choices=SCALES)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", required=True, type=Path, help="folder of the experiment, with results/")
    parser.add_argument("--insert", type=Path, metavar="PAGE", help="renew the tables of this page too")
    args = parser.parse_args()
    try:
        pages = collect(SCALES[args.scale], Place(args.data, args.out, "", 0), args.tables)
        if args.insert:
            insert(pages, args.scale, args.insert)
        print(show(pages))
    except (ValueError, OSError) as problem:
        sys.exit(f"error: {problem}")


if __name__ == "__main__":
    main()

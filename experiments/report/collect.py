"""Collect results into the paper's tables and the verdicts on its claims: Markdown, CSV and figures.

    python -m experiments.report.collect table1 table5 --scale scenes --out build/scenes

A result is recognised by its folder (commands.variant), its data set, the name of its run and the epoch of its
checkpoint. Mean and standard deviation are over the seeds that have a result. A cell without one says "missing".
"""
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

from .. import commands
from ..commands import Place
from ..problems import in_one_line, make_parser
from ..progress import write
from ..tables import article, between, curves, mcdiffusion, photos, rates
from ..tables.cells import Cell, Numbers, floor_cells
from ..tables.paper_tables import TABLES, tables_of
from ..tables.scales import SCALES, Scale, named
from . import claims, contexts
from .pages import csv, figure6, markdown, plot, summarise
from .results import read_results, values
from .sides import Measured

TITLES = {
    "table1": "Table 1: linear probes", "table2": "Table 2: compositionality, accuracy in %",
    "table3": "Table 3: captioning", "table4": "Table 4: the weight 1/t", "table5": "Table 5: intervals of t",
    "stability": "Section 4.3: stability of the loss", "floors": "What a probe finds without training",
    "figure3": "Figure 3: caption lengths", "figure4": "Figure 4: fixed masking ratios",
    "figure5": "Figure 5: amount of data", "figure6": "Figure 6: captions of different length",
    "lengths": "Captions of every length", "steps": "Tokens revealed at a time",
    "table6": "Table 6: MC-Diffusion's forward processes and image encoders", "figure7": "Figure 7: guidance",
    "table7": "Table 7: an article's claims on CLIP guidance, regions and masked features",
    "figure8": "Figure 8: a concept from few images", "figure9": "Figure 9: corrupted images",
    "figure10": "Figure 10: diversity", "table8": "Table 8: two views of a caption at equal cost",
    "claims": "Verdicts on the paper's claims", "compared": "Verdicts on MDC and ARC compared",
    "article": "Verdicts on the article's claims",
    "mcdiffusion": "Verdicts on MC-Diffusion's claims", "views": "Verdicts on two views",
    "curves": "Learning curves", "photos": "Captions of photographs by a decoder on a trained encoder",
    "tries": "Other blocks and shares, ARC first, and consensus, on validation photographs",
    "likelihoods": "Which caption or word fits a photograph", "words": "Hidden words of each kind",
    "towers": "A trained encoder after training by each objective", "contexts": "One network, two contexts",
    "epochs": "Few photographs, many epochs", "repetition": "Verdicts on many epochs of few photographs",
    "rates": "Learning rates of MDC and ARC", "own": "MDC and ARC, each at its own learning rate",
    "fair": "Verdicts on MDC and ARC, each at its own learning rate", "longer": "Length of training, at own rates",
    "objectives": "Other objectives beside MDC and ARC", "between": "What lies between ARC and MDC",
    "sentences": "Two sentences of a photograph, in both orders",
}
LEDGERS = ("claims", "compared", "mcdiffusion", "article", "views", "repetition", "fair")
WITH_CLAIMS = (*LEDGERS, *contexts.LEDGERS, "between", "longer", "objectives")
DRAWN = {"between": between.plot, "longer": rates.plot, "epochs": photos.plot, "curves": curves.plot}  # by seed
NOTES = {"photos": photos.note, "curves": curves.note}
PLOTS = dict.fromkeys(article.TABLES, article.plot) | dict.fromkeys(mcdiffusion.TABLES, mcdiffusion.plot)


def cells_by_table(scale: Scale, names: Iterable[str]) -> dict[str, list[Cell]]:
    found = {name: tables_of(scale).get(name, []) for name in names if name in TABLES}
    if found and not any(found.values()):
        name = next(iter(found))
        raise ValueError(f"{name} has no rows at scale {scale.name}. It has some at "
                         f"{', '.join(other.name for other in SCALES.values() if tables_of(other).get(name))}")
    return found


def environments(numbers: Numbers, place: Place) -> str:
    runs = {(cell.run._replace(at=None), seed) for cell, by_seed in numbers.items() for seed in by_seed}
    files = (commands.folder(run, seed, place) / "environment.txt" for run, seed in runs)
    found = Counter(" and ".join(file.read_text(encoding="utf-8").splitlines()) for file in files if file.exists())
    known = "; ".join(line if count == len(runs) else f"{line} ({count} of {len(runs)} runs)"
                      for line, count in sorted(found.items()))
    return f"Trained on {known}.\n" if known else ""


def collect(scale: Scale, place: Place, names: Collection[str]) -> dict[str, str]:
    """Write tables/NAME.md, .csv and figures from results/, both in `place.out`. Returns the Markdown by name.

    The claims of NAME.md are written to tables/claims/NAME.csv.
    """
    tables = cells_by_table(scale, names)
    folder = place.out / "tables"
    (folder / "claims").mkdir(parents=True, exist_ok=True)
    results, pages = read_results(place.out), {}
    measured = Measured(results, scale)
    seeds = sorted({seed for by_seed in results.values() for seed in by_seed})
    for name in names:
        rows, ledger = [], claims.claims_of(name, scale)
        cells = measured.cells if name in LEDGERS else tables.get(name)
        commands.check_recipes(scale, dict.fromkeys(cell.run for cell in cells or ()), seeds, place)
        if name == "figure3":
            log = place.out / "logs" / "figure3.out"
            page = f"```\n{log.read_text(encoding='utf-8')}```\n" if log.exists() else "missing\n"
        elif name == "figure6":
            page = figure6(scale, place, folder / name)
        elif name in LEDGERS:
            rows = claims.give_verdicts(ledger, measured)
            page = claims.ledger(rows, measured)
        elif not cells:
            page = f"no rows at {scale.name}\n"
        else:
            if name not in ("floors", "rates"):  # add pixels and the untrained network, if measured on these images
                probes = {cell.column: cell.evaluation for cell in cells if cell.evaluation.task == "linear_probe"}
                cells = [*cells, *(cell for cell in floor_cells(scale, probes) if values(results, scale, cell))]
            numbers = {cell: values(results, scale, cell) for cell in cells}
            summaries = {cell: summarise(by_seed.values()) for cell, by_seed in numbers.items()}
            if name in contexts.LEDGERS:
                rows = contexts.give_verdicts(ledger, measured)
                page = (contexts.page(measured, numbers, rows, folder / name) if name == "contexts" else
                        contexts.page_of_sentences(measured, numbers, rows))
            else:
                page = markdown(summaries)
                write(folder / f"{name}.csv", csv(summaries))
            if ledger and not rows:
                rows = claims.give_verdicts(ledger, measured)
                page += "\n" + claims.ledger(rows, measured)
            page += environments(numbers, place)
            if name.startswith("figure"):
                PLOTS.get(name, plot)(name, summaries, folder / f"{name}.png")
            if name in NOTES:
                page += NOTES[name](scale, numbers)
            if name in DRAWN:
                DRAWN[name](scale, numbers, folder / f"{name}.png")
        if rows:
            write(folder / "claims" / f"{name}.csv", claims.table(rows, scale))
        write(folder / f"{name}.md", page)
        pages[name] = page
    return pages


def show(pages: dict[str, str]) -> str:
    return "\n".join(f"## {TITLES[name]}\n\n{page}" for name, page in pages.items())


@in_one_line()
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("tables", nargs="+", choices=TITLES)
    parser.add_argument("--scale", required=True, type=named)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", required=True, type=Path, help="folder of the experiment, with results/")
    args = parser.parse_args()
    pages = collect(args.scale, Place(args.data, args.out, "", 0), args.tables)
    print(show(pages))


if __name__ == "__main__":
    main()

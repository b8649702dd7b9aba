"""A learning rate for MDC and one for ARC, and both compared at their own. The paper uses one rate for both.

    make rates SCALE=scenes    # on seeds 10 and 11 and on images of probes, which no other table uses
    make own SCALE=scenes      # with the rates that were chosen, on the scale's seeds
    make longer SCALE=rich     # the same after half of a run, and one, two and four, each with a schedule of its own
    make objectives SCALE=rich # other objectives after an eighth, half and one, at the rate of MDC or ARC

The rule was written before the first run: the rate of an objective is the one with the highest mean probe. If it is the
first or the last of the grid, the grid is extended there by a factor of two.

For `longer`, too: with D = MDC - ARC, the slope of D by doublings is fitted over the first three lengths, on three
seeds. By least squares it is half of the third D minus the first, which is how claims.csv has it. The fourth length has
one seed or more, and a verdict from two on. The crossing is stated only if D changes its sign within these lengths.
"""
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from .cells import Cell, Numbers, Run, caption_cells, length_flags, probe, probes
from .curves import draw_bands
from .scale import Scale

OBJECTIVES = ("MDC", "ARC")
# Other images and another seed of the probe. By its flags a result is told from one on the test images.
HELD_OUT = dict(root="{out}/data/rates/{{dataset_cleaned}}", flags=("--seed", "1"))
RUNS = (0.5, 1, 2, 4)  # of the scale's length
# Models at the rate of the one that they are compared with.
AT_RATE_OF = {"MDC": ("MDC-{}", "Visual-{}", "Visual-{}-table", "Concept-{}"),
              "ARC": ("ARC-{}", "Bicap-{}", "Prefix-{}", "CapPa-{}")}


def rates(scale: Scale) -> Iterator[Cell]:
    """Yield the probe of each objective at each rate of the grid."""
    for objective in OBJECTIVES:
        for rate in scale.rates:
            run = Run(f"{objective}-{scale.backbone}", scale.alt, rate=rate)
            yield Cell(f"{objective}, {rate:g}", "probe", run, probe(scale)._replace(**HELD_OUT), block=objective)


def own(scale: Scale) -> Iterator[Cell]:
    """Yield the probes of each objective at its own rate, and CIDEr where captions are asked of such runs."""
    for objective, rate in scale.chosen.items():
        row, run = f"{objective}, own rate", Run(f"{objective}-{scale.backbone}", scale.alt, rate=rate)
        for column, evaluation in probes(scale).items():
            yield Cell(row, column, run, evaluation)
        if scale.caption_epochs == 1:
            yield from caption_cells(scale, row, run, ("CIDEr",), length_flags(scale, objective, "auto"))


def longer(scale: Scale, models: int | None = 1, runs: tuple[float, ...] = RUNS) -> Iterator[Cell]:
    """Yield the first models of AT_RATE_OF, or all, after trainings of several lengths."""
    for cell in own(scale):
        for model in AT_RATE_OF[cell.row.partition(",")[0]][:models]:
            for times in runs if (model, cell.column) != ("Concept-{}", "CIDEr") else ():  # it has no captions
                run = cell.run._replace(model=model.format(scale.backbone), epochs=times)
                row = f"{model.replace('-{}', '')}, {scale.images * times:,.0f} images"
                yield cell._replace(row=row, run=run, competes=False)


def plot(scale: Scale, numbers: Numbers, path: Path) -> None:
    """Draw the probes that differ, their average and CIDEr over the length of training."""
    columns = {"Average": "probes, average, %", "shape": "shape, %", "size": "size, %", "CIDEr": "CIDEr"}
    draw_bands(path, columns, OBJECTIVES, numbers, lambda cell: RUNS.index(cell.run.epochs),
               xlabel="length of training, in runs", xticks=range(len(RUNS)), xticklabels=RUNS)


TABLES = {"rates": rates, "own": own, "longer": longer,
          "objectives": partial(longer, models=None, runs=(0.125, 0.5, 1))}

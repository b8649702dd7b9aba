"""A learning rate for MDC and one for ARC, and both compared at their own. The paper uses one rate for both.

    make rates SCALE=scenes    # on seeds 10 and 11 and on images of probes, which no other table uses
    make own SCALE=scenes      # with the rates that were chosen, on the scale's seeds

The rule was written before the first run: the rate of an objective is the one with the highest mean probe. If it is the
first or the last of the grid, the grid is extended there by a factor of two.
"""
from collections.abc import Iterator

from .cells import Cell, Run, caption_cells, length_flags, probe, probes
from .scale import Scale

OBJECTIVES = ("MDC", "ARC")
# Other images and another seed of the probe. By its flags a result is told from one on the test images.
HELD_OUT = dict(root="{out}/data/rates/{{dataset_cleaned}}", flags=("--seed", "1"))


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


TABLES = {"rates": rates, "own": own}

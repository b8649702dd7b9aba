"""Table 8, not of the paper: two views of a caption with complementary masks, at equal cost (LaViDa, arXiv 2505.16839).

One view shows what the other hides, so that every token is predicted once a step. The decoder reads two captions
instead of one, so these runs have half of MDC's epochs. MDC's encoder then does twice the work, and its optimizer takes
twice the steps. Two views with independent masks are the control, at the same cost.
"""
from collections.abc import Iterator

from .cells import Cell, caption_cells, captioner, length_flags, probe
from .scales import Scale

VIEWS = 2
ROWS = {"MDC": "MDC", "two views, independent masks": "TwoViews", "two views, complementary masks": "Complementary"}


def table8(scale: Scale) -> Iterator[Cell]:
    if scale.caption_epochs % VIEWS:
        return
    for row, objective in ROWS.items():
        run = captioner(scale, objective)
        if objective != "MDC":
            run = run._replace(epochs=scale.caption_epochs // VIEWS)
        yield Cell(row, next(iter(scale.probes)), run, probe(scale))
        yield from caption_cells(scale, row, run, ("CIDEr", "exact match"), length_flags(scale, objective))


TABLES = {"table8": table8}

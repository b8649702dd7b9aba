"""Compare what the networks of `contexts` are good at, from ARC to MDC: by blocks, and by the share of ARC's rows.

    make between
    make between SCALE=rich    # after half of a run, where MDC and ARC differ most, and at the rate chosen for MDC
"""
from collections.abc import Iterator
from pathlib import Path

from .cells import Cell, Numbers, Run, caption_cells, probes, selections
from .contexts import BETWEEN, REDUNDANCIES, of_contexts
from .curves import draw_bands
from .scale import Scale

# For each x of a line the objective, and flags of decoding.
BY_BEAM = "Mix by beam"
GREEDY, BEAM = ("--num_beams", "1"), ("--num_beams", "6")
AUTO, SEARCH = ("--caption_length", "auto"), ("--sampler", "beam")
LINES = {
    "blocks": {"1": ("ARC", GREEDY), "2": ("blocks of 2", ()), "4": ("blocks of 4", ()), "8": ("blocks of 8", ()),
               "whole": ("MDC", AUTO)},
    "Mix": {"100 %": ("ARC", GREEDY), "75 %": ("Mix 75", AUTO), "50 %": ("Mix", AUTO), "25 %": ("Mix 25", AUTO),
            "0 %": ("MDC", AUTO)},
    BY_BEAM: {"100 %": ("ARC", BEAM), "75 %": ("Mix 75", SEARCH), "50 %": ("Mix", SEARCH), "25 %": ("Mix 25", SEARCH)}}
GAIN = "gain, 1/1000 nats"
DRAWN = (GAIN, "shape", "relation", "CIDEr", "steps")  # others are near 100 %, or fall with these


def between(scale: Scale) -> Iterator[Cell]:
    """Yield what the image tells of a second word, if the world has one, probes, pairs of captions and captions."""
    gain = {GAIN: of_contexts(scale.alt, "gain", "second")._replace(scale=1000.0)} if scale.alt in REDUNDANCIES else {}
    for line, points in LINES.items():
        for x, (objective, flags) in points.items():
            row, run = f"{line}, {x}", Run(BETWEEN[objective].format(scale.backbone), scale.alt,
                                           epochs=1 if gain else 0.5, rate=scale.chosen.get("MDC"))
            measured = {**gain, **probes(scale), **selections(scale, "_debiased")}
            for column, evaluation in measured.items() if line != BY_BEAM else ():
                yield Cell(row, column, run, evaluation, block=line, competes=False)
            yield from caption_cells(scale, row, run, ("CIDEr", "steps"), flags, line, best=())


def plot(scale: Scale, numbers: Numbers, path: Path) -> None:
    """Draw a panel for each of DRAWN. A block's size and a share of ARC's rows have the same x."""
    ticks = ["\n".join(x) for x in zip(LINES["blocks"], LINES["Mix"], strict=True)]
    columns = {cell.column: cell.column for cell in numbers if cell.column in DRAWN}
    draw_bands(path, columns, LINES, numbers,
               lambda cell: list(LINES[cell.block]).index(cell.row.split(", ")[1]),
               xlabel="tokens of a block / ARC's share", xticks=range(len(ticks)), xticklabels=ticks)


TABLES = {"between": between}

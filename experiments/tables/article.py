"""Cells for claims that a summary article makes about masked diffusion captioning, beyond the paper's own.

    table7    CLIP guidance and reranking, region features, image features that are masked in training
    figure8   a concept that is missing in training, learnt from few images
    figure9   corrupted images
    figure10  diversity against quality

A run of seed s is guided by the CLIP run of the same seed. That CLIP is trained on the scale's short captions, so that
in figure8 it has seen the concept. CLIPScore is by the CLIP run of seed s + 1.
"""
from collections.abc import Iterable, Iterator
from pathlib import Path

from .cells import Cell, Run, caption_cells, captioner, captioning, clip, length_flags
from .scales import CONCEPT, SHOTS, Scale

BETTER = ("CIDEr", "exact match", "colours", "nouns", "relations", "CLIPScore")  # columns where more is better
COLUMNS = (*BETTER[:5], "hallucinating", "repeats", "CLIPScore", "CLIP texts")
CLIP_SCALES = ("0.3", "1", "3")
SAMPLES = "5"
CORRUPTIONS = ("gaussian_noise", "gaussian_blur", "jpeg", "brightness")
SEVERITIES = ("1", "3", "5")
TOP_P = ("0.5", "0.8", "0.95", "1")
MASKED = {"half masked": "-context50of50", "all masked": "-context100of50"}  # features, in half of the images
SYSTEMS = (("MDC", "MDC", ()), ("MDC with CLIP", "MDC", ("--clip_scale", "1")), ("ARC", "ARC", ()))


def guided(scale: Scale) -> Iterator[Cell]:
    drawn = ("--temperature", "1")
    ways = {"unguided": ((), False), **{f"CLIP {s}": (("--clip_scale", s), True) for s in CLIP_SCALES},
            "drawn": (drawn, False), f"best of {SAMPLES}": ((*drawn, "--clip_rerank", SAMPLES), True)}
    for objective in ("MDC", "ARC"):
        for way, (flags, helped) in ways.items():
            if objective == "ARC" and way.startswith("CLIP"):
                continue
            yield from caption_cells(scale, f"{objective}, {way}", captioner(scale, objective),
                                     COLUMNS if helped else COLUMNS[:-1], (*length_flags(scale, objective), *flags),
                                     "CLIP", BETTER, guide=clip(scale) if helped else None, clipscore=clip(scale))


def regions(scale: Scale) -> Iterator[Cell]:
    # Scenes of three objects of two sizes, seen as tiles, or as a whole image of a tile's size or of full size.
    if "big" in scale.data:
        model = f"MDC-{scale.backbone}"
        rows = {"whole, 32 px": Run(model, "big"), "whole, 64 px": Run(model, "big", size=64),
                "2 x 2 regions": Run(f"{model}-regions2", "big")}
        where = "{out}/data/captions-big", "wds/captions-big"
        for row, run in rows.items():
            yield from caption_cells(scale, row, run, BETTER[:5], ("--caption_length", "16"), "regions", where=where)


def masked(scale: Scale) -> Iterator[Cell]:
    for row, suffix in MASKED.items():
        yield from caption_cells(scale, f"MDC, {row}", captioner(scale, "MDC", suffix), COLUMNS[:-2],
                                 length_flags(scale, "MDC"), "CLIP", BETTER)


def table7(scale: Scale) -> Iterator[Cell]:
    yield from guided(scale)
    yield from regions(scale)
    yield from masked(scale)


def figure8(scale: Scale) -> Iterator[Cell]:
    if "fewshot" not in scale.data:
        return
    for shots in (0, *SHOTS):
        for label, objective, flags in SYSTEMS:
            base = captioner(scale, objective)._replace(data="fewshot")
            run = Run(base.model, f"shots-{shots}", start=base) if shots else base
            guide = clip(scale) if flags else None
            for column, metric, split, more in ((label, "phrase_recall", "concept", ("--phrase", CONCEPT)),
                                                (f"{label}, others", "exact match", "without", ())):
                yield Cell(f"{shots} images", column, run, captioning(
                    scale, metric, (*length_flags(scale, objective), *flags, *more),
                    (f"{{out}}/data/{split}", f"wds/{split}"), guide), competes=False)


def figure9(scale: Scale) -> Iterator[Cell]:
    rows = {"clean": (), **{f"{name} {severity}": ("--corruption", f"{name}:{severity}") for name in CORRUPTIONS
                            for severity in SEVERITIES}}
    for row, corruption in rows.items():
        for label, objective, flags in SYSTEMS:
            for column, metric in ((label, "CIDEr"), (f"{label}, hallucinating", "hallucinating")):
                yield Cell(row, column, captioner(scale, objective), captioning(
                    scale, metric, (*length_flags(scale, objective), *flags, *corruption),
                    guide=clip(scale) if flags else None), competes=False)


def figure10(scale: Scale) -> Iterator[Cell]:
    data = scale.data[scale.alt]
    train = f"{data.folder}/{{{{00000..{data.shards - 1:05d}}}}}.tar"
    for objective in ("MDC", "ARC"):
        for top_p in TOP_P:
            flags = (*length_flags(scale, objective), "--temperature", "1", "--top_p", top_p, "--samples", SAMPLES,
                     "--train_captions", train)
            yield from caption_cells(scale, f"{objective}, top-p {top_p}", captioner(scale, objective),
                                     ("CIDEr", "Div-1", "Div-2", "mBLEU-4", "distinct", "novel", "repeats"), flags,
                                     objective, best=())


TABLES = {"table7": table7, "figure8": figure8, "figure9": figure9, "figure10": figure10}


def panels(name: str, cells: Iterable[Cell], points: dict[tuple[str, str], float]) -> list[tuple[str, str, dict]]:
    """Return (x label, y label, points of each line) of the panels of a figure. A missing number is None."""
    rows, columns = (list(dict.fromkeys(getattr(cell, what) for cell in cells)) for what in ("row", "column"))

    def line(column: str, chosen: list[str], labels: list[str]) -> list[tuple]:
        return [(label, points.get((row, column))) for label, row in zip(labels, chosen, strict=True)]

    if name == "figure8":
        shots = [row.split()[0] for row in rows]
        return [("images of the concept", title, {column.partition(",")[0]: line(column, rows, shots)
                                                  for column in columns if column.endswith(", others") == others})
                for title, others in ((f'"{CONCEPT}" named, %', False), ("other scenes right, %", True))]
    if name == "figure9":
        return [(corruption.replace("_", " "), "" if number else "CIDEr", {
            column: line(column, ["clean", *(f"{corruption} {s}" for s in SEVERITIES)], ["0", *SEVERITIES])
            for column in columns if "," not in column}) for number, corruption in enumerate(CORRUPTIONS)]
    return [("CIDEr of a drawn caption", "Div-2, %", {
        block: [(points.get((row, "CIDEr")), points.get((row, "Div-2"))) for row in rows
                if row.startswith(f"{block},")] for block in dict.fromkeys(cell.block for cell in cells)})]


def plot(name: str, summaries: dict, path: Path) -> None:
    from matplotlib.figure import Figure
    shown = panels(name, summaries, {(c.row, c.column): s.mean for c, s in summaries.items() if s})
    figure = Figure(figsize={"figure8": (8, 3.2), "figure9": (10, 3)}.get(name, (5, 3.2)), layout="constrained")
    all_axes = figure.subplots(1, len(shown), sharey=name == "figure9", squeeze=False)[0]
    for axes, (x, y, lines) in zip(all_axes, shown, strict=True):
        axes.set(xlabel=x, ylabel=y)
        for label, line in lines.items():
            if found := [point for point in line if None not in point]:
                axes.plot(*zip(*found, strict=True), marker="o", label=label)
    if all_axes[0].lines:
        all_axes[0].legend(frameon=False)
    figure.savefig(path, dpi=100)

"""The cells of a summary article's claims on masked diffusion captioning, which are not the paper's.

The article says that captions guided by CLIP, from features of regions, are more faithful, more precise, more diverse
and more robust to noise, and learn new concepts from few examples. Each claim has rows with a control here, and a line
in the ledger (`SENTENCES`):

    table7    CLIP guidance and reranking; regions; the same gain over folds
    figure8   a concept that training lacks, learnt from few images
    figure9   corrupted images
    figure10  diversity against quality
    figure11  image features masked in training images: how much visual context is to be inferred

The CLIP that helps is the run of seed 0 on the scale's short captions (of a fold: on the fold's), so that in figure8 it
has seen the concept; the CLIP that gives CLIPScore is that of seed 1.
"""
from collections.abc import Iterator
from pathlib import Path

from .cells import Cell, Evaluation, Run, captioner
from .scales import CONCEPT, FOLDS, SHOTS, Scale

METRICS = {"CIDEr": ("CIDEr", 100.0), "exact match": ("exact_match", 100.0), "colours": ("recall_colours", 100.0),
           "nouns": ("recall_nouns", 100.0), "relations": ("recall_relations", 100.0),
           "hallucinating": ("hallucinating_captions", 100.0), "repeats": ("repeated_words", 100.0),
           "CLIPScore": ("CLIPScore", 100.0), "CLIP texts": ("clip_texts_per_caption", 1.0)}
BETTER = ("CIDEr", "exact match", "colours", "nouns", "relations", "CLIPScore")  # more is
CLIP_SCALES = ("0.3", "1", "3")
SAMPLES = "5"
CORRUPTIONS = ("gaussian_noise", "gaussian_blur", "jpeg", "brightness")
SEVERITIES = ("1", "3", "5")
TOP_P = ("0.5", "0.8", "0.95", "1")
# Per cent of features masked, in per cent of the images: -context25of10 and so on.
CONTEXT = ((25, 10), (50, 10), (100, 10), (25, 50), (50, 50), (100, 50), (25, 100), (50, 100))


def clip(scale: Scale) -> Run:
    return Run(scale.backbone, scale.alt)


def asked(objective: str, length: str) -> tuple[str, ...]:
    """An autoregressive model ends its captions by itself."""
    return () if objective in ("ARC", "CapPa") else ("--caption_length", length)


def captioning(scale: Scale, metric: str, flags: tuple[str, ...], guide: Run | None = None, judge: Run | None = None,
         where: tuple[str, str] | None = None, factor: float = 100.0) -> Evaluation:
    """Captioning of the scale's test set, or of another (root, data set)."""
    root, dataset = where or (scale.captioning[0].root, scale.captioning[0].dataset)
    return Evaluation("captioning", root, (dataset,), metric, flags, factor, guide=guide, judge=judge)


def guided(scale: Scale) -> Iterator[Cell]:
    """Rows of CLIP guidance and of its controls: no guidance, drawn captions, the best of them."""
    length = scale.captioning[0].lengths[0]
    drawn = ("--temperature", "1")
    ways = {"unguided": ((), False), **{f"CLIP {s}": (("--clip_scale", s), True) for s in CLIP_SCALES},
            "drawn": (drawn, False), f"best of {SAMPLES}": ((*drawn, "--clip_rerank", SAMPLES), True)}
    for objective in ("MDC", "MCD", "ARC"):
        for way, (flags, helped) in ways.items():
            if objective == "ARC" and way.startswith("CLIP"):
                continue
            for column, (metric, factor) in METRICS.items():
                if column != "CLIP texts" or helped:
                    yield Cell(f"{objective}, {way}", column, captioner(scale, objective), captioning(
                        scale, metric, (*asked(objective, length), *flags), clip(scale) if helped else None,
                        clip(scale), factor=factor), block="CLIP", competes=column in BETTER)


def regions(scale: Scale) -> Iterator[Cell]:
    """Scenes of three objects of two sizes: in tiles, and whole at the sizes of a tile and of all."""
    if "big" in scale.data:
        model = f"MDC-{scale.backbone}"
        rows = {"whole, 32 px": Run(model, "big"), "whole, 64 px": Run(model, "big", size=64),
                "2 x 2 regions": Run(f"{model}-regions2", "big")}
        for row, run in rows.items():
            for column in BETTER[:5]:
                metric, factor = METRICS[column]
                yield Cell(row, column, run, captioning(scale, metric, ("--caption_length", "16"), where=(
                    "{out}/data/captions-big", "wds/captions-big"), factor=factor), block="regions")


def folds(scale: Scale) -> Iterator[Cell]:
    for fold in (name for name in scale.data if name.startswith("fold")):
        for way, flags in (("unguided", ()), ("CLIP 1", ("--clip_scale", "1"))):
            for column in ("CIDEr", "exact match"):
                metric, factor = METRICS[column]
                yield Cell(f"{fold}, {way}", column, Run(f"MDC-{scale.backbone}", fold), captioning(
                    scale, metric, (*asked("MDC", scale.captioning[0].lengths[0]), *flags),
                    Run(scale.backbone, fold) if flags else None,
                    where=(f"{{out}}/data/folds/{fold}", f"wds/{fold}"), factor=factor), block=fold)


def table7(scale: Scale) -> Iterator[Cell]:
    """CLIP guidance; region features; folds."""
    if scale.article:
        yield from guided(scale)
        yield from regions(scale)
        yield from folds(scale)


def figure8(scale: Scale) -> Iterator[Cell]:
    """Recall of a concept after a few images of it, and captions of the others."""
    if "fewshot" not in scale.data:
        return
    length = scale.captioning[0].lengths[0]
    for shots in (0, *SHOTS):
        for label, objective, flags in (("MDC", "MDC", ()), ("MDC with CLIP", "MDC", ("--clip_scale", "1")),
                                        ("ARC", "ARC", ())):
            base = captioner(scale, objective)._replace(data="fewshot")
            run = Run(base.model, f"shots-{shots}", start=base) if shots else base
            flags = (*asked(objective, length), *flags)
            guide = clip(scale) if "--clip_scale" in flags else None
            for column, metric, split, more in ((label, "phrase_recall", "concept", ("--phrase", CONCEPT)),
                                                (f"{label}, others", "exact_match", "without", ())):
                yield Cell(f"{shots} images", column, run, captioning(scale, metric, (*flags, *more), guide, where=(
                    f"{{out}}/data/{split}", f"wds/{split}")), competes=False)


def figure9(scale: Scale) -> Iterator[Cell]:
    """Captions of corrupted images."""
    if not scale.article:
        return
    length = scale.captioning[0].lengths[0]
    rows = {"clean": (), **{f"{name} {severity}": ("--corruption", f"{name}:{severity}") for name in CORRUPTIONS
                            for severity in SEVERITIES}}
    for row, corruption in rows.items():
        for label, objective, flags in (("MDC", "MDC", ()), ("MDC with CLIP", "MDC", ("--clip_scale", "1")),
                                        ("ARC", "ARC", ())):
            for column, name in ((label, "CIDEr"), (f"{label}, hallucinating", "hallucinating")):
                metric, factor = METRICS[name]
                yield Cell(row, column, captioner(scale, objective), captioning(
                    scale, metric, (*asked(objective, length), *flags, *corruption), clip(scale) if flags else None,
                    factor=factor), competes=False)


def figure10(scale: Scale) -> Iterator[Cell]:
    """Five drawn captions of an image: how much they differ, and how good the first is."""
    if not scale.article:
        return
    data = scale.data[scale.alt]
    train = f"{data.folder}/{{{{00000..{data.shards - 1:05d}}}}}.tar"
    columns = {"CIDEr": "CIDEr", "Div-1": "div_1", "Div-2": "div_2", "mBLEU-4": "mBLEU_4",
               "distinct": "distinct_captions", "novel": "novel_captions", "repeats": "repeated_words"}
    for objective in ("MDC", "MCD", "ARC"):
        for top_p in TOP_P:
            flags = (*asked(objective, scale.captioning[0].lengths[0]), "--temperature", "1", "--top_p", top_p,
                     "--samples", SAMPLES, "--train_captions", train)
            for column, metric in columns.items():
                yield Cell(f"{objective}, top-p {top_p}", column, captioner(scale, objective),
                           captioning(scale, metric, flags), block=objective, competes=False)


def figure11(scale: Scale) -> Iterator[Cell]:
    """How many features are masked in how many training images (P_mask in P_cond); whole images are captioned."""
    if not scale.article:
        return
    run = captioner(scale, "MDC")
    runs = {"none": run} | {f"{mask} % in {drop} %": run._replace(model=f"{run.model}-context{mask}of{drop}")
                            for mask, drop in CONTEXT}
    for row, run in runs.items():
        for column in ("CIDEr", "exact match", "hallucinating"):
            metric, factor = METRICS[column]
            flags = asked("MDC", scale.captioning[0].lengths[0])
            yield Cell(row, column, run, captioning(scale, metric, flags, factor=factor),
                       competes=column in BETTER)


TABLES = {"table7": table7, "figure8": figure8, "figure9": figure9, "figure10": figure10, "figure11": figure11}

# (table, sentence, row that is said to be above, row, columns, margin)
SENTENCES = (
    ("table7", "article: CLIP guidance, captions are more faithful (CIDEr)", "MDC, CLIP 1", "MDC, unguided", ["CIDEr"]),
    ("table7", "article: CLIP guidance, captions are more faithful (exact match)", "MDC, CLIP 1", "MDC, unguided",
     ["exact match"]),
    ("table7", "article: CLIP guidance, captions fit better (CLIPScore by another CLIP)", "MDC, CLIP 1",
     "MDC, unguided", ["CLIPScore"]),
    ("table7", "article: CLIP guidance, fewer hallucinations", "MDC, unguided", "MDC, CLIP 1", ["hallucinating"]),
    ("table7", "control: guidance of each step above reranking", "MDC, CLIP 1", f"MDC, best of {SAMPLES}", ["CIDEr"]),
    ("table7", "article: MDC with CLIP above cross-entropy only (ARC)", "MDC, CLIP 1", "ARC, unguided", ["CIDEr"]),
    *(("table7", f"article: regions name {what} more precisely", "2 x 2 regions", "whole, 32 px", [what])
      for what in ("colours", "nouns", "relations")),
    ("table7", "article: regions, captions are more precise (CIDEr)", "2 x 2 regions", "whole, 32 px", ["CIDEr"]),
    ("table7", "control: regions above the whole image at full size", "2 x 2 regions", "whole, 64 px", ["CIDEr"]),
    *(("table7", f"article: the gain of guidance holds in fold {fold}", f"fold{fold}, CLIP 1", f"fold{fold}, unguided",
       ["CIDEr"]) for fold in range(FOLDS)),
    ("figure8", "article: CLIP guidance, a new concept without any example", "0 images", "0 images",
     (["MDC with CLIP"], ["MDC"])),
    ("figure8", "article: CLIP guidance, a new concept from 16 examples", "16 images", "16 images",
     (["MDC with CLIP"], ["MDC"])),
    ("figure8", "article: without CLIP a new concept needs more (ARC, 16)", "16 images", "16 images",
     (["MDC with CLIP"], ["ARC"])),
    *(("figure9", f"article: robust to {name}, MDC with CLIP above ARC", f"{name} 3", f"{name} 3",
       (["MDC with CLIP"], ["ARC"])) for name in CORRUPTIONS),
    *(("figure9", f"article: {name}, fewer hallucinations than ARC", f"{name} 3", f"{name} 3",
       (["ARC, hallucinating"], ["MDC with CLIP, hallucinating"])) for name in CORRUPTIONS),
    ("figure10", "article: more diverse than ARC (Div-2, whole distribution)", "MDC, top-p 1", "ARC, top-p 1",
     ["Div-2"]),
    ("figure10", "control: and of as high a CIDEr", "MDC, top-p 1", "ARC, top-p 1", ["CIDEr"]),
    ("figure11", "article: visual context, too little is masked", "50 % in 50 %", "none", ["CIDEr"]),
    ("figure11", "article: visual context, too much is masked", "50 % in 50 %", "100 % in 50 %", ["CIDEr"]),
)


def plot(name: str, cells: list[Cell], summaries: list, path: Path) -> None:
    """Figures 8 to 11; what is missing is left out."""
    from matplotlib.figure import Figure
    points = {(c.row, c.column): s.mean for c, s in zip(cells, summaries, strict=True) if s}
    rows, columns = (list(dict.fromkeys(getattr(cell, what) for cell in cells)) for what in ("row", "column"))

    def line(axes, column: str, chosen: list[str], labels: list[str], of: str | None = None) -> None:
        found = [(x, points[row, column]) for x, row in zip(labels, chosen, strict=True) if (row, column) in points]
        if found:
            axes.plot(*zip(*found, strict=True), marker="o", label=of or column.partition(",")[0])

    if name == "figure8":
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        panels = figure.subplots(1, 2)
        for axes, title, suffix in zip(panels, (f'"{CONCEPT}" named, %', "other scenes right, %"), ("", ", others"),
                                       strict=True):
            axes.set(xlabel="images of the concept", ylabel=title)
            for column in columns:
                if column.endswith(", others") == bool(suffix):
                    line(axes, column, rows, [row.split()[0] for row in rows])
    elif name == "figure9":
        figure = Figure(figsize=(10, 3), layout="constrained")
        panels = figure.subplots(1, len(CORRUPTIONS), sharey=True)
        for axes, corruption in zip(panels, CORRUPTIONS, strict=True):
            axes.set(xlabel=corruption.replace("_", " "), ylabel="CIDEr" if axes is panels[0] else "")
            chosen = ["clean", *(f"{corruption} {severity}" for severity in SEVERITIES)]
            for column in columns:
                if "," not in column:
                    line(axes, column, chosen, ["0", *SEVERITIES])
    elif name == "figure11":
        figure = Figure(figsize=(5, 3.2), layout="constrained")
        panels = [figure.add_subplot(xlabel="image features masked in training, %", ylabel="CIDEr")]
        for drop in dict.fromkeys(drop for _, drop in CONTEXT):
            masks = [mask for mask, d in CONTEXT if d == drop]
            line(panels[0], "CIDEr", ["none", *(f"{mask} % in {drop} %" for mask in masks)], ["0", *map(str, masks)],
                 f"in {drop} % of the images")
    else:
        figure = Figure(figsize=(5, 3.2), layout="constrained")
        axes = figure.add_subplot(xlabel="CIDEr of a drawn caption", ylabel="Div-2, %")
        panels = [axes]
        for block in dict.fromkeys(cell.block for cell in cells):
            found = [(points[row, "CIDEr"], points[row, "Div-2"]) for row in rows
                     if row.startswith(f"{block},") and (row, "CIDEr") in points and (row, "Div-2") in points]
            if found:
                axes.plot(*zip(*found, strict=True), marker="o", label=block)
    if panels[0].lines:
        panels[0].legend(frameon=False)
    figure.savefig(path, dpi=100)

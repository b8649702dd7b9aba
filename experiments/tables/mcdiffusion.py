"""Cells for the claims of MC-Diffusion (Image Captioning via Masked Conditional Diffusion), all on the same data.

    table6    forward processes and image encoders on the same data and training loop, with controls
    figure7   guidance scales: classifier-free guidance (CFG), guidance by masked features (MCS), and MCS as printed

The same scale is weaker guidance where the unconditional branch sees more of the image. So figure7 also shows the KL of
guided from unguided predictions.
"""
from collections.abc import Iterator
from pathlib import Path

from .cells import KL, Cell, Evaluation, Run, caption_cells, captioner, clip, length_flags
from .scales import Scale

COLUMNS = ("CIDEr", "B@4", "METEOR", "exact match", "colours", "nouns", "relations", "CLIPScore")
SWEEP = ("0", "0.5", "1", "1.5", "2", "3", "5", "7")
FEW = ("1", "3", "7")
MEASURED = ("CIDEr", "B@4", "METEOR", "CLIPScore")  # for each guidance scale


def models(scale: Scale) -> dict[str, Run]:
    """Return the rows of Table 6. On CUB-200 they are those of MC-Diffusion's paper, which has image codes only."""
    if scale.name == "cub":
        rows = {"ARC": ("ARC-VQ",), "MDC": ("MDC-VQ",), "MCD-VQ codes": ("MCD-VQ",),
                "MCD-VQ codes, CFG": ("MCD-VQ", "-cfg"), "MCD-VQ codes, MCS": ("MCD-VQ", "-mcs")}
    else:
        rows = {"ARC": ("ARC",), "MDC": ("MDC",), "MCD absorbing": ("MCD", "-absorbing"), "MCD code": ("MCD",),
                "MCD replace": ("MCD", "-replace"), "MCD-VQ codes": ("MCD-VQ",),
                "MCD-VQ latents": ("MCD-VQ", "-latent"), "MCD, frozen random ViT": ("MCD",)}
    return {row: captioner(scale, *name)._replace(locked="frozen" in row) for row, name in rows.items()}


def clipscore_run(scale: Scale) -> Run | None:
    return None if scale.name == "cub" else clip(scale)  # CUB-200 is too small to train a CLIP model


def table6(scale: Scale) -> Iterator[Cell]:
    for row, run in models(scale).items():
        yield from caption_cells(scale, row, run, COLUMNS, length_flags(scale, row), "all",
                                 clipscore=clipscore_run(scale))
        yield Cell(row, "bound, nats per caption", run, Evaluation("log", "", ("",), "nelbo_per_caption", scale=1.0),
                   block="all", competes=False)


def figure7(scale: Scale) -> Iterator[Cell]:
    """Yield captions by guidance scale w. No guidance is w = 1 in the usual form, and w = 0 in the printed one."""
    objective = "MCD-VQ" if scale.name == "cub" else "MCD"
    cfg, mcs = (captioner(scale, objective, suffix) for suffix in ("-cfg", "-mcs"))
    confident, ancestral = ("--tokens_per_step", "1"), ("--sampler", "ancestral", "--steps", "25")
    rows = [(name, run, w, w, confident) for name, run in (("CFG", cfg), ("MCS", mcs)) for w in SWEEP]
    rows += [("MCS as printed", mcs, w, f"{1 - float(w):g}", confident) for w in SWEEP]
    rows += [(f"{name}, ancestral", run, w, w, ancestral) for name, run in (("CFG", cfg), ("MCS", mcs)) for w in FEW]
    for name, run, w, guidance, sampler in rows:
        flags = ("--caption_length", scale.captioning[0].lengths[0], *sampler, "--guidance_scale", guidance)
        yield from caption_cells(scale, f"{name}, w = {w}", run, (*MEASURED, KL), flags, name, MEASURED,
                                 clipscore=clipscore_run(scale))


TABLES = {"table6": table6, "figure7": figure7}


def plot(name: str, summaries: dict, path: Path) -> None:
    from matplotlib.figure import Figure
    points = {(c.row, c.column): s.mean for c, s in summaries.items() if s}
    figure = Figure(figsize=(13, 3.2), layout="constrained")
    panels = (("CIDEr", "CLIPScore"), ("METEOR", "CLIPScore"), ("B@4", "CLIPScore"), (KL, "CIDEr"))
    for axes, (x, y) in zip(figure.subplots(1, 4), panels, strict=True):
        axes.set(xlabel=f"{x}, guided from plain" if x == KL else x, ylabel=y)
        for block in dict.fromkeys(cell.block for cell in summaries):
            rows = [row for row in dict.fromkeys(cell.row for cell in summaries if cell.block == block)
                    if (row, x) in points and (row, y) in points]
            axes.plot([points[row, x] for row in rows], [points[row, y] for row in rows], marker="o", markersize=3,
                      label=block)
            for row in rows:
                axes.annotate(row.rpartition(" ")[2], (points[row, x], points[row, y]), fontsize=6)
    if points:
        axes.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=100)

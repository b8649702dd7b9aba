"""Cells of tables: the place of a number, the run that is evaluated and the evaluation. No cell knows a seed."""
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from .scale import Captioning, Flags, Names, Scale


class Run(NamedTuple):
    """A training run without its seed."""

    model: str  # name of a model, such as MDC-ViT-B-32
    data: str  # key of Scale.data
    batches: int = 1  # multiple of the scale's global batch (CLIP-LB)
    epochs: float = 1  # multiple of the scale's epochs
    start: "Run | str | None" = None  # fine-tuned from a run, or from OpenCLIP's weights of this tag
    size: int | None = None  # side of images, where it is not the config's
    locked: bool = False  # the image tower is frozen
    untrained: bool = False  # initial weights, as a floor for probes
    rate: float | None = None  # learning rate, where it is not the scale's
    at: int | None = None  # epoch of the checkpoint to evaluate, by default the last. It changes no training

    def name(self, seed: int) -> str:
        longer = (f"-x{self.batches}" if self.batches > 1 else "") + (f"-e{self.epochs:g}" if self.epochs != 1 else "")
        start = f"-from-{self.start.data if isinstance(self.start, Run) else self.start}" if self.start else ""
        size = (f"-{self.size}px" if self.size else "") + ("-locked" if self.locked else "")
        size += ("-untrained" if self.untrained else "") + (f"-lr{self.rate:g}" if self.rate else "")
        return f"{self.model}{size}--{self.data}{longer}{start}--s{seed}"


class Evaluation(NamedTuple):
    """An evaluation by `clip_benchmark eval`. Task "judge" is experiments.judge, "log" reads the training's log."""

    task: str
    root: str  # {data} is the data folder
    datasets: Names
    metric: str
    flags: Flags = ()
    scale: float = 100.0
    weight: str | None = None  # name of a count that weights the data sets in their average. By default all are equal
    sizes: tuple[int, ...] = ()  # test images or cases of each data set, where results do not say it
    guide: Run | None = None  # of the same seed: CLIP, which guides or reranks, or the sighted twin of a blind run
    clipscore: Run | None = None  # CLIP run of the next seed that gives CLIPScore


class Cell(NamedTuple):
    row: str
    column: str
    run: Run
    evaluation: Evaluation
    paper: float | None = None
    block: str = ""  # the best of a column is marked in each block
    competes: bool = True  # whether it may be marked as best


Trained = tuple[Run, int]  # with its seed
Cells = tuple[Cell, ...]
Numbers = dict[Cell, dict[int, float]]  # of each cell, by seed

KL = "KL, 1/1000 nats"  # of guided from unguided predictions, per token
METRICS = {  # column -> name in clip_benchmark's results, where these differ
    "B@4": "Bleu_4", "ROUGE-L": "ROUGE_L", "exact match": "exact_match", "colours": "recall_colours",
    "nouns": "recall_nouns", "relations": "recall_relations", "hallucinating": "hallucinating_captions",
    "repeats": "repeated_words", "Div-1": "div_1", "Div-2": "div_2", "mBLEU-4": "mBLEU_4",
    "distinct": "distinct_captions", "novel": "novel_captions", "CLIP texts": "clip_texts_per_caption",
    "words": "mean_length", "steps": "mean_steps", KL: "guidance_kl"}
FACTORS = {"CLIP texts": 1.0, "words": 1.0, "steps": 1.0, KL: 1000.0}  # other columns are percent


def captioner(scale: Scale, objective: str, suffix: str = "") -> Run:
    """Return the run of an objective whose captions or likelihoods are evaluated. Objective "" is CLIP."""
    return Run(f"{objective}-{scale.backbone}{suffix}".lstrip("-"), scale.alt, epochs=scale.caption_epochs)


def clip(scale: Scale) -> Run:
    return Run(scale.backbone, scale.alt)


def length_flags(scale: Scale, objective: str, length: str | None = None) -> Flags:
    """Return the flags of the caption length, by default the scale's first. An autoregressive model needs none."""
    return () if objective in ("ARC", "CapPa") else ("--caption_length", length or scale.captioning[0].lengths[0])


def captioning(scale: Scale, column: str, flags: Flags, where: Captioning | tuple[str, str] | None = None,
               guide: Run | None = None, clipscore: Run | None = None) -> Evaluation:
    """Return the captioning of the scale's test set, or of another (root, data set), by the metric of a column."""
    root, dataset, *_ = where or scale.captioning[0]
    return Evaluation("captioning", root, (dataset,), METRICS.get(column, column), flags, FACTORS.get(column, 100.0),
                      guide=guide, clipscore=clipscore)


def caption_cells(scale: Scale, row: str, run: Run, columns: Collection[str], flags: Flags, block: str = "",
                  best: Collection[str] | None = None, **where) -> Iterator[Cell]:
    """Yield the cells of a captioning row. Columns in `best` may be marked as best, by default all."""
    for column in columns:
        yield Cell(row, column, run, captioning(scale, column, flags, **where), block=block,
                   competes=column in (columns if best is None else best))


def probes(scale: Scale) -> dict[str, Evaluation]:
    def probe(*chosen) -> Evaluation:
        return Evaluation("linear_probe", scale.probe_root, tuple(p.dataset for p in chosen), "lp_acc1",
                          sizes=tuple(p.images for p in chosen))
    average = {"Average": probe(*scale.probes.values())} if len(scale.probes) > 1 else {}
    return {label: probe(one) for label, one in scale.probes.items()} | average


def selections(scale: Scale, kind: str = "", flags: Flags = ()) -> dict[str, Evaluation]:
    """Return the pairs of right and wrong captions by column. `kind` is "", "_blind" or "_debiased"."""
    return {s.label + kind.replace("_", ", "): Evaluation("image_caption_selection", s.root, s.subsets,
                                                          f"text_acc{kind}", flags, sizes=(s.cases,))
            for s in scale.selection}


def floors(scale: Scale) -> dict[str, tuple[Run, Flags]]:
    """Return the baselines that a probe has to beat: pixels and an untrained network, each with its flags."""
    run = Run(f"MDC-{scale.backbone}", scale.alt, untrained=True)
    return {"pixels": (run, ("--feature", "pixels")), "untrained network": (run, ())}


def floor_cells(scale: Scale, columns: Mapping[str, Evaluation]) -> Iterator[Cell]:
    """Yield the rows of these baselines for a table of probes, given the probe of each column."""
    for row, (run, flags) in floors(scale).items():
        for column, evaluation in columns.items():
            yield Cell(row, column, run, evaluation._replace(flags=flags), competes=False)


def probe(scale: Scale) -> Evaluation:
    """Return the probe of the ablations: ImageNet, or the average of all probes at a small scale."""
    found = list(probes(scale).values())
    return found[0] if "ImageNet" in scale.probes else found[-1]

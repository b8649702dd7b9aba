"""Every table and figure of the paper as a list of cells: which run, by which evaluation, fills which place.

A cell knows no seed: a run is trained once per seed, and collect.py takes mean and standard deviation over them.
"""
from collections.abc import Iterator
from typing import NamedTuple

import paper
from scales import RATIOS, Captioning, Scale


class Run(NamedTuple):
    """One training, up to its seed."""

    model: str  # name of a config
    data: str  # key of Scale.data
    batches: int = 1  # multiple of the scale's global batch (CLIP-LB)
    start: "Run | None" = None  # fine-tuned from

    def name(self, seed: int) -> str:
        """Of the run folder; results are recognised by it."""
        batches = f"-x{self.batches}" if self.batches > 1 else ""
        start = f"-from-{self.start.data}" if self.start else ""
        return f"{self.model}--{self.data}{batches}{start}--s{seed}"


class Evaluation(NamedTuple):
    """One or several data sets of `clip_benchmark eval`, and the metric that is shown: the mean over them."""

    task: str
    root: str  # {data} is the data folder
    datasets: tuple[str, ...]
    metric: str
    flags: tuple[str, ...] = ()
    scale: float = 100.0


class Cell(NamedTuple):
    row: str
    column: str
    run: Run
    evaluation: Evaluation
    paper: float | None = None
    competes: bool = True  # for the best of its column


def probes(scale: Scale) -> dict[str, Evaluation]:
    return {label: Evaluation("linear_probe", scale.probe_root, (dataset,), "lp_acc1")
            for label, dataset in scale.probes.items()}


def probe(scale: Scale) -> Evaluation:
    """The one of the ablations: ImageNet, or what a small scale has."""
    return next(iter(probes(scale).values()))


def table1(scale: Scale) -> Iterator[Cell]:
    """Linear probes."""
    for i, backbone in enumerate(scale.backbones):
        for data, captions in ((scale.alt, "CC12M"), (scale.long, "Recap-10M")):
            methods = {"CLIP": Run(backbone, data), "ARC": Run(f"ARC-{backbone}", data),
                       "MDC": Run(f"MDC-{backbone}", data)}
            if data == scale.long:
                methods = {"CLIP-LB": Run(backbone, data, batches=2), **methods}
            for method, run in methods.items():
                # A small scale has one backbone, beside which the paper's first stands.
                known = paper.TABLE1[captions, list(BACKBONES)[i], method]
                for place, (label, evaluation) in enumerate(probes(scale).items()):
                    yield Cell(f"{scale.data[data].label}, {backbone}, {method}", label, run, evaluation, known[place])


BACKBONES = ("ViT-B-32", "ViT-B-16", "ViT-L-14")


def table2(scale: Scale) -> Iterator[Cell]:
    """Compositionality: plain accuracy, and for captioners blind (no image) and debiased."""
    backbone, data = scale.backbone, scale.alt
    methods = {
        "CLIP": (Run(backbone, data), ()),
        "ARC": (Run(f"ARC-{backbone}", data), ()),
        "MDC (Monte Carlo)": (Run(f"MDC-{backbone}", data),
                              ("--scorer", "monte_carlo", "--num_samples", str(scale.draws))),
        "MDC (heuristic)": (Run(f"MDC-{backbone}", data), ()),
    }
    paper_columns = ("ARO relation", "ARO attribute", "COCO order", "Flickr30k order",
                     "SugarCrepe add", "SugarCrepe replace", "SugarCrepe swap")
    for method, (run, flags) in methods.items():
        for kind in ("", "_blind", "_debiased") if method != "CLIP" else ("",):
            for selection in scale.selection:
                known = dict(zip(paper_columns, paper.TABLE2[method], strict=True)) if not kind else {}
                yield Cell(f"{method}{kind.replace('_', ', ')}", selection.label, run,
                           Evaluation("image_caption_selection", selection.root, selection.subsets,
                                      f"text_acc{kind}", flags), known.get(selection.label), not kind)


CAPTION_METRICS = {"B@4": "Bleu_4", "METEOR": "METEOR", "CIDEr": "CIDEr", "SPICE": "SPICE", "ROUGE-L": "ROUGE_L",
                   "words": "mean_length"}


def captioner(scale: Scale, objective: str, captioning: Captioning) -> Run:
    start = Run(f"{objective}-{scale.backbone}", scale.alt)
    return start if captioning.train is None else Run(start.model, captioning.train, start=start)


def table3(scale: Scale) -> Iterator[Cell]:
    """Captioning. The LLM judge needs an endpoint and is a command of its own: `open_clip_mdc judge`."""
    for captioning in scale.captioning:
        systems = {"ARC": (captioner(scale, "ARC", captioning), ()), **{
            f"MDC-{length}": (captioner(scale, "MDC", captioning), ("--caption_length", length))
            for length in captioning.lengths}}
        for system, (run, flags) in systems.items():
            known = paper.TABLE3.get((captioning.label, system), (None,) * 6)
            order = dict(zip(("B@4", "METEOR", "CIDEr", "SPICE", "ROUGE-L"), known[:5], strict=True))
            for label, metric in CAPTION_METRICS.items():
                yield Cell(f"{captioning.label}, {system}", label, run,
                           Evaluation("captioning", captioning.root, (captioning.dataset,), metric, flags,
                                      1.0 if label == "words" else 100.0), order.get(label), label != "words")


def table4(scale: Scale) -> Iterator[Cell]:
    """With and without the weight 1/t."""
    for method, suffix in (("MDC (w/o t)", "-unweighted"), ("MDC", "")):
        for data, captions in ((scale.alt, "CC12M"), (scale.long, "Recap-10M")):
            yield Cell(method, scale.data[data].label, Run(f"MDC-{scale.backbone}{suffix}", data), probe(scale),
                       paper.TABLE4[captions, method])


def table5(scale: Scale) -> Iterator[Cell]:
    """Intervals of t."""
    for low, high in ((0.0, 1.0), (0.3, 0.8), (0.4, 0.9), (0.5, 1.0)):
        suffix = "" if (low, high) == (0.5, 1.0) else f"-t{low}-{high}"
        yield Cell(f"[{low}, {high}]", scale.data[scale.search].label,
                   Run(f"MDC-{scale.backbone}{suffix}", scale.search), probe(scale), paper.TABLE5[f"[{low}, {high}]"])


def figure4(scale: Scale) -> Iterator[Cell]:
    """BERT at fixed masking ratios, all masked (parallel decoding), and MDC."""
    models = {f"BERT {ratio} %": f"BERT-{scale.backbone}-r{ratio}" for ratio in RATIOS}
    models |= {"Parallel 100 %": f"Parallel-{scale.backbone}", "MDC": f"MDC-{scale.backbone}"}
    for data in scale.ratios:
        for label, model in models.items():
            yield Cell(label, scale.data[data].label, Run(model, data), probe(scale))


def figure5(scale: Scale) -> Iterator[Cell]:
    """Amount of data, equal numbers of epochs."""
    for data in scale.amounts:
        yield Cell(f"{scale.data[data].samples:,} pairs", "MDC", Run(f"MDC-{scale.backbone}", data), probe(scale))


TABLES = {"table1": table1, "table2": table2, "table3": table3, "table4": table4, "table5": table5,
          "figure4": figure4, "figure5": figure5}

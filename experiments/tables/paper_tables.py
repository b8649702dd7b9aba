"""The paper's tables and figures as lists of cells.

A cell knows no seed. A run is trained once for each seed, and collect.py takes the mean and standard deviation over
seeds. The paper's number stands only in cells with the same training data, network and test data.
"""
from collections.abc import Iterable, Iterator
from statistics import fmean

from . import article, between, contexts, curves, mcdiffusion, paper, photos, rates, views
from .cells import Cell, Evaluation, Run, caption_cells, captioner, captioning, floor_cells, probe, probes
from .scale import Flags
from .scales import Captioning, Scale, Selection


def table1(scale: Scale) -> Iterator[Cell]:
    """Yield linear probes. A small scale has the paper's number of ViT-B/32 beside it where the probe is the same."""
    for backbone, network in zip(scale.backbones, BACKBONES, strict=False):
        for data, captions in ((scale.alt, "CC12M"), (scale.long, "Recap-10M")):
            methods = {"CLIP": Run(backbone, data), "ARC": Run(f"ARC-{backbone}", data),
                       "MDC": Run(f"MDC-{backbone}", data)}
            if data == scale.long:
                methods = {"CLIP-LB": Run(backbone, data, batches=2), **methods}
            block = f"{scale.data[data].label}, {backbone}"
            for method, run in methods.items():
                known = paper.probes(captions, network, method)
                if tuple(scale.probes) == paper.PROBES:
                    known["Average"] = round(fmean(known.values()), 1)
                for label, evaluation in probes(scale).items():
                    yield Cell(f"{block}, {method}", label, run, evaluation, known.get(label), block,
                               method != "CLIP-LB")


BACKBONES = ("ViT-B-32", "ViT-B-16", "ViT-L-14")


def averages(selection: Selection) -> dict[str, tuple[str, str | None]]:
    """Return (suffix of the metric, weight of subsets) for each average of a selection set, the official one first."""
    if selection.subsets[0].startswith("aro/vg_"):
        return {", macro": ("_macro", None), ", micro": ("_micro", None)}
    return {", micro": ("", "cases"), ", macro": ("", None)} if len(selection.subsets) > 1 else {"": ("", None)}


def scorers(scale: Scale) -> dict[str, tuple[Run, Flags]]:
    mdc = captioner(scale, "MDC")
    return {
        "CLIP": (captioner(scale, ""), ()),
        "ARC": (captioner(scale, "ARC"), ()),
        "MDC (Monte Carlo)": (mdc, ("--scorer", "monte_carlo", "--num_samples", str(scale.draws))),
        "MDC (heuristic)": (mdc, ()),
    }


def table2(scale: Scale) -> Iterator[Cell]:
    """Yield plain accuracy, and for captioners blind and debiased accuracy.

    The paper's number stands beside the official average of the data set.
    """
    for method, (run, flags) in scorers(scale).items():
        known = dict(zip(paper.SELECTIONS, paper.TABLES["table2"][method], strict=True))
        for kind in ("", "_blind", "_debiased") if method != "CLIP" else ("",):
            for selection in scale.selection:
                for place, (name, (average, weight)) in enumerate(averages(selection).items()):
                    evaluation = Evaluation("image_caption_selection", selection.root, selection.subsets,
                                            f"text_acc{average}{kind}", flags, weight=weight,
                                            sizes=(selection.cases,) * len(selection.subsets))
                    yield Cell(f"{method}{kind.replace('_', ', ')}", f"{selection.label}{name}", run, evaluation,
                               None if kind or place else known.get(selection.label), competes=not kind)


def systems(scale: Scale, test: Captioning) -> dict[str, tuple[Run, Flags]]:
    """Return the rows of Table 3 that the LLM judge compares, which are all but CoCa's."""
    def tuned(objective: str) -> Run:
        start = captioner(scale, objective)
        return start if test.train is None else Run(start.model, test.train, start=start)
    return {"ARC": (tuned("ARC"), ()), **{f"MDC-{length}": (tuned("MDC"), ("--caption_length", length))
                                          for length in test.lengths}}


def table3(scale: Scale) -> Iterator[Cell]:
    """Yield captioning. CoCa is OpenCLIP's, fine-tuned by the same command, for reference only."""
    for test in scale.captioning:
        rows = systems(scale, test)
        if test.coca:
            rows = {"CoCa": (Run(f"coca_{scale.backbone}", test.train, start=test.coca), ()), **rows}
        for system, (run, flags) in rows.items():
            row = f"{test.label}, {system}"
            known = dict(zip(paper.CAPTION_METRICS, paper.TABLES["table3"].get(row, ()), strict=False))
            for column in ("B@4", "METEOR", "CIDEr", "SPICE", "ROUGE-L", "words"):
                evaluation = captioning(scale, column, flags, test)
                yield Cell(row, column, run, evaluation, known.get(column), test.label,
                           column != "words" and system != "CoCa")
            if system != "CoCa":
                judge = Evaluation("judge", "", (test.label,), system)
                yield Cell(row, "LLM", run, judge, known.get("LLM"), test.label)


def table4(scale: Scale) -> Iterator[Cell]:
    for method, suffix in (("MDC (w/o t)", "-unweighted"), ("MDC", "")):
        for data, captions in ((scale.alt, "CC12M"), (scale.long, "Recap-10M")):
            yield Cell(method, scale.data[data].label, Run(f"MDC-{scale.backbone}{suffix}", data), probe(scale),
                       paper.TABLES["table4"][f"{captions}, {method}"][0] if "ImageNet" in scale.probes else None)


def intervals(scale: Scale) -> dict[str, Run]:
    """Return the runs of Table 5 by the paper's label. The last interval is MDC's default, which no name mentions."""
    *others, own = paper.TABLES["table5"]
    suffixes = {label: "-t{}-{}".format(*label.strip("[]").split(", ")) for label in others} | {own: ""}
    return {label: Run(f"MDC-{scale.backbone}{suffix}", scale.search) for label, suffix in suffixes.items()}


def table5(scale: Scale) -> Iterator[Cell]:
    for label, run in intervals(scale).items():
        yield Cell(label, scale.data[scale.search].label, run, probe(scale),
                   paper.TABLES["table5"][label][0] if "ImageNet" in scale.probes else None)


def stability(scale: Scale) -> Iterator[Cell]:
    """Yield how much the training loss varies from one logged step to the next (Section 4.3)."""
    for label, run in intervals(scale).items():
        for column, metric in (("variation of the loss in %", "variation"),
                               ("100 ln of the variation", "log_variation")):
            yield Cell(label, f"{scale.data[scale.search].label}, {column}", run, Evaluation("log", "", ("",), metric),
                       competes=False)


def floors_of_probes(scale: Scale) -> Iterator[Cell]:
    return floor_cells(scale, probes(scale))


def figure4(scale: Scale) -> Iterator[Cell]:
    models = {f"BERT {ratio} %": f"BERT-{scale.backbone}-r{ratio}" for ratio in (15, 30, 45, 60, 75, 90)}
    models |= {"Parallel 100 %": f"Parallel-{scale.backbone}", "MDC": f"MDC-{scale.backbone}"}
    for data in scale.ratios:
        for label, model in models.items():
            yield Cell(label, scale.data[data].label, Run(model, data), probe(scale))


def figure5(scale: Scale) -> Iterator[Cell]:
    for data in scale.amounts:
        yield Cell(f"{scale.data[data].samples:,} pairs", "MDC", Run(f"MDC-{scale.backbone}", data), probe(scale))


def decodings(scale: Scale, flag: str, values: Iterable, others: Flags = ()) -> Iterator[Cell]:
    for test in scale.captioning:
        run, _ = systems(scale, test)["MDC-" + test.lengths[0]]
        for value in map(str, values):
            yield from caption_cells(scale, f"{test.label}, {value}", run, ("CIDEr", "METEOR", "words", "steps"),
                                     (*others, flag, value), test.label, ("CIDEr", "METEOR"), where=test)


def lengths(scale: Scale) -> Iterator[Cell]:
    """Yield captions of fixed lengths, and of the length that the model chooses."""
    return decodings(scale, "--caption_length", (*range(6, 21), "auto"))


def steps(scale: Scale) -> Iterator[Cell]:
    """Yield captions by tokens per step: a fixed number, or all tokens that are at least so probable."""
    return decodings(scale, "--tokens_per_step", (1, 2, 3, 4, 6, 0.9, 0.7, 0.5, 0.3, 0.2), ("--caption_length", "12"))


TABLES = {"table1": table1, "table2": table2, "table3": table3, "table4": table4, "table5": table5,
          "stability": stability, "floors": floors_of_probes, "figure4": figure4, "figure5": figure5,
          "lengths": lengths, "steps": steps, **article.TABLES, **mcdiffusion.TABLES, **views.TABLES, **photos.TABLES,
          **contexts.TABLES, **between.TABLES, **rates.TABLES, "curves": curves.curves}

# The field that a scale needs to have a table, if its `tables` do not name it.
NEEDED = {**dict.fromkeys((*article.TABLES, *views.TABLES), "article"), **dict.fromkeys(mcdiffusion.TABLES, "val"),
          **dict.fromkeys((*photos.TABLES, *contexts.TABLES), "tables"),
          **dict.fromkeys(("curves", "longer", "objectives", "between"), "curve")}


def tables_of(scale: Scale) -> dict[str, list[Cell]]:
    """Return the cells of each table that a scale has."""
    return {name: list(cells(scale)) for name, cells in TABLES.items()
            if name in scale.tables or not scale.tables and getattr(scale, NEEDED.get(name, "name"))}

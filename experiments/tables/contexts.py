"""Cells for the paper's central claim: does a token's visual signal depend on its place in the caption?

In the scenes of scenes/mentions.py an object's shape can be guessed from its colour and the other way round. A coin
decides which is said first. So the same words stand at both places, and the second can be guessed from the first.
experiments/mentions.py measures it, and report/contexts.py compares the measurements.

    contexts    one network in two contexts: as trained, and with all words to the left visible
    sentences   whether it depends on the place in captions of photographs: two sentences, in both orders
"""
from collections.abc import Iterator

from .cells import Cell, Evaluation, Run
from .scale import Data, Scale, made

BETWEEN = {
    "MDC": "MDC-{}", "ARC": "ARC-{}", "CapPa": "CapPa-{}",
    # The words that are measured are tokens 7 and 8 of a caption: in one block of 3, and in two of 2, 4 or 8.
    **{f"blocks of {size}": f"MDC-{{}}-b{size}" for size in (2, 3, 4, 8)},
    "Mix 75": "Mix-{}-arc75", "Mix": "Mix-{}-arc50", "Mix 25": "Mix-{}-arc25"}
CONTEXTS = {"": "as trained", "left ": "words to the left"}  # prefix of a measure -> the context
# The share of objects whose shape is the one that goes with their colour. At 0 there are MDC and ARC alone.
REDUNDANCIES = {"r90": 0.9, "r0": 0.0}
MAIN = ("MDC", "ARC")
MEASURES = ("loss", "gap", "gain", "gradient")
PLACES = ("first", "second")
# Rows of `sentences`: the objective, and how many times longer than the scale's two epochs it is trained.
SENTENCES = {"MDC": ("MDC", 1), "ARC": ("ARC", 1), "MDC, 8 epochs": ("MDC", 4), "blocks of 4": ("blocks of 4", 1)}
# Rows whose network was trained on by the same steps as its twin, one with photographs and one without.
EQUAL, EQUAL_FLAG = ("ARC", "MDC, 8 epochs", "blocks of 4"), ("--equal-steps",)  # which names the folder of results
DRAWS = 8  # random corruptions of each caption

SCENES = "open_clip_mdc scenes --world mentions --num-train 12800 --num-val 500 --num-probe 500 --num-pairs 1"
DATA = {name: Data(f"{{out}}/data/{name}/train", f"redundancy {share}", 8, 12_800)
        for name, share in REDUNDANCIES.items()}
PREPARE = tuple(made(name, f"{SCENES} --redundancy {share}", *(() if name == "r90" else ("contexts",)))
                for name, share in REDUNDANCIES.items())


def of_contexts(data: str, measure: str, place: str) -> Evaluation:
    return Evaluation("contexts", f"{{out}}/data/{data}/val/00000.tar", (data,),
                      f"{measure}_{place}".replace(" ", "_"), scale=1.0)


def contexts(scale: Scale) -> Iterator[Cell]:
    for data in REDUNDANCIES:
        for row, model in BETWEEN.items():
            if row in MAIN or data == "r90":
                for measure in (context + measure for context in CONTEXTS for measure in MEASURES):
                    for place in PLACES:
                        yield Cell(f"r = {REDUNDANCIES[data]}, {row}", f"{measure}, {place}",
                                   Run(model.format(scale.backbone), data), of_contexts(data, measure, place),
                                   block=data, competes=False)


def always_left(row: str) -> bool:
    """Return whether a row of `sentences` reads the words to the left, and no others, as it was trained."""
    return row.startswith("ARC")


def sentences(scale: Scale) -> Iterator[Cell]:
    """Yield what a photograph tells of a sentence that stands first or second, beyond what a blind twin knows."""
    rows = SENTENCES | {f"{row}, equal steps": SENTENCES[row] for row in EQUAL}
    for row, (objective, epochs) in rows.items():
        first = Run(BETWEEN[objective].format(scale.backbone), scale.alt, epochs=epochs, locked=True)
        sighted, flags = (None, ()) if row in SENTENCES else (first._replace(data="again", start=first), EQUAL_FLAG)
        contexts = list(CONTEXTS)[:1] if always_left(row) else CONTEXTS
        for measure in (context + measure for context in contexts for measure in ("loss", "gain")):
            for place in PLACES:
                metric = f"{measure}_{place}".replace(" ", "_")
                yield Cell(row, f"{measure}, {place}", first._replace(data="blind", start=first), Evaluation(
                    "sentences", "{out}/data/held-out/00000.tar", ("sentences",), metric, flags, 1.0, guide=sighted),
                    competes=False)


TABLES = {"contexts": contexts, "sentences": sentences}

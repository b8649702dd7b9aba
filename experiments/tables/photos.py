"""Captioners of photographs that start from a trained image encoder, which the paper does not have.

    photos       MDC, ARC and two objectives between them by ways of decoding, of which the best is chosen on validation
                 photographs. The encoder is locked, or trained in the last epoch (SCALE=photos-unlocked)
    tries        what else may caption better, by one training each: other blocks and shares, ARC first, consensus
    likelihoods  which caption or word fits a test photograph, by the same models
    words        the same for words of each kind
    towers       encoders after training by each objective, beside the same encoder when it is locked
    epochs       the same few captions many times. Masked diffusion language models keep learning where autoregressive
                 ones overfit (Prabhudesai et al. 2025, arXiv 2507.15857)
"""
from collections.abc import Iterator
from pathlib import Path

from .cells import Cell, Evaluation, Numbers, Run, caption_cells, length_flags, probe, selections
from .contexts import BETWEEN
from .curves import draw_bands
from .scale import Scale

RECIPES = {"MDC": (*(("--caption_length", length) for length in ("8", "10", "12", "auto")),
                   ("--caption_length", "auto", "--repeats", "avoid")),
           "ARC": (("--num_beams", "1"), ("--num_beams", "6"), ("--num_beams", "6", "--min_length", "9")),
           "Mix": (("--sampler", "beam"), ("--sampler", "beam", "--min_length", "9")),
           "blocks of 4": ((), ("--sampler", "beam"), ("--sampler", "beam", "--min_length", "9"))}
BEAM, LONG_BEAM = RECIPES["Mix"]
MODELS = BETWEEN | {"blocks of 2 to 8": "MDC-{}-b2-4-8"}
# Rows of `tries`: a row of MODELS, which may start as ARC, and how it captions. All take the same number of steps.
TRIES = {**{f"blocks of {sizes}": (f"blocks of {sizes}", LONG_BEAM) for sizes in (2, 8, "2 to 8")},
         **{row: (row, LONG_BEAM) for row in ("Mix 25", "Mix", "Mix 75")},
         "Mix, unmasked": ("Mix", RECIPES["MDC"][-1]),
         "Mix, consensus": ("Mix", (*BEAM, "--temperature", "0.5", "--samples", "8", "--select", "consensus")),
         **{f"{row} after ARC": (row, RECIPES[row][-1]) for row in ("MDC", "Mix", "blocks of 4")}}
KINDS = ("colour", "number", "preposition", "noun", "verb")  # of hidden words
CHOSEN_BY = "CIDEr"
QUALITY = ("B@4", "METEOR", CHOSEN_BY)
OBJECTIVES = ("MDC", "ARC", "CapPa")
EPOCHS = (1, 4, 16, 64)
# The best of `photos` by validation when the archived runs of `epochs` were made.
BEST = {"MDC": ("--caption_length", "auto"), "ARC": ("--num_beams", "6")}


def run_of(scale: Scale, objective: str, locked: bool | None = None) -> Run:
    """Return the run of a row of MODELS. Its encoder is locked, by default unless the scale trains it further."""
    return Run(MODELS[objective].format(scale.backbone), scale.alt, locked=not scale.free if locked is None else locked)


def photos(scale: Scale) -> Iterator[Cell]:
    """Yield each way of decoding on validation photographs, which choose one, and on test photographs."""
    for test in scale.captioning:
        for objective, recipes in RECIPES.items():
            for flags in recipes:
                yield from caption_cells(
                    scale, f"{test.label}, {objective}, {' '.join(flags).replace('--', '') or 'greedy'}",
                    run_of(scale, objective), (*QUALITY, "words"), flags, f"{test.label}, {objective}", QUALITY,
                    where=test)


def tries(scale: Scale) -> Iterator[Cell]:
    """Yield captions of validation photographs. A run that starts as ARC takes half of its steps so."""
    for row, (objective, flags) in TRIES.items():
        run = run_of(scale, objective, locked=True)
        if row.endswith("after ARC"):
            run = run._replace(start=run_of(scale, "ARC", locked=True)._replace(epochs=0.5))
        yield from caption_cells(scale, row, run, (*QUALITY, "words"), flags)


def cloze(scale: Scale, metric: str) -> Evaluation:
    test = scale.captioning[-1]
    return Evaluation("cloze", test.root, (test.dataset,), metric)


def likelihoods(scale: Scale) -> Iterator[Cell]:
    for objective in RECIPES:
        run = run_of(scale, objective)
        columns = selections(scale, "_debiased")
        if objective != "blocks of 4":  # they would take 90 minutes of a core
            columns |= {f"hidden word{way.replace('_', ', ')}": cloze(scale, f"choice_acc{way}")
                        for way in ("", "_blind")}
        for column, evaluation in columns.items():
            yield Cell(objective, column, run, evaluation)


def words(scale: Scale) -> Iterator[Cell]:
    for kind in KINDS:
        for objective in ("MDC", "Mix", "ARC"):
            for column, metric in (("filled in", "cloze_acc_{}"), ("filled in, blind", "cloze_acc_{}_blind"),
                                   ("choice", "choice_acc_{}"), ("choice, blind", "choice_acc_{}_blind"),
                                   ("majority", "majority_acc_{}")):
                if objective != "ARC" or not column.startswith("filled"):  # it reads the words to the left only
                    yield Cell(f"{kind}, {objective}", column, run_of(scale, objective),
                               cloze(scale, metric.format(kind)), competes=False)


def towers(scale: Scale) -> Iterator[Cell]:
    """Yield captions, their likelihood, and probes of the encoder."""
    for objective in OBJECTIVES:
        for name, locked in (("locked", True), ("free", False)):
            run, row, test = run_of(scale, objective, locked), f"{objective}, {name}", scale.captioning[-1]
            yield from caption_cells(scale, row, run, QUALITY, length_flags(scale, objective), where=test)
            for column, evaluation in (selections(scale) | selections(scale, "_debiased")).items():
                yield Cell(row, column, run, evaluation)
            yield Cell(row, next(iter(scale.probes)), run, probe(scale), competes=not locked)


def epochs(scale: Scale) -> Iterator[Cell]:
    """Yield captions and the NELBO after few and many epochs."""
    for objective, flags in BEST.items():
        for number in EPOCHS:
            run = run_of(scale, objective)._replace(epochs=number)
            row = f"{objective}, {number} epoch{'s' * (number > 1)}"
            yield from caption_cells(scale, row, run, QUALITY, flags, f"{number} epochs")
            yield Cell(row, "NELBO, nats per caption", run, Evaluation(
                "log", "", ("",), "nelbo_per_caption", scale=1.0), competes=False)


def chosen(numbers: Numbers) -> dict[str, str]:
    """Return the row on test photographs of the recipe that is best on validation photographs, by objective."""
    best: dict[str, tuple[float, str]] = {}
    for cell, by_seed in numbers.items():
        split, objective, recipe = cell.row.split(", ")
        if split == "validation" and cell.column == CHOSEN_BY and by_seed:
            mean = sum(by_seed.values()) / len(by_seed)
            best[objective] = max(best.get(objective, (mean, "")), (mean, f"test, {objective}, {recipe}"))
    return {objective: row for objective, (_, row) in best.items()}


def note(scale: Scale, numbers: Numbers) -> str:
    rows = chosen(numbers).values()
    return "Chosen on validation photographs:\n\n" + "".join(f"- {row}\n" for row in rows) if rows else ""


def plot(scale: Scale, numbers: Numbers, path: Path) -> None:
    """Draw the columns of `epochs` over the number of epochs."""
    columns = {cell.column: cell.column for cell in numbers if cell.column not in ("B@4", "METEOR")}
    draw_bands(path, columns, BEST, numbers, lambda cell: cell.run.epochs, xlabel="epochs", xscale="log",
               xticks=EPOCHS, xticklabels=EPOCHS)


TABLES = {"photos": photos, "tries": tries, "likelihoods": likelihoods, "words": words, "towers": towers,
          "epochs": epochs}

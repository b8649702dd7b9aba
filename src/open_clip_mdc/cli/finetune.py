"""Fine-tune a captioner on your own photographs, and show its captions before and after on one page.

    open_clip_mdc finetune photos/ --out mine
    open_clip_mdc finetune captions_val2017.json --images val2017 --pretrained logs/RUN --out mine
    open_clip_mdc finetune photos.csv --model MDC-small-ViT-Ti-16 --pretrained-image logs/RUN --out mine

The image encoder is locked, and its patch tokens are computed once. open_clip_train trains at each of three rates, an
epoch at a time, until the NELBO of the validation captions rises. The epoch with the lowest one stays:

    OUT/params.txt, OUT/checkpoints/, OUT/out.log    a run, which every tool takes
    OUT/data/train/, OUT/data/val/                   shards of the photographs
    OUT/data/captions/                               those of val, once for each caption, for the NELBO
    OUT/index.html                                   NELBO, CIDEr and captions of val, before and after
    OUT/finetune.jsonl                               settings, and the result of each step that is done

If it was stopped, the same command resumes after the last epoch and ends with the same weights. An epoch reads a
photograph once for each of its captions, and is 16 steps or more.
"""
import argparse
import json
import os
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from clip_benchmark_ext.metrics.caption_metrics import score_captions

from .. import train
from ..data.captions import split_captions
from ..data.images import Images, batched, read_pairs
from ..errors import flag, plural
from ..integration import image_source
from ..integration.checkpoints import default_device
from ..integration.configs import is_captioner
from ..integration.patches import register
from ..integration.pretrained import PretrainedCaptioner
from ..integration.runs import PHOTO, PHOTO_MODEL, find
from ..integration.validation import nelbo
from .locked_training import begun, checkpoint, flags_of, halves, once, shards_of, unsaid, write_data_of
from .page import card, legend, shown, thumbnail, write_page
from .prepare import usable
from .prepare_layouts import Sample
from .shared import load_captioner

SETTINGS = ("paths", "images", "val", "plugin", "model", "pretrained", "pretrained_image", "epochs")
BATCH = 32  # photographs
STEPS = 16  # of an epoch, at least
RATES = ("1e-4", "3e-4", "1e-3")
SHOWN = 100  # photographs on the page
JOURNAL, TRIALS = "finetune.jsonl", "trials"  # in OUT. The latter goes at the end


# ---- where it starts


def start_of(args: argparse.Namespace) -> tuple[list[str], PretrainedCaptioner | None]:
    """Return the flags by which open_clip_train starts, and the captioner, or None for an encoder alone."""
    flags = [word for plugin in args.plugin or () for word in ("--plugin", plugin)]
    if args.pretrained_image:
        register()
        if args.pretrained != PHOTO or not args.model:
            raise ValueError("--pretrained-image needs --model, the name of the captioner to make, and no --pretrained")
        if not is_captioner(args.model):
            raise ValueError(f"--model {args.model} is no captioner: give a name such as MDC-ViT-B-32")
        image_source.check(args.pretrained_image, args.model)
        return [*flags, "--model", args.model, "--pretrained-image", args.pretrained_image], None
    loaded = load_captioner(args)
    found = find(args.pretrained, args.model)
    name = PHOTO_MODEL if args.pretrained == PHOTO else found.model_name
    if ":" in name:
        raise ValueError(f"--pretrained {args.pretrained} does not tell the name of its model: give the run, or the "
                         "file of weights by --pretrained and the name by --model")
    for setting in {"force_image_size", "force_context_length"} & found.model_args.keys():
        size = found.model_args[setting]
        flags += [flag(setting), *map(str, size if isinstance(size, list) else [size])]
    return [*flags, "--model", name, "--pretrained", args.pretrained], loaded


# ---- data


def write_data(args: argparse.Namespace, out: Path) -> dict[str, int]:
    """Write OUT/data whole, and return the numbers of photographs and of captions to train on.

    Photographs that cannot be used are listed in OUT/data/left_out.txt. Raises ValueError if too few are left.
    """
    read = halves(args.paths, args.images, args.val)

    def one_by_one() -> Iterator[Sample]:
        for _, sample in usable(read(True), []):
            yield from (sample._replace(captions=[caption]) for caption in sample.captions)

    train, val = write_data_of(args.paths, out, {"train": read(False), "val": read(True), "captions": one_by_one()})
    return {"train": len(train), "val": len(val), "captions": sum(train)}


# ---- training


def losses_of(folder: Path) -> list[float]:
    """Return the validation NELBO, nats per token, of each epoch up to the last one that was saved."""
    path = folder / "checkpoints" / "results.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    while lines and not checkpoint(folder, len(lines)).exists():
        lines.pop()
    return [json.loads(line)["nelbo_per_token"] for line in lines]


def train_at(rate: str, flags: list[str], out: Path, epochs: int) -> dict[str, float]:
    """Train until the NELBO rises, and return the lowest with its epoch. Only that epoch's checkpoint stays."""
    folder = out / TRIALS / rate
    losses = losses_of(folder)

    def keep(*kept: int) -> None:
        for epoch in {*range(1, len(losses) + 1)} - {*kept}:
            checkpoint(folder, epoch).unlink(missing_ok=True)

    while len(losses) < epochs and not (len(losses) > 1 and losses[-1] >= losses[-2]):
        with unsaid():
            train.main([*flags, "--lr", rate, "--name", rate, "--epochs", str(len(losses) + 1)])
        done, losses = len(losses), losses_of(folder)
        if len(losses) == done:
            raise ValueError(f"epoch {done + 1} has no NELBO: {folder / 'out.log'} says why")
        print(f"learning rate {rate}, epoch {len(losses)}: NELBO {losses[-1]:.3f}", flush=True)
        keep(losses.index(min(losses)) + 1, len(losses))
    best = losses.index(min(losses)) + 1
    keep(best)
    return {"nelbo": losses[best - 1], "epoch": best}


# ---- before and after


class Measured(NamedTuple):
    """Figures and captions of the validation photographs by one captioner."""

    nelbo: float  # nats per token of their captions
    cider: str  # a number, or why there is none
    rows: dict[str, dict]  # caption and tokens by photograph (`pretrained.describe_captions`)
    thumbnails: dict[str, str]  # by photograph, the small image for the page


def measure(loaded: PretrainedCaptioner, out: Path) -> Measured:
    """Measure a captioner on OUT/data. Its captions are those of `open_clip_mdc caption`."""
    pairs = batched(read_pairs(shards_of(out, "captions"), loaded.transform, loaded.tokenizer), BATCH)
    loss = nelbo(loaded.model, pairs, loaded.device)["nelbo_per_token"]
    rows, references, thumbnails = {}, {}, {}
    photographs = Images(list(map(Path, shards_of(out, "val"))), loaded.to_bytes, BATCH, thumbnail=thumbnail)
    for batch in photographs.loader(0):
        rows |= zip(batch.names, loaded.trace(loaded.from_bytes(batch.image)), strict=True)
        references |= zip(batch.names, map(split_captions, batch.texts), strict=True)
        thumbnails |= zip(batch.names, batch.thumbnails, strict=True)
    scored = score_captions({name: row["caption"] for name, row in rows.items()}, references, ["CIDEr"])
    cider = f"{scored.scores['CIDEr']:.3f}" if scored.scores else f"none, as {scored.missing['CIDEr']}"
    return Measured(loss, cider, rows, thumbnails)


def write_result(args: argparse.Namespace, counts: dict[str, int], chosen: dict, both: dict[str, Measured]) -> None:
    """Write OUT/index.html: NELBO, CIDEr and captions of each in `both`, "before" and "after" or the latter alone."""
    page = Path(args.out, "index.html")
    facts = {"Start": shown(args.pretrained_image or args.pretrained, page), "Trained on": plural(
        counts["train"], "photograph"), "Validated on": plural(counts["val"], "photograph"),
        "Learning rate": chosen["id"], "Epochs": str(chosen["epoch"]),
        "NELBO, nats per token": ", ".join(f"{found.nelbo:.3f} {when}" for when, found in both.items()),
        "CIDEr": ", ".join(f"{found.cider} {when}" for when, found in both.items())}
    cards = []
    for name, image in islice(both["after"].thumbnails.items(), SHOWN):
        rows = [{**found.rows[name], "image": when} for when, found in both.items()]
        cards.append(card(rows[0], image, *rows[1:]))
    write_page(page, f"Captions {' and '.join(both)} fine-tuning", facts, legend(), cards, [])


def run(args: argparse.Namespace) -> None:
    """Write OUT. Raises ValueError for bad input, before anything is trained."""
    flags, start = start_of(args)
    out = Path(args.out)
    with begun(out, JOURNAL, args, SETTINGS) as journal:
        counts, device = once(journal, "data", write_data, args, out), default_device()
        batch = min(BATCH, counts["train"])
        print(f"{counts['train']} photographs to train on, {counts['val']} to validate on", flush=True)
        flags += [*flags_of(out, out / TRIALS, max(counts["captions"], STEPS * batch), batch, device),
                  "--val-data", "::".join(shards_of(out, "captions")), "--lr-scheduler", "const", "--warmup", "10"]
        trained = [once(journal, rate, train_at, rate, flags, out, args.epochs) for rate in RATES]
        chosen = min(trained, key=lambda row: row["nelbo"])
        for name in ("params.txt", "out.log", "checkpoints"):
            if (part := out / TRIALS / chosen["id"] / name).exists():
                os.replace(part, out / name)
        shutil.rmtree(out / TRIALS, ignore_errors=True)
        tuned = load_captioner(argparse.Namespace(**{**vars(args), "pretrained": str(out.absolute()), "model": None}))
        both = {"before": measure(start, out)} if start else {}
        both["after"] = measure(tuned, out)
        write_result(args, counts, chosen, both)
        for when, found in both.items():
            print(f"{when + ':':7} NELBO {found.nelbo:.3f} nats per token, CIDEr {found.cider}")
        if start and both["after"].nelbo >= both["before"].nelbo:
            print("Training made it no better on the validation photographs: give more of them, or keep the start")
        elif chosen["epoch"] == args.epochs:
            print(f"The NELBO still fell in the last epoch: give more than --epochs {args.epochs}")
        print(f"{out}: a run for --pretrained. {out / 'index.html'}: captions {' and '.join(both)}")

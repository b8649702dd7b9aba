"""Say on one page what a frozen image encoder knows: train a small decoder on it, and measure both.

    open_clip_mdc card timm:tf_efficientnet_lite0 photos/ --out card
    open_clip_mdc card encoder.safetensors photos.csv --model ARC-small-timm-tf_efficientnet_lite0 --out card
    open_clip_mdc card logs/RUN captions_val2017.json --images val2017 --probe animals/ --out card

The protocol is that of LiT-decoder (arXiv 2303.17376) and CapPa's Table 2 (2306.07915): the encoder is locked, and a
decoder learns to caption from its patch tokens. The same decoder learns from two floors: the architecture with random
weights ("random"), and the image in patches of 32 x 32 pixels without a network ("pixels").

    OUT/index.html, OUT/card.json    the table, and captions of each decoder
    OUT/captioner/                   the encoder with its decoder, exported for OpenCLIP
    OUT/results/                     result files of clip_benchmark eval, by row and probe
    OUT/data/                        train, test, gallery (retrieval) and pairs, all made from your photographs
    OUT/card.jsonl                   settings, and each part that is done

If it was stopped, the same command resumes: parts that are done are kept, and a training resumes after its last epoch.
"""
import argparse
import re
import shutil
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import open_clip
from tqdm import tqdm

from clip_benchmark_ext import cli as benchmark
from clip_benchmark_ext import foreign_datasets
from clip_benchmark_ext.datasets import masks, pairs
from clip_benchmark_ext.datasets.known import MASKED

from .. import train
from ..data.files import write_json
from ..data.journal import Journal
from ..integration import image_source
from ..integration.checkpoints import default_device, objective
from ..integration.configs import is_captioner
from ..integration.patches import register
from ..objectives.registry import OBJECTIVES
from ..progress import progress_bar
from . import export, prepare
from .card_page import ROWS, measures, write_card
from .locked_training import begun, checkpoint, flags_of, halves, once, shards_of, unsaid, write_data_of
from .prepare_layouts import read_shards

SETTINGS = ("encoder", "paths", "images", "image_size", "test", "model")
BATCH, EPOCHS = 64, 4
CAPTIONS = 20_000, 120_000  # the fewest and the most that a training reads. Between them it is EPOCHS times all
MOST_TESTED, GALLERY = 1000, 100  # photographs
PIXELS = {"image_size": 224, "layers": 0, "width": 768, "patch_size": 32}  # a ViT without a block
LENGTH = 16  # of a training on the progress bar, where an evaluation counts as 1
JOURNAL, WORK = "card.jsonl", "work"  # in OUT. The latter goes at the end


class Evaluation(NamedTuple):
    """A call of `clip_benchmark eval`, and its name in the journal."""

    name: str
    task: str
    root: Path  # of the data sets
    datasets: list[str]
    flags: tuple[str, ...] = ()


# ---- what there is to do


def model_of(args: argparse.Namespace) -> str:
    """Return the captioner to make. Raises ValueError if the encoder does not fit it, or is not known well enough."""
    register()
    try:
        base = image_source.locate(args.encoder).base
        name = args.model or (base if base is None or is_captioner(base) else f"MDC-small-{base}")
        if not name:
            raise ValueError(f"{args.encoder} does not tell its architecture: give --model, such as "
                             "MDC-small-timm-tf_efficientnet_lite0")
        if not is_captioner(name):
            raise ValueError(f"--model {name} is no captioner: give a name such as MDC-small-ViT-B-32")
        if not OBJECTIVES[objective(name)].scorers:
            raise ValueError(f"--model {name} can only fill in words: give one that writes captions, as MDC does")
        image_source.check(args.encoder, name, image_size=args.image_size)
    except ValueError as problem:
        raise ValueError(str(problem).replace("--pretrained-image ", "")) from problem
    return name


def starts(args: argparse.Namespace, model: str, work: Path) -> dict[str, list[str]]:
    """Return the flags of open_clip_train by which each row starts. The decoder has the same size in all of them."""
    size = ["--force-image-size", str(args.image_size)] if args.image_size else []
    told = image_source.normalization(args.encoder, model)
    images = [word for name, value in told.items() for word in (
        f"--image-{name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value]))]
    config = deepcopy(open_clip.get_model_config(model)) | {"embed_dim": PIXELS["width"], "vision_cfg": PIXELS}
    work.mkdir(parents=True, exist_ok=True)
    write_json(work / "pixels.json", config)
    open_clip.add_model_config(work / "pixels.json")
    return {"encoder": ["--model", model, "--pretrained-image", args.encoder, *size],
            "random": ["--model", model, *size, *images], "pixels": ["--model", "pixels"]}


def probe(folder: str) -> Evaluation:
    """Return the evaluation of a folder of classes or masks. Raises ValueError or OSError if it cannot be read."""
    root = Path(folder).absolute()
    task, dataset = "probe", "folder"
    if root.name in MASKED or (root / "train.tar").exists():
        task, dataset = "segmentation", root.name if root.name in MASKED else "masks"
        for split in ("train", "test"):
            masks.build(dataset, folder, split, None)
    elif (root / "train" / "nshards.txt").exists():
        dataset = f"wds/{root.name}"
    else:
        for split in ("train", "test"):
            foreign_datasets.class_folders(folder, split, None, seed=0)
    return Evaluation(f"probe {root}", task, root, [dataset])


def evaluations(model: str, out: Path, found: list[str]) -> list[Evaluation]:
    """Return what the decoder of each row is asked. `found` are the kinds of pairs that the captions give."""
    known, data = OBJECTIVES[objective(model)], out / "data"
    repeats = ("--repeats", "avoid") * (known.order == "any")
    shortlist = ("--shortlist", "10") * ("parallel" in known.scorers)
    asked = (Evaluation("captions", "captioning", data, ["wds/data"], ("--caption_length", "auto", *repeats)),
             Evaluation("cloze", "cloze", data, ["wds/data"]),
             Evaluation("pairs", "image_caption_selection", data / "pairs", [f"sugar_crepe/{kind}" for kind in found]),
             Evaluation("retrieval", "zeroshot_retrieval", data / "gallery", ["wds/gallery"],
                        ("--recall_k", "1", *shortlist)))
    return [one for one in asked if one.datasets]


# ---- doing it


def write_data(args: argparse.Namespace, out: Path) -> dict:
    """Write OUT/data whole, and return numbers of photographs, of captions, and of pairs by kind."""
    read = halves(args.paths, args.images, args.test, MOST_TESTED)
    trained, tested = write_data_of(args.paths, out, {"train": read(False), "test": read(True)})
    shards = shards_of(out, "test")
    with unsaid():
        prepare.write(str(out / "data" / "gallery"), {"test": islice(read_shards(shards, "captions"), GALLERY)}, [],
                      join=False, skip=True)
    return {"train": len(trained), "test": len(tested), "captions": sum(trained),
            "pairs": pairs.write_pairs(shards, out / "data" / "pairs")}


def train_row(row: str, flags: list[str], counts: dict, out: Path, bar: tqdm) -> None:
    """Train a decoder with a cosine schedule, and export the encoder's. The cached tokens, which may be large, go."""
    work, device, first = out / WORK, default_device(), bar.n
    weights, captioner = checkpoint(work / row, EPOCHS), out / "captioner"
    batch = min(BATCH, counts["train"])
    fewest, most = CAPTIONS
    samples = max(batch, min(max(EPOCHS * counts["captions"], fewest), most) // EPOCHS)
    steps = EPOCHS * samples // batch

    def heard(line: str) -> None:
        if found := re.match(r"Train Epoch: (\d+) \[ *(\d+)/(\d+)", line):
            epoch, done, of = map(int, found.groups())
            bar.update(first + int(LENGTH * (epoch + done / of) / EPOCHS) - bar.n)

    with unsaid(heard):
        if not weights.exists():
            train.main([*flags, *flags_of(out, work, samples, batch, device), "--name", row, "--lr", "1e-3", "--epochs",
                        str(EPOCHS), "--warmup", str(steps // 12), "--log-every-n-steps", "10",
                        "--delete-previous-checkpoint"])
    if not weights.exists():
        raise ValueError(f"the training ended early: {work / row / 'out.log'} says why")
    shutil.rmtree(work / "tokens", ignore_errors=True)
    bar.update(first + LENGTH - bar.n)
    if row == "encoder":
        shutil.rmtree(captioner, ignore_errors=True)
        with unsaid():
            export.run(argparse.Namespace(pretrained=str(work / row), model=None, to=["open_clip"], half=False,
                                          about=None, results=[], out=str(captioner), push=None))


def evaluate(one: Evaluation, row: str, model: list[str], out: Path, bar: tqdm) -> None:
    """Write the result files OUT/results/ROW/DATASET-TASK.json of a model by its flags."""
    cpu = ["--no_amp"] * (default_device() == "cpu")
    with unsaid():
        benchmark.main([
            "eval", *model, "--dataset", *one.datasets, "--dataset_root", str(one.root), "--task", one.task, *one.flags,
            "--output", str(out / "results" / row / f"{{dataset}}-{one.task}.json"), "--skip_existing", "--quiet",
            "--feature_root", str(out / WORK / "features"), "--num_workers", "0", *cpu])
    bar.update(1)


def fill(args: argparse.Namespace, out: Path, model: str, probes: list[Evaluation], journal: Journal) -> None:
    """Take each part that the journal does not have."""
    counts = once(journal, "data", write_data, args, out)
    print(f"{counts['train']} photographs to train on, {counts['test']} to test on", flush=True)
    asked = evaluations(model, out, list(counts["pairs"]))
    calls = [f"{row} {one.name}" for row in ROWS for one in asked] + [one.name for one in probes]
    parts = {f"{row} decoder": LENGTH for row in ROWS} | dict.fromkeys(calls, 1)
    done = sum(length for name, length in parts.items() if name in journal)
    with progress_bar(total=sum(parts.values()), what="card", unit="part", initial=done) as bar:
        for row, flags in starts(args, model, out / WORK).items():
            once(journal, f"{row} decoder", train_row, row, flags, counts, out, bar)
            made = ["--model", flags[1], "--pretrained", str(checkpoint(out / WORK / row, EPOCHS))]
            for one in asked:
                once(journal, f"{row} {one.name}", evaluate, one, row, made, out, bar)
        made = ["--model", objective(model), "--pretrained", str(out / "captioner")]
        for one in probes:  # not noted: a folder may have the name of an earlier one. A result of the same data is kept
            evaluate(one, f"probes/{one.root.name}", made, out, bar)


def run(args: argparse.Namespace) -> None:
    """Write OUT. Raises ValueError for bad input, before anything is trained."""
    out = Path(args.out)
    args.model = model_of(args)
    probes = [probe(folder) for folder in args.probe]
    if len({one.root.name for one in probes}) < len(probes):
        raise ValueError("--probe: two folders have the same name, by which the table calls them: rename one")
    with begun(out, JOURNAL, args, SETTINGS) as journal:
        fill(args, out, args.model, probes, journal)
        counts = {name: count for name, count in journal["data"].items() if name != "id"}
    rows = measures(out / "results")
    write_json(out / "card.json", {"encoder": args.encoder, "model": args.model, **counts, "measures": rows})
    print(write_card(args, out, counts, rows))
    shutil.rmtree(out / WORK, ignore_errors=True)
    print(f"{out / 'index.html'}: the table with captions. {out / 'captioner'}: the captioner, for --pretrained")

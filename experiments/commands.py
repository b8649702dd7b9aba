"""Build the commands of an experiment: data, training, evaluation. Nothing is run here."""
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path

from .tables.cells import Cell, Evaluation, Run, Trained
from .tables.paper_tables import systems
from .tables.scale import Captioning, Made, Place, Scale

JUDGE = "Qwen/Qwen2.5-VL-72B-Instruct"  # the paper's


def start(command: Iterable[str], place: Place) -> list[str]:
    """Return a command of scales.py with the environment's programs. FOLDER/*.tar becomes the one shard there."""
    first, *rest = (place.fill(part) for part in command)
    rest = [str(next(Path(part[:-len("*.tar")]).glob("*.tar"), part)) if part.endswith("/*.tar") else part
            for part in rest]
    return [f"{place.bin}{first}", *rest]


def to_make(scale: Scale, names: Iterable[str], place: Place) -> Iterator[Made]:
    for made in scale.prepare:
        if (not made.tables or set(made.tables) & set(names)) and not Path(place.fill(made.folder)).exists():
            yield made


def folder(run: Run, seed: int, place: Place) -> Path:
    return place.out / "runs" / run.name(seed)


def last_epoch(scale: Scale, run: Run) -> int:
    return 1 if run.untrained else scale.tuning.epochs if run.start else int(scale.epochs * run.epochs)


def checkpoint_epoch(scale: Scale, run: Run) -> int:
    return run.at or last_epoch(scale, run)


def checkpoint(scale: Scale, run: Run, seed: int, place: Place) -> Path:
    return folder(run, seed, place) / "checkpoints" / f"epoch_{checkpoint_epoch(scale, run)}.pt"


def train(scale: Scale, run: Run, seed: int, place: Place) -> list[str]:
    backbone = next(backbone for name, backbone in scale.backbones.items() if name in run.model)
    data = scale.data[run.data]
    lr, decay, batch, epochs = scale.tuning if run.start else (
        run.rate or backbone.lr, backbone.weight_decay, scale.batch * run.batches, last_epoch(scale, run))
    samples, lr = (batch, 0.0) if run.untrained else (data.samples, lr)
    processes, accumulate = max(place.gpus, 1), 1 if run.start else backbone.accumulate
    workers = min(scale.workers, data.count(place) // processes)  # each worker needs a shard
    if batch % (processes * accumulate):
        raise ValueError(f"a batch of {batch} cannot be shared by GPUS={place.gpus}, {accumulate} steps each")
    if not workers:
        raise ValueError(f"{data.pattern(place)} has fewer shards than GPUS={place.gpus}")
    command = place.launch("open_clip_mdc.train", "open_clip_train")
    command += ["--model", run.model, "--train-data", data.pattern(place),
                "--dataset-type", "webdataset", "--train-num-samples", str(samples),
                "--batch-size", str(batch // processes // accumulate), "--workers", str(workers),
                "--lr", str(lr), "--wd", str(decay), "--epochs", str(epochs),
                "--warmup", str(min(scale.warmup, samples // batch * epochs // 10))]
    first = checkpoint(scale, run.start, seed, place) if isinstance(run.start, Run) else run.start
    for wanted, *flags in (
            (accumulate > 1, "--accum-freq", accumulate), (run.size, "--force-image-size", run.size),
            (first, "--pretrained", first), (run.locked, "--lock-image"),
            (scale.image and not first, "--pretrained-image", place.fill(scale.image)),
            (scale.image, "--cache-features", place.out / "tokens", *(() if run.locked else scale.free)),
            ("-VQ-" in run.model, "--pretrained", place.fill("{out}/data/vq.pt")),
            # Only where bounds are compared, as validation costs time.
            (scale.val and not run.untrained and (scale.caption_epochs in (1, run.epochs) or "-VQ-" in run.model),
             "--val-data", place.fill(scale.val)),
            # CoCa is trained by its caption loss alone, like the other captioners.
            (run.model.startswith("coca_"), "--coca-contrastive-loss-weight", 0, "--coca-caption-loss-weight", 1),
            (run.model == "ARC-ViT-L-14" and run.data == "cc12m", "--grad-clip-norm", "1.0"),  # Table 8
            # The noise of the loss (Section 4.3) is measured from every tenth step.
            (place.gpus == 0, "--device", "cpu", "--log-every-n-steps", 10)):
        command += map(str, flags if wanted else ())
    return command + [*scale.train_flags, "--seed", str(seed), "--logs", str(place.out / "runs"),
                      "--name", run.name(seed), "--resume", "latest",
                      *(() if scale.curve else ("--delete-previous-checkpoint",))]


def recipe(scale: Scale, run: Run, seed: int) -> str:
    """Return the content of command.txt beside a run: its command on one GPU, after that of the run it starts from."""
    here = Place(Path("{data}"), Path("{out}"), "", 1)
    first = recipe(scale, run.start, seed) if isinstance(run.start, Run) else ""
    return first + shlex.join(train(scale, run, seed, here)) + "\n"


def changed(scale: Scale, run: Run, seed: int, place: Place) -> str | None:
    path = folder(run, seed, place) / "command.txt"
    if not path.parent.exists():
        return None
    if not path.exists():  # an empty folder was killed before it wrote anything, and counts as unchanged
        return "it has no command.txt" if any(path.parent.rglob("*.*")) else None
    old, new = shlex.split(path.read_text(encoding="utf-8")), shlex.split(recipe(scale, run, seed))
    unlike = [(before, after) for before, after in zip_longest(old, new, fillvalue="nothing") if before != after]
    return f"{unlike[0][0]}, now {unlike[0][1]}" if unlike else None


def check_recipes(scale: Scale, runs: Iterable[Run], seeds: Iterable[int], place: Place) -> None:
    unlike = [(run.name(seed), why) for run in runs for seed in seeds if (why := changed(scale, run, seed, place))]
    if unlike:
        name, why = unlike[0]
        raise ValueError(f"{len(unlike)} runs in {place.out / 'runs'} were trained by other commands than today's, "
                         f"such as {name} ({why}): remove their folders or give another --out")


def variant(evaluation: Evaluation) -> str:
    flags = (re.sub(r"[^\w.-]+", "_", flag.removeprefix("--")) for flag in evaluation.flags)
    return "-".join([evaluation.task, *flags, *(["clipscore"] if evaluation.clipscore else [])])


def evaluated(scale: Scale, runs: Iterable[Run], seeds: Iterable[int], place: Place,
              unfinished: set[Trained]) -> list[Trained]:
    """Return the runs to evaluate, with their seeds: all but finished ones whose checkpoint was deleted."""
    return [(run, seed) for run in runs for seed in seeds
            if (run._replace(at=None), seed) in unfinished or checkpoint(scale, run, seed, place).exists()]


def evaluate(scale: Scale, evaluation: Evaluation, runs: list[Trained], place: Place) -> list[str]:
    seeds = [seed for _, seed in runs]
    trained = [str(checkpoint(scale, run, seed, place)) for run, seed in runs]
    root, folder = place.fill(evaluation.root), place.out / "results" / variant(evaluation)
    if evaluation.task == "contexts":
        return [f"{place.bin}python", "-m", "experiments.mentions", "--pretrained", *trained,
                "--name", *evaluation.datasets, "--data", root, "--out", str(folder)]
    if evaluation.task == "sentences":
        sighted = [str(checkpoint(scale, evaluation.guide or run.start, seed, place)) for run, seed in runs]
        return [f"{place.bin}python", "-m", "experiments.sentences", "--pretrained", *sighted, "--blind", *trained,
                "--data", root, "--out", str(folder)]
    models = [f"{run.model},{path}" for (run, _), path in zip(runs, trained, strict=True)]
    command = place.launch("clip_benchmark_ext.cli", "clip_benchmark") + ["eval"]
    command += ["--distributed"] if place.gpus > 1 else []
    flags = [place.fill(flag) for flag in evaluation.flags]
    if evaluation.guide:
        flags += ["--clip", f"{evaluation.guide.model}:{checkpoint(scale, *helping(evaluation, seeds)[0], place)}"]
    if evaluation.clipscore:
        flags += ["--clipscore_model", evaluation.clipscore.model,
                  "--clipscore_pretrained", str(checkpoint(scale, *helping(evaluation, seeds)[-1], place))]
    output = folder / "{dataset}-{pretrained_full_path}.json"
    return command + ["--pretrained_model", *models, "--dataset", *evaluation.datasets,
                      "--dataset_root", root, "--task", evaluation.task, *flags,
                      "--feature_root", str(place.out / "features"), "--output", str(output), "--skip_existing",
                      *scale.eval_flags]


def evaluations(cells: Iterable[Cell]) -> list[tuple[Evaluation, list[Run]]]:
    # Data sets in one folder that are evaluated with the same flags share a command.
    found: dict[Evaluation, tuple[dict[str, None], dict[Run, None]]] = {}
    for cell in cells:
        key = cell.evaluation._replace(datasets=(), metric="", scale=1.0, weight=None, sizes=())
        if key.task not in ("judge", "log"):
            datasets, runs = found.setdefault(key, ({}, {}))
            datasets |= dict.fromkeys(cell.evaluation.datasets)
            runs[cell.run] = None
    return [(key._replace(datasets=tuple(datasets)), list(runs)) for key, (datasets, runs) in found.items()]


def helping(evaluation: Evaluation, seeds: Iterable[int]) -> list[Trained]:
    """Return the further runs of an evaluation: `guide` of the same seed, and `clipscore` of the next one."""
    return list(dict.fromkeys((run, seed + later) for run, later in ((evaluation.guide, 0), (evaluation.clipscore, 1))
                              if run for seed in seeds))


def caption_file(scale: Scale, captioning: Captioning, system: str, seed: int, place: Place) -> Path:
    run, flags = systems(scale, captioning)[system]
    name = f"{captioning.dataset.removeprefix('wds/')}-{checkpoint(scale, run, seed, place)}.json".replace("/", "_")
    return place.out / "results" / variant(Evaluation("captioning", "", (), "", flags)) / "captions" / name


def judge(scale: Scale, captioning: Captioning, seed: int, place: Place, url: str) -> list[str]:
    tests = Path(place.fill(captioning.root)) / "test"
    shards = max(1, len(list(tests.glob("*.tar"))))
    answers = place.out / "results" / "judge" / f"{captioning.label}--s{seed}.jsonl"
    return [f"{place.bin}python", "-m", "experiments.judge", "--captions",
            *(f"{system}={caption_file(scale, captioning, system, seed, place)}"
              for system in systems(scale, captioning)),
            "--images", f"{tests}/{{0..{shards - 1}}}.tar", "--out", str(answers), "--url", url,
            "--model", os.environ.get("JUDGE_MODEL", JUDGE)]


def page(scale: Scale, run: Run, seed: int, place: Place) -> list[str]:
    """Return the command that captions 50 test photographs: ARC's into a file, MDC's into a page beside ARC's."""
    arc, mdc = (str(place.out / "tables" / f"photos-{objective}.jsonl") for objective in ("ARC", "MDC"))
    return [f"{place.bin}open_clip_mdc", "caption", "--pretrained", str(checkpoint(scale, run, seed, place)),
            f"{place.fill(scale.captioning[-1].root)}/test/0.tar", "--limit", "50",
            *(("--out", arc) if run.model.startswith("ARC-") else
              ("--out", mdc, "--compare", arc, "--html", str(place.out / "tables" / "photos.html")))]


def lengths(scale: Scale, place: Place) -> list[str]:
    data = [scale.data[name] for name in dict.fromkeys((scale.search, scale.alt, scale.long))]
    return [f"{place.bin}python", "-m", "experiments.lengths", *(d.pattern(place) for d in data),
            "--names", *(d.label for d in data), "--tokenizer", f"MDC-{scale.backbone}",
            "--out", str(place.out / "tables" / "figure3.png")]


def collect(scale: Scale, names: Iterable[str], place: Place) -> list[str]:
    return [f"{place.bin}python", "-m", "experiments.report.collect", *names, "--scale", scale.name,
            "--data", str(place.data), "--out", str(place.out)]

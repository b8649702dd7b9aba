"""The commands of an experiment: data, training, evaluation. Nothing is run here."""
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from scales import Scale
from tables import Cell, Evaluation, Run

FINE_TUNING = ("--lr", "5e-5", "--wd", "0.1", "--warmup", "500", "--epochs", "10")  # ours: the paper does not say
FINE_TUNING_EPOCHS = 10


class Place(NamedTuple):
    """Where things are and how they are started."""

    data: Path
    out: Path
    bin: str  # folder of open_clip_train and its siblings with a slash, or nothing
    gpus: int  # 0 is the CPU

    def launch(self, module: str, script: str) -> list[str]:
        if self.gpus > 1:
            return [f"{self.bin}torchrun", "--nproc_per_node", str(self.gpus), "-m", module, "--"]
        return [f"{self.bin}{script}"]


def fill(path: str, place: Place) -> str:
    """A path of scales.py with its folders."""
    return path.format(data=place.data, out=place.out)


def start(command: Iterable[str], place: Place) -> list[str]:
    """A command of scales.py, started from the environment's programs."""
    first, *rest = (fill(part, place) for part in command)
    return [f"{place.bin}{first}", *rest]


def final_epoch(scale: Scale, run: Run) -> int:
    return FINE_TUNING_EPOCHS if run.start else scale.epochs


def checkpoint(scale: Scale, run: Run, seed: int, place: Place) -> Path:
    return place.out / "runs" / run.name(seed) / "checkpoints" / f"epoch_{final_epoch(scale, run)}.pt"


def train(scale: Scale, run: Run, seed: int, place: Place) -> list[str]:
    """`open_clip_train` with the paper's hyperparameters (Tables 6 to 8) or a small scale's.

    Raises:
        ValueError: the global batch cannot be shared by so many processes.
    """
    backbone = next(backbone for name, backbone in scale.backbones.items() if name in run.model)
    data = scale.data[run.data]
    processes = max(place.gpus, 1) * backbone.accumulate
    if scale.batch * run.batches % processes:
        raise ValueError(f"a batch of {scale.batch * run.batches} cannot be shared by GPUS={place.gpus}, "
                         f"{backbone.accumulate} steps each")
    command = place.launch("open_clip_mdc.train", "open_clip_train")
    command += ["--model", run.model, "--train-data", data.pattern(place.data, place.out),
                "--dataset-type", "webdataset", "--train-num-samples", str(data.samples),
                "--batch-size", str(scale.batch * run.batches // processes)]
    if backbone.accumulate > 1:
        command += ["--accum-freq", str(backbone.accumulate)]
    if run.start:
        command += ["--pretrained", str(checkpoint(scale, run.start, seed, place)), *FINE_TUNING]
    else:
        command += ["--lr", str(backbone.lr), "--wd", str(backbone.weight_decay), "--warmup", str(scale.warmup),
                    "--epochs", str(scale.epochs)]
    if run.model == "ARC-ViT-L-14" and run.data == "cc12m":
        command += ["--grad-clip-norm", "1.0"]  # Table 8
    if place.gpus == 0:
        command += ["--device", "cpu"]
    return command + [*scale.train_flags, "--seed", str(seed), "--logs", str(place.out / "runs"),
                      "--name", run.name(seed), "--resume", "latest", "--delete-previous-checkpoint"]


def variant(evaluation: Evaluation) -> str:
    """Folder of an evaluation's results, by which they are recognised: the task and what else was asked for."""
    return "-".join([evaluation.task, *(flag.strip("-") for flag in evaluation.flags)])


def evaluate(scale: Scale, evaluation: Evaluation, runs: Iterable[Run], seeds: Iterable[int],
             place: Place) -> list[str]:
    """One `clip_benchmark eval` for all runs; it skips what has a result already."""
    models = [f"{run.model},{checkpoint(scale, run, seed, place)}" for run in runs for seed in seeds]
    command = place.launch("clip_benchmark_ext.cli", "clip_benchmark") + ["eval"]
    command += ["--distributed"] if place.gpus > 1 else []
    output = place.out / "results" / variant(evaluation) / "{dataset}-{pretrained_full_path}.json"
    return command + ["--pretrained_model", *models, "--dataset", *evaluation.datasets,
                      "--dataset_root", fill(evaluation.root, place), "--task", evaluation.task, *evaluation.flags,
                      "--feature_root", str(place.out / "features"), "--output", str(output), "--skip_existing",
                      *scale.eval_flags]


def evaluations(cells: Iterable[Cell]) -> list[tuple[Evaluation, list[Run]]]:
    """What is evaluated by which runs: all data sets that lie in one folder and are scored alike in one command."""
    runs: dict[tuple, dict[Run, None]] = {}
    datasets: dict[tuple, dict[str, None]] = {}
    for cell in cells:
        key = (cell.evaluation.task, cell.evaluation.root, cell.evaluation.flags)
        runs.setdefault(key, {})[cell.run] = None
        datasets.setdefault(key, {}).update(dict.fromkeys(cell.evaluation.datasets))
    return [(Evaluation(task, root, tuple(datasets[task, root, flags]), "", flags), list(runs[task, root, flags]))
            for task, root, flags in runs]


def lengths(scale: Scale, place: Place) -> list[str]:
    """Figure 3."""
    data = [scale.data[name] for name in dict.fromkeys((scale.search, scale.alt, scale.long))]
    return [f"{place.bin}open_clip_mdc", "lengths", *(d.pattern(place.data, place.out) for d in data),
            "--names", *(d.label for d in data), "--tokenizer", f"MDC-{scale.backbone}",
            "--out", str(place.out / "tables" / "figure3.png")]


def collect(scale: Scale, names: Iterable[str], place: Place) -> list[str]:
    """The tables, from what is there."""
    return [f"{place.bin}python", "experiments/collect.py", *names, "--scale", scale.name, "--data", str(place.data),
            "--out", str(place.out)]

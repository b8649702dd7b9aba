"""SIGKILL at random moments: if the command is run again, it ends with the result of an undisturbed run.

A case is a command that is killed at moments drawn uniformly over the duration of the undisturbed run. It is started
again, killed again, and at last left to finish. Only the process itself is killed, not those that it started.
"""
import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import process
import torch
from process import TIMEOUT, Outcome
from safetensors.torch import load_file
from world import CLIP_BENCHMARK, MDC, RECAP, REPO, TRAIN, Cases, World, check_json, first, train_flags, tree, unlike

from open_clip_mdc.data.weights import hash_tensor

KILLS_OF_A_LIFE = 5  # at most


class Job(NamedTuple):
    """A command, given in a folder of its own with relative paths, and what it leaves there that must be equal."""

    main: Callable
    argv: Callable[[World], list]
    result: Callable[[Path], dict]


def digest(value: object) -> str:
    """Return a digest of the content of a checkpoint."""
    found = hashlib.sha256()

    def add(value: object) -> None:
        if isinstance(value, torch.Tensor):
            hash_tensor(found, value)
        elif isinstance(value, dict):
            for key, item in value.items():
                found.update(repr(key).encode())
                add(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            found.update(repr(value).encode())
    add(value)
    return found.hexdigest()


def checkpoints(folder: Path) -> dict:
    """Return training's outputs without its log: weights, optimizer and epoch of each checkpoint, validation rows."""
    found = {str(path.relative_to(folder)): digest(torch.load(path, weights_only=True))
             for path in folder.rglob("*.pt") if not path.name.startswith(".")}
    return found | {path.name: path.read_text() for path in folder.rglob("results.jsonl")}


def experiment(argv: list[str]) -> None:
    """experiments/run.py: two rows of Table 5 on few scenes, with what belongs to a machine left as it is."""
    sys.path[:0] = [str(REPO)]
    from experiments import run
    from experiments.tables import paper_tables as tables
    from experiments.tables import scales
    from experiments.tables.scales import SCENES
    scales.SCALES["scenes"] = SCENES._replace(
        data={key: data._replace(folder="{data}/train", samples=96) for key, data in SCENES.data.items()},
        probe_root="{data}/probe", prepare=(), warmup=1)
    tables.TABLES["table5"] = lambda scale: list(tables.table5(scale))[2:]
    run.main(argv)


def experiment_result(folder: Path) -> dict:
    return checkpoints(folder / "out" / "runs") | tree(folder / "out" / "results") | tree(folder / "out" / "tables")


def out(folder: Path) -> dict:
    return tree(folder / "out")


def probed(folder: Path) -> dict:
    """Features by their numbers: safetensors orders metadata at random."""
    features = {path.name: digest(load_file(path)) for path in folder.rglob("*.safetensors")}
    return {name: value for name, value in out(folder).items() if not name.endswith(".safetensors")} | features


JOBS = {
    "train-csv": Job(
        TRAIN, lambda w: train_flags("--train-data", w.csv, "--val-data", w.csv, "--batch-size", 12, "--epochs", 3,
                                     "--resume", "latest", logs=Path("out")),
        lambda folder: checkpoints(folder / "out")),
    "train-webdataset": Job(
        TRAIN, lambda w: train_flags("--train-data", w.shards, "--dataset-type", "webdataset", "--train-num-samples",
                                     256, "--val-data", w.scenes / "val" / "00000.tar", "--batch-size", 32, "--epochs",
                                     3, "--workers", 1, "--resume", "latest", "--delete-previous-checkpoint",
                                     logs=Path("out")),
        lambda folder: checkpoints(folder / "out")),
    "train-most-recent": Job(
        TRAIN, lambda w: train_flags("--train-data", w.csv, "--batch-size", 12, "--epochs", 4, "--resume", "latest",
                                     "--save-most-recent", "--save-frequency", 0, logs=Path("out")),
        lambda folder: checkpoints(folder / "out")),
    "probe": Job(
        CLIP_BENCHMARK, lambda w: [
            "eval", "--model", "mdc", "--pretrained", w.run, "--dataset", "wds/probe", "--dataset_root",
            w.scenes / "probe", "--task", "linear_probe", "--feature_root", "out/features", "--output",
            "out/probe.json", "--num_workers", 0, "--no_amp", "--quiet", "--batch_size", 8, "--skip_existing"],
        probed),
    "caption": Job(
        MDC, lambda w: ["caption", "--pretrained", w.run, "--device", "cpu", "--workers", 1, w.images,
                        w.scenes / "train" / "00000.tar", "--batch-size", 8, "--temperature", 1, "--out",
                        "captions.jsonl", "--html", "captions.html"],
        tree),
    "caption-shards": Job(
        MDC, lambda w: ["caption", "--pretrained", w.run, "--device", "cpu", "--workers", 1, w.shards, "--batch-size",
                        8, "--temperature", 1, "--out", "out", "--jobs", 2],
        out),
    "score-shards": Job(
        MDC, lambda w: ["score", "--pretrained", w.run, "--device", "cpu", "--workers", 0, "--pairs", w.shards,
                        "--batch-size", 8, "--out", "out", "--top", 0.5, "--out-shards", "out/kept"],
        out),
    "scenes": Job(MDC, lambda w: ["scenes", "--out", "out", "--num-train", 2000, "--jobs", 2], out),
    "prepare": Job(
        MDC, lambda w: ["prepare", "shards", "--train", w.shards, "--test", w.scenes / "val" / "00000.tar",
                        "--captions-key", "caption", "--out", "out"],
        out),
    "prepare-recap": Job(
        RECAP, lambda w: ["--shards", w.shards, "--pairs", 200, "--out", "out", "--jobs", 2], out),
    "experiments": Job(
        experiment, lambda w: ["--scale", "scenes", "--tables", "table5", "--data", w.scenes, "--out", "out", "--seeds",
                               0, "--jobs", 1, "--bin", f"{Path(sys.executable).parent}/"],
        experiment_result),
}


def finish(world: World, job: Job, folder: Path) -> Outcome:
    return process.run(job.main, *job.argv(world), cwd=folder, timeout=4 * TIMEOUT)


def kills(world: World, name: str) -> Cases:
    """Kill a job as often as World says. Each kill is a case, and all kills of a life share its final problem."""
    job, rng, killed, lives = JOBS[name], world.rng(f"kill/{name}"), 0, 0
    whole, begun = world.fresh(f"kill-{name}/whole"), time.monotonic()
    ended = finish(world, job, whole)
    duration, expected = time.monotonic() - begun, job.result(whole)
    if problem := first(ended.problem(0), None if expected else "it wrote nothing", check_json(whole)):
        yield "undisturbed", problem
        return
    while killed < world.args.kills:
        lives += 1
        folder, moments, started = world.fresh(f"kill-{name}/life-{lives}"), [], []
        ended = None
        while killed < world.args.kills and len(moments) < KILLS_OF_A_LIFE:
            moment = rng.uniform(0, duration)
            ended = process.run_until(job.main, *job.argv(world), cwd=folder, log=whole.parent / "log", moment=moment)
            started.append(ended.pid)
            if ended.code != -9:
                break
            moments.append(moment)
            killed += 1
        if ended.code == -9:
            ended = finish(world, job, folder)
        for pid in started:
            process.end(pid, reap=False)
        # It may have been killed when all was done: `prepare` then refuses in one line to do it again.
        problem = first(ended.problem(), unlike(job.result(folder), expected), check_json(folder))
        for moment in moments:
            yield f"killed after {moment:.2f} s of {duration:.2f}, life {lives}", problem
        if not moments and problem:
            yield f"not killed, life {lives}", problem


PARTS = {f"kill {name}": (lambda world, name=name: kills(world, name)) for name in JOBS}

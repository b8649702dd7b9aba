"""The commands that are disturbed: each in a folder of its own with relative paths, and what of it must be equal."""
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import process
import torch
from safetensors.torch import load_file
from torch.utils._pytree import tree_flatten
from world import REPO, World

from clip_benchmark_ext import cli as benchmark
from experiments import prepare_recap
from open_clip_mdc import cli, train

OF_A_PROCESS = (".log", "params.txt", ".tfevents")  # files that name times and places


class Job(NamedTuple):
    main: Callable
    argv: str  # with the attributes of a World in braces


def clip_benchmark(argv: list[str]) -> int | None:
    sys.argv = ["clip_benchmark", *argv]
    return benchmark.main(argv)


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
    run.main([*argv, "--bin", f"{Path(sys.executable).parent}/"])


TRAIN = ("--model MDC-ViT-Ti-8 --logs out --name run --precision fp32 --device cpu --workers 0 --warmup 2 --lr 1e-3 "
         "--resume latest ")
TOOL = "--pretrained {run} --device cpu --workers 1 --batch-size 8 "
JOBS = {
    "train-csv": Job(train.main, TRAIN + "--train-data {csv} --val-data {csv} --batch-size 12 --epochs 3"),
    "train-webdataset": Job(
        train.main, TRAIN + "--train-data {shards} --dataset-type webdataset --train-num-samples 256 --batch-size 32 "
        "--val-data {scenes}/val/00000.tar --epochs 3 --workers 1 --delete-previous-checkpoint"),
    "train-most-recent": Job(
        train.main, TRAIN + "--train-data {csv} --batch-size 12 --epochs 4 --save-most-recent --save-frequency 0"),
    "probe": Job(
        clip_benchmark, "eval --model mdc --pretrained {run} --dataset wds/probe --dataset_root {scenes}/probe --task "
        "linear_probe --feature_root out/features --output out/probe.json --num_workers 0 --no_amp --quiet "
        "--batch_size 8 --skip_existing"),
    "caption": Job(
        cli.main, f"caption {TOOL} {{images}} {{scenes}}/train/00000.tar --temperature 1 --out captions.jsonl --html "
        "captions.html"),
    "caption-shards": Job(cli.main, f"caption {TOOL} {{shards}} --temperature 1 --out out --jobs 2"),
    "score-shards": Job(cli.main, f"score {TOOL} --pairs {{shards}} --out out --top 0.5 --out-shards out/kept"),
    "scenes": Job(cli.main, "scenes --out out --num-train 2000 --jobs 2"),
    "prepare": Job(cli.main, "prepare shards --train {shards} --test {scenes}/val/00000.tar --captions-key caption "
                             "--out out"),
    "prepare-recap": Job(prepare_recap.main, "--shards {shards} --pairs 200 --out out --jobs 2"),
    "experiments": Job(experiment, "--scale scenes --tables table5 --data {scenes} --out out --seeds 0 --jobs 1"),
}


def words(world: World, job: Job) -> list[str]:
    return [word.format(**vars(world)) for word in job.argv.split()]


def finish(world: World, job: Job, folder: Path) -> process.Outcome:
    return process.run(job.main, *words(world, job), cwd=folder)


def digest(path: Path) -> str:
    """Return a digest of a file, of weights by what they hold: safetensors orders metadata at random."""
    if path.suffix not in (".pt", ".safetensors"):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    leaves, structure = tree_flatten(torch.load(path, weights_only=True) if path.suffix == ".pt" else load_file(path))
    found = hashlib.sha256(repr(structure).encode())
    for leaf in leaves:
        found.update(leaf.numpy().tobytes() if isinstance(leaf, torch.Tensor) else repr(leaf).encode())
    return found.hexdigest()


def result(folder: Path) -> dict[str, str]:
    """{path: digest} of the files in a folder but for hidden ones, which a killed process may leave."""
    names = {path: path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()}
    return {str(name): digest(path) for path, name in names.items()
            if not any(part.startswith(".") for part in name.parts) and not path.name.endswith(OF_A_PROCESS)}


def unlike(found: dict, expected: dict) -> str | None:
    """The first difference of two mappings, in a line."""
    different = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    return f"{different[0]} is missing, too much or has other content" if different else None


def first(*problems: str | None) -> str | None:
    return next((problem for problem in problems if problem), None)

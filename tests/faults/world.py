"""The inputs of all cases: rendered scenes, a small run, the commands, and fresh folders to write in."""
import csv
import hashlib
import json
import random
import shutil
import sys
import tarfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import process
from process import Outcome

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO / "tests"), str(REPO)]

from conftest import run_folder  # noqa: E402

from clip_benchmark_ext import cli as benchmark  # noqa: E402
from experiments import prepare_recap  # noqa: E402
from open_clip_mdc import cli as tools  # noqa: E402
from open_clip_mdc import train  # noqa: E402
from open_clip_mdc.data.files import new_file, new_folder  # noqa: E402

Cases = Iterator[tuple[str, str | None]]  # name, and the problem or None
SKIPPED = "skipped: "  # begins what could not be tried, and why
MDC = tools.main
RECAP = prepare_recap.main
TRAIN = train.main


def CLIP_BENCHMARK(argv: list[str]) -> int | None:
    sys.argv = ["clip_benchmark", *argv]
    return benchmark.main(argv)


class World:
    """Attributes:

    `args` has counts and the seed, `folder` is that of everything, `run` is an untrained model's folder.
    """

    def __init__(self, folder: Path, args: Namespace):
        self.folder, self.args = folder, args
        folder.mkdir(parents=True, exist_ok=True)
        self.run = folder / "mdc"
        if not self.run.exists():
            run_folder(folder / ".mdc", "MDC-ViT-Ti-8")
            (folder / ".mdc").rename(self.run)
        self.scenes = folder / "scenes"
        if not self.scenes.exists():
            made = self.call(MDC, "scenes", "--out", self.scenes, "--num-train", 256, "--num-val", 64, "--num-probe",
                             64, "--num-pairs", 8, cwd=folder)
            assert made.code == 0, made.err
        self.shards = f"{self.scenes}/train/{{00000..00007}}.tar"

    def rng(self, name: str) -> random.Random:
        return random.Random(f"{self.args.seed}/{name}")

    def fresh(self, name: str) -> Path:
        """An empty folder."""
        folder = self.folder / "cases" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def call(self, main: Callable, *argv: object, cwd: Path, **options) -> Outcome:
        return process.run(main, *argv, cwd=cwd, **options)

    def tool(self, name: str, *argv: object, cwd: Path, run: Path | None = None, **options) -> Outcome:
        """A command that reads the model."""
        return self.call(MDC, name, "--pretrained", run or self.run, "--device", "cpu", "--workers", 0, *argv, cwd=cwd,
                         **options)

    def train(self, *argv: object, cwd: Path, name: str = "run", **options) -> Outcome:
        return self.call(TRAIN, *train_flags(*argv, logs=cwd, name=name), cwd=cwd, **options)

    @cached_property
    def samples(self) -> list[tuple[bytes, str]]:
        """PNG and caption of each validation scene."""
        with tarfile.open(self.scenes / "val" / "00000.tar") as tar:
            names = [name.removesuffix(".txt") for name in tar.getnames() if name.endswith(".txt")]
            return [(tar.extractfile(f"{name}.png").read(), tar.extractfile(f"{name}.txt").read().decode())
                    for name in names]

    @cached_property
    def images(self) -> Path:
        """A folder of 40 scenes: enough for a mean that stands for no image."""
        folder = self.folder / "images"
        if not folder.exists():
            with new_folder(folder) as partial:
                for i, (image, _) in enumerate(self.samples[:40]):
                    (partial / f"{i:02d}.png").write_bytes(image)
        return folder

    @cached_property
    def csv(self) -> Path:
        """48 pairs in the format of open_clip_train."""
        path = self.folder / "train.csv"
        write_csv(path, [(self.image_file(i), caption) for i, (_, caption) in enumerate(self.samples[:48])],
                  ("filepath", "title"), "\t")
        return path

    def image_file(self, number: int) -> Path:
        path = self.folder / "files" / f"{number}.png"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            with new_file(path) as partial:
                partial.write_bytes(self.samples[number][0])
        return path


def train_flags(*flags: object, logs: Path, name: str = "run") -> list[str]:
    return [str(f) for f in (
        "--model", "MDC-ViT-Ti-8", "--logs", logs, "--name", name, "--precision", "fp32", "--device", "cpu",
        "--workers", 0, "--warmup", 2, "--lr", 1e-3, "--log-every-n-steps", 1, *flags)]


def write_csv(path: Path, rows: list[tuple], header: tuple = ("image", "caption"), separator: str = ",") -> None:
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        csv.writer(file, delimiter=separator).writerows([header, *rows])


def tree(folder: Path) -> dict[str, str]:
    """{path: digest} of the files in a folder but for hidden ones, which a killed process may leave."""
    names = {path: path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()}
    return {str(name): "a link" if path.is_symlink() else hashlib.sha256(path.read_bytes()).hexdigest()
            for path, name in names.items() if not any(part.startswith(".") for part in name.parts)}


def unlike(found: dict, expected: dict) -> str | None:
    """The first difference of two mappings, in a line."""
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            kind = "missing" if name not in found else "more than there should be" if name not in expected else \
                "other content"
            return f"{name}: {kind}"
    return None


def strict_json(text: str) -> object:
    """Raises ValueError for NaN and infinity, which are no JSON, and for a key that comes twice."""
    def refuse(word: str):
        raise ValueError(f"{word} is no JSON")

    def pairs(items: list[tuple]) -> dict:
        if len(dict(items)) < len(items):
            raise ValueError("a key comes twice")
        return dict(items)
    return json.loads(text, parse_constant=refuse, object_pairs_hook=pairs)


def check_json(folder: Path) -> str | None:
    """Return the problems of the JSON and JSONL files in a folder."""
    for path in sorted(folder.rglob("*.json*")):
        if path.is_file() and path.suffix in (".json", ".jsonl"):
            text = path.read_text(encoding="utf-8")
            try:
                for part in text.split("\n") if path.suffix == ".jsonl" else [text]:
                    if part or path.suffix == ".json":
                        strict_json(part)
            except ValueError as problem:
                return f"{path.name}: {problem}"
    return None


def first(*problems: str | None) -> str | None:
    return next((problem for problem in problems if problem), None)

"""The inputs of all cases: rendered scenes, a small run, and fresh folders to write in."""
import random
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import process

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO / "tests"), str(REPO)]

from conftest import run_folder, write_pairs  # noqa: E402

from open_clip_mdc import cli  # noqa: E402

Cases = Iterator[tuple[str, str | None]]  # name, and the problem or None


class World:
    """Attributes:

    `args` has counts and the seed, `run` is an untrained model's folder, `images` has 48 files and `csv` their table.
    """

    def __init__(self, folder: Path, args: Namespace):
        self.folder, self.args = folder, args
        self.run, self.scenes, self.images = folder / "mdc", folder / "scenes", folder / "images"
        self.shards, self.csv = f"{self.scenes}/train/{{00000..00007}}.tar", self.images / "train.csv"
        folder.mkdir(parents=True, exist_ok=True)
        if not self.csv.exists():
            for begun in (self.run, self.scenes, self.images):
                shutil.rmtree(begun, ignore_errors=True)
            run_folder(self.run, "MDC-ViT-Ti-8")
            made = process.run(cli.main, "scenes", "--out", self.scenes, "--num-train", 256, "--num-val", 64,
                               "--num-probe", 64, "--num-pairs", 8, cwd=self.run)
            assert made.code == 0, made.err
            self.images.mkdir()
            write_pairs(self.scenes / "val/00000.tar", self.csv)

    def rng(self, name: str) -> random.Random:
        return random.Random(f"{self.args.seed}/{name}")

    def fresh(self, name: str) -> Path:
        """An empty folder."""
        folder = self.folder / "cases" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

"""Train decoders on a locked image encoder and your own photographs, as `finetune` and `card` do."""
import argparse
import io
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from hashlib import sha256
from pathlib import Path

from ..data.journal import Journal
from ..errors import Refusal, plural
from . import prepare
from . import prepare_layouts as layouts
from .prepare_layouts import Sample, read_shards

LEAST = 10  # photographs


def halves(paths: str, images: list[str], other: str, most: int | None = None) -> Callable[[bool], Iterator[Sample]]:
    """Return the function that reads photographs to train on (False) or those that are held out (True).

    `other` is the share of them to hold out, at most `most`, which their names decide, or other data to take for it.
    """
    held = None
    if re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?%?|nan|inf", other) and not Path(other).exists():
        if not re.fullmatch(r"0?\.\d+", other) or not float(other):
            raise ValueError(f"{other} is no share: give a number between 0 and 1, such as 0.1, or other data")
        names = [sample.name for sample in layouts.read(paths, images, "captions")]
        check_enough(paths, len(names))
        by_hash = sorted({*names}, key=lambda name: sha256(name.encode()).digest()[-8:])
        held = set(by_hash[:max(2, round(float(other) * len(by_hash)))][:most])

    def read(held_out: bool) -> Iterator[Sample]:
        source = other if held_out and held is None else paths
        for sample in layouts.read(source, images, "captions"):
            if held is None or (sample.name in held) == held_out:
                yield sample

    return read


def check_enough(source: str, found: int, why: str = "") -> None:
    """Raise ValueError for fewer photographs than LEAST."""
    if found < LEAST:
        raise ValueError(f"{source}: {plural(found, 'photograph')} with captions: give {LEAST} or more{why}")


def write_data_of(source: str, out: Path, splits: dict[str, Iterable[Sample]]) -> list[list[int]]:
    """Write OUT/data whole, and return the number of captions of each photograph of the first two splits.

    Photographs that cannot be used are listed in OUT/data/left_out.txt. Raises ValueError if too few are left.
    """
    left_out: list[str] = []
    shutil.rmtree(out / "data", ignore_errors=True)  # it may have been written whole, but not noted
    with redirect_stdout(io.StringIO()):  # it prints flags for open_clip_train
        prepare.write(str(out / "data"), splits, left_out, join=False, skip=True)
    counts = [[len(sample.captions) for sample in read_shards(shards_of(out, split), "captions")]
              for split in list(splits)[:2]]
    found = sum(map(len, counts))
    if found < LEAST:
        shutil.rmtree(out / "data")
    check_enough(source, found, f" ({left_out[0]})" if left_out else "")
    if left_out:
        print(f"{plural(len(left_out), 'photograph')} left out: {out / 'data' / 'left_out.txt'}")
    return counts


def shards_of(out: Path, split: str) -> list[str]:
    return sorted(map(str, (out / "data" / split).glob("*.tar")))


def checkpoint(folder: Path, epoch: int) -> Path:
    return folder / "checkpoints" / f"epoch_{epoch}.pt"


def flags_of(out: Path, logs: Path, samples: int, batch: int, device: str) -> list[str]:
    """Return flags of open_clip_train for a decoder on a locked encoder and OUT/data/train, `samples` an epoch."""
    return ["--lock-image", "--cache-features", str(logs / "tokens"), "--dataset-type", "webdataset",
            "--train-data", "::".join(shards_of(out, "train")), "--train-num-samples", str(samples),
            "--batch-size", str(batch), "--workers", "0", "--wd", "0.1", "--beta2", "0.98",
            "--precision", "fp32" if device == "cpu" else "amp_bf16", "--device", device,
            "--logs", str(logs), "--resume", "latest"]


@contextmanager
def begun(out: Path, name: str, args: argparse.Namespace, settings: Iterable[str]) -> Iterator[Journal]:
    """Open the journal OUT/NAME. Raises ValueError for a folder with other things, and leaves no empty one."""
    if not (out / name).exists() and out.is_dir() and any(out.iterdir()):
        raise ValueError(f"--out {out} exists and is not empty: remove it or give another --out")
    out.mkdir(parents=True, exist_ok=True)
    try:
        with Journal(out / name, {setting: getattr(args, setting) for setting in settings}) as journal:
            yield journal
    finally:
        with suppress(OSError):
            out.rmdir()  # if it is empty


def once(journal: Journal, part: str, do: Callable[..., dict | None], *args) -> dict:
    """Return what the journal says of a part. If it says nothing, `do(*args)` comes first, and its result is noted."""
    if part not in journal:
        journal.note({"id": part, **(do(*args) or {})})
    return journal[part]


@contextmanager
def unsaid(heard: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """Keep what training and evaluation say off the terminal, and give each line of the log to `heard`.

    The log file of a training has it, and an error still comes through: a refusal as ValueError.
    """
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    listener = logging.NullHandler()  # logging would add one for the terminal where it finds none
    listener.handle = lambda record: heard(record.getMessage())
    root.handlers[:] = [listener]
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    except Refusal as problem:
        raise ValueError(problem.line.removeprefix("error: ")) from None
    finally:
        for handler in root.handlers:
            handler.close()  # the log's file
        root.handlers[:] = handlers
        root.setLevel(level)

"""Sends the shards that caption, score and embed are to work on to the engine, which makes OUT/SHARD.parquet of each.

A unit is a shard, a folder of images, or some rows of a CSV file. Its table has a row per image that could be read, and
its metadata name the unit, as shards of other data have the same names. Imports no torch: beside Ray's actors that
would take a core from them (shard_table.py is the workers' side).
"""
import argparse
import hashlib
import json
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path

from ..data.csv_pairs import CsvRows, read_csv
from ..data.files import file_state, sha256
from ..data.paths import SHARDS, find_images
from ..errors import complain, plural
from ..progress import progress_bar
from .engine import make_each
from .tables import read_about

Unit = Path | CsvRows
READ = multiprocessing.get_context("fork").Value("q")  # images that this process and its workers have done


def make_worker(args: argparse.Namespace, units: list[Unit], number: int) -> Callable:
    return import_module(args.worker).worker(args, units, number)  # imported where it is called: units needs no torch


def find_units(paths: list[str]) -> list[Unit]:
    """Return the shards that patterns and folders hold. A folder without shards is a unit itself. Absolute."""
    units: list[Unit] = []
    for path in paths:
        try:
            units += find_images([path], SHARDS)
        except FileNotFoundError:
            if not Path(path).is_dir():
                raise
            find_images([path])  # or there is nothing at all
            units.append(Path(path))
    units = [unit.absolute() for unit in units]
    for unit in units:
        if not (unit.is_dir() or unit.suffix.lower() in SHARDS):
            raise ValueError(f"{unit} is no shard (.tar) and no folder of images: with a folder as --out each of these "
                             f"becomes a table; single images go with an --out that ends in .jsonl or .csv")
    return units


def unit_name(unit: Unit) -> str:
    return f"{unit.path.stem}-{unit.number:05d}" if isinstance(unit, CsvRows) else \
        unit.name if unit.is_dir() else unit.stem


def files_of(unit: Unit) -> list[Unit]:
    return find_images([str(unit)]) if isinstance(unit, Path) and unit.is_dir() else [unit]


def place_of(unit: Unit) -> dict:
    if isinstance(unit, CsvRows):
        return {"path": str(unit.path), "start": unit.start, "rows": unit.count}
    return {"path": str(unit)}


def hash_files(unit: Unit, fact: Callable[[Path], object]) -> str:
    """Return the SHA-256 of a fact about each file of a unit, the images that a CSV file names among them."""
    files = [unit.path, *(path for _, path, _ in read_csv(unit))] if isinstance(unit, CsvRows) else files_of(unit)
    facts = [[file.name, fact(file)] for file in files if file.is_file()]
    return hashlib.sha256(json.dumps(facts).encode("utf-8", "surrogateescape")).hexdigest()


def source_of(unit: Unit) -> dict:
    """Return what tells a unit from another of its name, and from what stood there before. Plain values."""
    # While "state" is the same, the files need not be read again.
    return {**place_of(unit), "state": hash_files(unit, file_state), "sha256": hash_files(unit, sha256)}


def check_source(unit: Unit, source: dict | None, made: Path) -> None:
    """Raise ValueError where a file was made of another unit, or of this one before its content changed."""
    old = source or {"path": "nothing that it names"}
    now = {name: value for name, value in place_of(unit).items() if old.get(name) != value}
    if not now and (hash_files(unit, file_state) == old.get("state") or hash_files(unit, sha256) == old.get("sha256")):
        return
    here = place_of(unit)["path"]
    changed = "it or an image in it changed" if isinstance(unit, CsvRows) or unit.is_dir() else "that changed"
    what = f"{here} before {changed}" if old["path"] == here else f"{old['path']}, not {here}"
    raise ValueError(f"{made} was made of {what}: remove it, or choose another folder")


def check_settings(settings: dict, tables: Iterable[Path]) -> None:
    settings = json.loads(json.dumps(settings))
    for path in tables:
        old = read_about(path)["settings"]
        for name in settings | old:
            if old.get(name) != settings.get(name):
                raise ValueError(f"{path} was made with {name} {old.get(name)}, not {settings.get(name)}: what is made "
                                 f"otherwise needs another --out")


def size_of(unit: Unit) -> int | None:
    """Return how many images a unit has, of a shard by the sizes.json beside it, or None where nothing says it."""
    if isinstance(unit, CsvRows):
        return unit.count
    if unit.is_dir():
        return len(files_of(unit))
    try:
        size = json.loads((unit.parent / "sizes.json").read_text(encoding="utf-8"))[unit.name]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return size if type(size) is int and size >= 0 else None


@contextmanager
def images_bar(units: list[Unit], what: str) -> Iterator[Callable[[Unit, int, bool], None]]:
    """Show how many images are done. Yields what to call with a unit, the number of its images, and if they were there.

    Ray's workers count when a shard is done. A shard of unknown size counts as many as the others on average.
    """
    sizes, over, before, done = {unit: size_of(unit) for unit in units}, threading.Event(), 0, 0
    READ.value = 0

    def show() -> None:
        known = [size for size in sizes.values() if size is not None]
        bar.total = round(sum(known) / len(known) * len(sizes)) if known else None
        bar.update(max(done, before + READ.value) - bar.n)

    def follow() -> None:
        while not over.wait(0.5):
            show()

    def say(unit: Unit, images: int, was_there: bool) -> None:
        nonlocal done, before
        sizes[unit], done, before = images, done + images, before + images * was_there
        show()

    with progress_bar(what=what) as bar:
        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield say
        finally:
            over.set()
            thread.join()


def write_all(units: list[Unit], args: argparse.Namespace) -> tuple[list[Path], list[str], int]:
    """Make the tables that are not there, and say what is in all of them.

    Returns their paths, in the order of `units`. What could not be read, the first of each table by name. And how many.
    """
    shown, args.out = args.out, str(Path(args.out).absolute())
    if os.path.exists(args.pretrained):  # else an id
        args.pretrained = os.path.abspath(args.pretrained)
    twice = [name for name, count in Counter(map(unit_name, units)).items() if count > 1]
    if twice:
        raise ValueError(f"{twice[0]} is there twice, and both would be {twice[0]}.parquet: give them an --out each")
    work = [(unit, Path(args.out) / f"{unit_name(unit)}.parquet") for unit in units]
    totals, skipped, first = Counter(), {}, None  # skipped: of each table that is done
    try:
        with images_bar(units, args.tool) as say:
            units_of, there = {target: unit for unit, target in work}, {made for _, made in work if made.exists()}
            for target in make_each(partial(make_worker, args, units), work, args):
                about = read_about(target)
                check_source(units_of[target], about.get("source"), target)
                first = first or about["settings"]
                if about["settings"] != first:
                    check_settings(first, [target])
                totals.update(about["stats"])
                skipped[target] = about.get("skipped", [])
                say(units_of[target], about["stats"]["images"], target in there)
    finally:
        if skipped:
            more = "".join(f", {count} {name.replace('_', ' ')}" for name, count in totals.items()
                           if name not in ("rows", "images") and count)
            print(f"{plural(totals['rows'], 'row')} of {plural(totals['images'], 'image')}{more}: {shown}, "
                  f"{plural(len(skipped), 'table')}")
    return [target for _, target in work], [name for _, target in work for name in skipped[target]], (
        totals["broken"] + totals["without_caption"])


def run(args: argparse.Namespace) -> None:
    """Write a table for each of args.paths to --out. Raises ValueError if images were skipped. All else is written."""
    _, skipped, count = write_all(find_units(args.paths), args)
    complain(skipped, count)

"""Finds units of work for caption, score and embed, and has the engine make OUT/UNIT.parquet of each.

A unit is a shard, a folder of images, or some rows of a CSV file. Its table has a row per image that could be read. Its
metadata identify the unit, as shards of other data may have the same names. Workers run cli/shard_table.py.
"""
import argparse
import hashlib
import json
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ..data.csv_pairs import CsvRows, read_csv
from ..data.files import file_state, sha256
from ..data.paths import IMAGE_FILES, SHARDS, find_images, is_shard, without_suffix
from ..data.shards import sizes_of, total_of
from ..errors import complain, plural
from ..progress import progress_bar
from .engine import make_each
from .tables import read_about

Unit = Path | CsvRows
# (flags, all units, number of the process) -> function (unit, file to write), as a tool's `worker`
Worker = Callable[[argparse.Namespace, list[Unit], int], Callable]
READ = multiprocessing.get_context("fork").Value("q")  # number of images done by this process and its workers


def find_units(paths: list[str]) -> list[Unit]:
    """Return the shards in folders and of glob patterns, by absolute path. A folder without shards is one unit."""
    units = []
    for path in paths:
        found = find_images([path], SHARDS + IMAGE_FILES)
        shards = [file for file in found if is_shard(file)]
        if shards != found and (shards or not Path(path).is_dir()):
            raise ValueError(f"{path} is neither shards (.tar) alone nor a folder of images alone, which a folder as "
                             "--out needs: put single images into a folder")
        units += map(Path, map(os.path.abspath, shards or [path]))
    return units


def unit_name(unit: Unit) -> str:
    return f"{unit.path.stem}-{unit.number:05d}" if isinstance(unit, CsvRows) else \
        unit.name if unit.is_dir() else without_suffix(unit)


def files_of(unit: Unit) -> list[Unit]:
    return find_images([str(unit)]) if isinstance(unit, Path) and unit.is_dir() else [unit]


def place_of(unit: Unit) -> dict:
    if isinstance(unit, CsvRows):
        return {"path": str(unit.path), "start": unit.start, "rows": unit.count}
    return {"path": str(unit)}


def hash_files(unit: Unit, fact: Callable[[Path], object]) -> str:
    """Return a SHA-256 of `fact` of each file of a unit, including the images that a CSV file names."""
    files = [unit.path, *(path for _, path, _ in read_csv(unit))] if isinstance(unit, CsvRows) else files_of(unit)
    # A folder's table names images by their paths below it.
    below = unit if isinstance(unit, Path) and unit.is_dir() else None
    facts = [[str(file.relative_to(below)) if below else file.name, fact(file)] for file in files if file.is_file()]
    return hashlib.sha256(json.dumps(facts).encode("utf-8", "surrogateescape")).hexdigest()


def source_of(unit: Unit) -> dict:
    """Return plain values that identify a unit and its content."""
    # As long as "state" is the same, files need not be read again.
    return {**place_of(unit), "state": hash_files(unit, file_state), "sha256": hash_files(unit, sha256)}


def check_source(unit: Unit, source: dict | None, made: Path) -> None:
    """Raise ValueError if the file `made` came from another unit, or from this one before its content changed."""
    old, place = source or {"path": "nothing that it names"}, place_of(unit)
    if place.items() <= old.items() and (
            hash_files(unit, file_state) == old.get("state") or hash_files(unit, sha256) == old.get("sha256")):
        return
    here = place["path"]
    changed = "it or an image in it changed" if isinstance(unit, CsvRows) or unit.is_dir() else "that changed"
    what = f"{here} before {changed}" if old["path"] == here else f"{old['path']}, not {here}"
    raise ValueError(f"{made} was made of {what}: remove it, or choose another folder")


def check_settings(settings: dict, old: dict, path: Path) -> None:
    """Raise ValueError if the table at `path`, with the settings `old`, was not made with these settings."""
    settings = json.loads(json.dumps(settings))
    if unlike := [name for name in settings | old if old.get(name) != settings.get(name)]:
        raise ValueError(f"{path} was made with {unlike[0]} {old.get(unlike[0])}, not {settings.get(unlike[0])}: "
                         "choose another --out")


@contextmanager
def images_bar(units: list[Unit], what: str) -> Iterator[Callable[[Unit, int, bool], None]]:
    """Show a progress bar of images. Yields a function to call when a unit is done.

    Its arguments are the unit, its number of images, and whether its table was there before.
    """
    sizes, over, before, done = sizes_of(units), threading.Event(), 0, 0
    READ.value = 0

    def show() -> None:
        bar.total = total_of(sizes)
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


def write_all(units: list[Unit], args: argparse.Namespace, worker: Worker) -> tuple[list[Path], list[str], int]:
    """Make the tables that do not exist yet, and print a summary of all.

    Returns the paths of the tables in the order of `units`, names of skipped images (the first ones of each table), and
    the number of skipped images.
    """
    if twice := [name for name, count in Counter(map(unit_name, units)).items() if count > 1]:
        raise ValueError(f"two inputs are named {twice[0]}, so both would be {twice[0]}.parquet: give each its own "
                         "--out")
    work = [(unit, Path(args.out, f"{unit_name(unit)}.parquet")) for unit in units]
    totals, skipped, first = Counter(), {}, None  # skipped: by table
    try:
        with images_bar(units, args.tool) as say:
            units_of, there = {target: unit for unit, target in work}, {made for _, made in work if made.exists()}
            for target in make_each(partial(worker, args, units), work, args.jobs):
                about = read_about(target)
                check_source(units_of[target], about.get("source"), target)
                first = first or about["settings"]
                check_settings(first, about["settings"], target)
                totals.update(about["stats"])
                skipped[target] = about.get("skipped", [])
                say(units_of[target], about["stats"]["images"], target in there)
    finally:
        if skipped:
            more = "".join(f", {count} {name.replace('_', ' ')}" for name, count in totals.items()
                           if name not in ("rows", "images") and count)
            print(f"{plural(totals['rows'], 'row')} of {plural(totals['images'], 'image')}{more}: {args.out}, "
                  f"{plural(len(skipped), 'table')}")
    return [target for _, target in work], [name for _, target in work for name in skipped[target]], (
        totals["broken"] + totals["without_caption"])


def run(args: argparse.Namespace, worker: Worker) -> None:
    """Write a table for each unit in args.paths to --out. If images were skipped, raises ValueError at the end."""
    _, skipped, count = write_all(find_units(args.paths), args, worker)
    complain(skipped, count)

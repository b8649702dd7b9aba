"""What caption, score and embed share when they work on shards: OUT/SHARD.parquet of each, by the engine.

A unit is what is worked on as one: a shard, a folder of images, or some rows of a CSV file. Its table holds a row per
image that could be read, with the sample's key; what could not be read is counted in the table's metadata.

Dimensions: B images.
"""
import argparse
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa
from tqdm import tqdm

from ..data.csv_pairs import CsvRows
from ..data.images import SHARDS, Batch, Images, find_images
from ..data.tables import read_about, write_table
from ..pretrained import PretrainedCaptioner
from .common import need_folder
from .engine import Make, make_each

Unit = Path | CsvRows
BLIND_IMAGES = 256  # the first, whose mean stands for no image


def find_units(paths: list[str]) -> list[Unit]:
    """The shards that patterns and folders hold; a folder without shards is a unit itself. Absolute.

    Raises:
        FileNotFoundError: nothing there. ValueError: an image by itself.
    """
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
    """Of its table, without the suffix."""
    return f"{unit.path.stem}-{unit.number:05d}" if isinstance(unit, CsvRows) else \
        unit.name if unit.is_dir() else unit.stem


def files_of(unit: Unit) -> list[Unit]:
    """What `Images` reads."""
    return find_images([str(unit)]) if isinstance(unit, Path) and unit.is_dir() else [unit]


def write_shard(shard: Unit, out: Path, loaded: PretrainedCaptioner, args: argparse.Namespace, schema: pa.Schema,
                settings: dict, columns: Callable[[Batch], dict]) -> dict:
    """Writes the table of one unit. Knows no engine.

    Args:
        columns: of a batch with images, by the schema's names, but `key`; as many rows for all, with `key` if they are
            not the batch's.
        settings: what the rows depend on, plain values.

    Returns:
        numbers of images, rows and broken images.

    Raises:
        ValueError: the shard breaks off.
    """
    stats = {"images": 0, "rows": 0, "broken": 0}
    with write_table(out, schema) as table:
        for batch in Images(files_of(shard), loaded.to_bytes, args.batch_size).loader(args.workers):
            if batch.damaged:
                raise ValueError(batch.damaged[0])
            stats["images"] += len(batch.names)
            stats["broken"] += len(batch.problems)
            if batch.names:
                keys = [name.removeprefix(f"{shard}::").removeprefix(f"{shard}/") for name in batch.names]
                keys = [key.encode("utf-8", "backslashreplace").decode() for key in keys]  # names are any bytes
                rows = {"key": keys, **columns(batch._replace(names=keys, image=loaded.from_bytes(batch.image)))}
                table.add(rows)
                stats["rows"] += len(rows["key"])
        table.about.update(settings=settings, stats=stats)
    return stats


def check_settings(settings: dict, tables: Iterable[Path]) -> None:
    """Raises ValueError where rows of other settings are among the tables."""
    settings = json.loads(json.dumps(settings))
    for path in tables:
        old = read_about(path)["settings"]
        for name in settings | old:
            if old.get(name) != settings.get(name):
                raise ValueError(f"{path} was made with {name} {old.get(name)}, not {settings.get(name)}: what is made "
                                 f"otherwise needs another --out")


def check_out(out: str, settings: dict) -> None:
    """Raises ValueError where a folder has a table of rows of other settings: one stands for all."""
    check_settings(settings, list(Path(out).glob("*.parquet"))[:1])


def absolute(path: str) -> str:
    """A path that means the same in another folder; an id stays what it is."""
    return os.path.abspath(path) if os.path.exists(path) else path


def write_all(make: Make, units: list[Unit], args: argparse.Namespace) -> list[Path]:
    """Makes the tables that are not there, and says what is in all of them.

    Raises:
        ValueError: a unit cannot be used (all the others are written), two have one name, or a table is there of other
            settings.
    """
    need_folder("--out", args.out)
    shown, args.out, args.pretrained = args.out, str(Path(args.out).absolute()), absolute(args.pretrained)
    twice = [name for name, count in Counter(map(unit_name, units)).items() if count > 1]
    if twice:
        raise ValueError(f"{twice[0]} is there twice, and both would be {twice[0]}.parquet: give them an --out each")
    work = [(unit, Path(args.out) / f"{unit_name(unit)}.parquet") for unit in units]
    totals, done, first = Counter(), [], None
    try:
        with tqdm(total=len(work), desc=args.tool, unit="shard") as bar:
            for target in make_each(make, work, args):
                about = read_about(target)
                first = first or about["settings"]
                if about["settings"] != first:
                    check_settings(first, [target])
                totals.update(about["stats"])
                done.append(target)
                bar.set_postfix(images=totals["images"])
                bar.update()
    finally:
        if done:
            more = "".join(f", {count} {name.replace('_', ' ')}" for name, count in totals.items()
                           if name not in ("rows", "images") and count)
            print(f"{totals['rows']} rows of {totals['images']} images{more}: {shown}, {len(done)} tables")
    return [target for _, target in work]

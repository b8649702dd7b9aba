"""Write shards of the pairs that `open_clip_mdc score --pairs --top` keeps."""
import argparse
from collections import defaultdict
from functools import partial
from pathlib import Path

import numpy as np

from ..bulk.engine import make_each
from ..bulk.tables import key_of, read_rows
from ..bulk.units import Unit, check_source, source_of
from ..data.captions import CAPTION_SEPARATOR
from ..data.csv_pairs import CsvRows, read_csv
from ..data.files import write_json
from ..data.images import named_samples, stored
from ..data.shards import image_member, open_tar, read_metadata, read_stats, stats_file, write_sizes
from ..errors import plural


def threshold(tables: list[Path], top: float) -> float:
    scores = np.concatenate([read_rows(path, ["debiased"])["debiased"].drop_null().to_numpy() for path in tables])
    if not len(scores):
        raise ValueError("no caption has a debiased score: --top has nothing to keep")
    place = len(scores) - max(1, round(top * len(scores)))
    return float(np.partition(scores, place)[place])


def keep(least: float, job: tuple, out: Path) -> None:
    """Write the samples of a unit whose captions have a debiased score of `least` or more, and TARGET_stats.json."""
    unit, table, target = job  # `table` has the scores, and `out` becomes `target`
    kept: dict[str, list[str]] = defaultdict(list)
    for row in read_rows(table, ["key", "caption", "debiased"]).to_pylist():
        if row["debiased"] is not None and row["debiased"] >= least:
            kept[row["key"]].append(row["caption"])
    stats = {"source": source_of(unit), "threshold": least, "pairs": 0, "captions": 0}
    with open_tar(out) as writer:
        for key, suffix, image, metadata in images_of(unit, kept):
            # In a key a dot would begin the suffix. What is not kept must not come back from KEY.json.
            writer.write({"__key__": f"{table.stem.replace('.', '_')}{stats['pairs']:06d}", suffix: image,
                          "json": {**metadata, "captions": kept[key]},
                          "txt": CAPTION_SEPARATOR.join(kept[key])})
            stats["pairs"] += 1
            stats["captions"] += len(kept[key])
    write_json(stats_file(target), stats, follow=False)


def images_of(unit: Unit, kept: dict):
    if isinstance(unit, CsvRows):
        for key, path, _ in read_csv(unit):
            if key in kept:
                yield key, *stored(path.read_bytes(), str(path)), {"image": key}
        return
    for name, sample in named_samples(unit):
        if (key := key_of(name)) in kept:
            suffix = image_member(sample)
            yield key, suffix, sample[suffix], read_metadata(sample)


def write_kept(units: list[Unit], tables: list[Path], args: argparse.Namespace) -> None:
    least, folder = threshold(tables, args.top), Path(args.out_shards).absolute()
    targets = [folder / f"{table.stem}.tar" for table in tables]
    work = [((unit, table, target), target) for unit, table, target in zip(units, tables, targets, strict=True)]
    units_of, captions, images = dict(zip(targets, units, strict=True)), 0, 0
    for target in make_each(lambda number: partial(keep, least), work, args.jobs):
        made = read_stats(target)
        check_source(units_of[target], made.get("source"), target)
        if made.get("threshold") != least:
            raise ValueError(f"{target} was kept at a score of {made.get('threshold')} or more, but --top {args.top} "
                             f"means {least}: give another --out-shards")
        captions, images = captions + made["captions"], images + made["pairs"]
    write_sizes(folder)
    print(f"{plural(captions, 'caption')} of {plural(images, 'image')} with a debiased "
          f"score of {least:.3f} or more: {args.out_shards}")

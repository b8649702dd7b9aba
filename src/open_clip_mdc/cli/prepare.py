"""Write shards to fine-tune and test captioners on (Table 3).

    open_clip_mdc prepare coco --images coco/ --annotations dataset_coco.json --out coco-wds
    open_clip_mdc prepare shards --train 'flickr8k/train/{00000..00005}.tar' --test flickr8k/test/00000.tar --out f8k
    open_clip_mdc prepare shards --train photos/ --val 'data/val-*.parquet' --out photos-wds
    open_clip_mdc prepare shards --test captions_val2017.json --images val2017 --out coco-wds

The annotations of COCO and Flickr are Karpathy's split files. COCO's restval is used for training, as usual. The output
is

    OUT/train/{00000..}.tar, OUT/val/{00000..}.tar    all captions of an image in KEY.txt, separated by U+001E
    OUT/test/{0..}.tar                                clip_benchmark's captioning format, one caption per line

Plain OpenCLIP takes U+001E for white space, and so reads one long text, which --join writes on purpose.
prepare_layouts.py lists the layouts that `shards` reads.
"""
import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NoReturn

from ..data import shards as tars
from ..data.captions import CAPTION_SEPARATOR, is_text
from ..data.files import new_folder, parse_json, write_json
from ..data.images import stored
from ..data.paths import for_shell, inside
from ..data.shards import shard_pattern
from ..errors import plural, printable
from ..progress import progress_bar
from . import prepare_layouts as layouts
from .prepare_layouts import Sample, read_file

SPLITS = {"train": "train", "restval": "train", "val": "val", "test": "test"}  # Karpathy's -> ours
SHARD_SIZE = 1000
MAX_SHOWN = 20  # images named on the terminal when they cannot be used


def read_karpathy(annotations: str, dataset: str, images: str) -> dict[str, list[Sample]]:
    """Return the images of each split with their captions. Raises ValueError for another file than Karpathy's."""
    rows: dict[str, list[Sample]] = {}
    try:
        content = parse_json(Path(annotations).read_bytes())
        if content.get("dataset", dataset) != dataset:
            raise ValueError(f"it is for {content['dataset']!r}")
        for number, row in enumerate(content["images"], 1):
            # In the folder that it names (COCO's train2014, val2014), or directly in --images.
            path = inside(Path(images), str(Path(row.get("filepath", ""), row["filename"])), Path(annotations), number)
            path = path if path.exists() else Path(images, path.name)
            rows.setdefault(SPLITS[row["split"]], []).append(
                Sample(path.name, path, [s["raw"] for s in row["sentences"]]))
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        why = f"it has no {problem}" if isinstance(problem, KeyError) else str(problem)
        raise ValueError(f"{annotations} is not Karpathy's dataset_{dataset}.json: {why}. Get it by "
                         f"open_clip_mdc fetch {dataset}") from problem
    return rows


def usable(samples: Iterable[Sample], left_out: list[str], skip: bool = True) -> Iterator[tuple[str, Sample]]:
    """Yield (suffix, sample) for each readable image with captions. Append the others to `left_out`, with reasons."""
    found = False
    for name, image, captions, seen in progress_bar(samples, "prepare") if isinstance(samples, list) else samples:
        given = captions if isinstance(captions, list) else [captions]
        texts = [" ".join(text.split()) for text in given if is_text(text)]  # no line end, no U+001E
        try:
            if not texts:
                other = next((text for text in given if text is not None and str(text).strip()), None)
                raise ValueError(f"no captions{seen}" if other is None else
                                 f"its captions are no texts, such as {other!r:.50}{seen}")
            if 12 * sum(map(len, texts)) > tars.LARGEST_TEXT:  # a letter may take 12 bytes in KEY.json
                raise ValueError(f"captions of {sum(map(len, texts)):,} letters")
            image = read_file(image, tars.LARGEST) if isinstance(image, Path) else image
            if not 0 < len(image) <= tars.LARGEST:
                raise ValueError(f"an image of {len(image):,} bytes" if image else "no image")
            suffix, image = stored(image, name)
            yield suffix, Sample(name, image, texts)
            found = True
        except (OSError, ValueError) as problem:  # ValueError also for a name that no file can have
            # The name comes from the data. Quoting keeps it on one line.
            left_out.append(printable(f"{name!r}: {getattr(problem, 'strerror', None) or problem}"))
            if found and not skip and len(left_out) == MAX_SHOWN:  # more would be work in vain
                refuse(left_out)


def write_split(folder: Path, samples: Iterable[tuple[str, Sample]], shard: str, separator: str) -> dict[str, int]:
    """Write shards of SHARD_SIZE samples and return their sizes. JPEG, PNG and WebP images are copied unchanged."""
    sizes = Counter()
    for number, group in groupby(enumerate(samples), lambda item: item[0] // SHARD_SIZE):
        name = shard.format(number)
        with tars.tar_writer(folder / name) as writer:
            for index, (suffix, sample) in group:
                writer.write({
                    "__key__": f"{index:08d}",
                    suffix: sample.image,
                    "txt": separator.join(sample.captions),
                    "json": {"filename": sample.name, "captions": sample.captions},
                })
                sizes[name] += 1
    return sizes


def refuse(left_out: list[str]) -> NoReturn:
    print(*left_out[:MAX_SHOWN], sep="\n", file=sys.stderr)
    raise ValueError(f"{plural(len(left_out), 'image')} cannot be used, and the first are listed above: mend them, or "
                     "leave them out by --skip-broken")


def write(out: str, splits: dict[str, Iterable[Sample]], left_out: list[str], join: bool, skip: bool) -> None:
    """Write train/, val/ and test/ under `out`, and print how to use them. `out` appears only when it is complete.

    `left_out` grows while samples are read. With `skip` it is written to OUT/left_out.txt, and without it is an error.
    """
    hints = []
    with new_folder(out) as folder:
        for split, samples in splits.items():
            form = ("{}.tar", "\n") if split == "test" else ("{:05d}.tar", " " if join else CAPTION_SEPARATOR)
            sizes = write_split(folder / split, usable(samples, left_out, skip), *form)
            if not sizes:
                raise ValueError(f"no usable image for {split}: {left_out[0] if left_out else 'there is none'}")
            if split == "test":  # clip_benchmark's captioning format, which it calls retrieval
                (folder / "test" / "nshards.txt").write_text(str(len(sizes)))
                (folder / "dataset_type.txt").write_text("retrieval")
                use = f"--dataset wds/{for_shell(Path(out).name)} --dataset_root {for_shell(out)} --task captioning"
            else:
                write_json(folder / split / "sizes.json", sizes)  # OpenCLIP reads the number of samples here
                use = f"--{split}-data {for_shell(shard_pattern(f'{out}/{split}', len(sizes)))}"
            hints.append(f"{plural(sizes.total(), 'image')}: {use}")
        if left_out:
            if not skip:
                refuse(left_out)
            (folder / "left_out.txt").write_text("".join(f"{row}\n" for row in left_out), encoding="utf-8")
            hints.append(f"{plural(len(left_out), 'image')} left out: {out}/left_out.txt")
    print("\n".join(hints))


def check_there(splits: dict[str, Iterable[Sample]]) -> None:
    """Raise FileNotFoundError for missing image files at once, not after an hour of copying."""
    paths = [sample.image for split in splits.values() if isinstance(split, list) for sample in split
             if isinstance(sample.image, Path)]
    if missing := [path for path in paths if not os.path.exists(path)]:
        raise FileNotFoundError(f"{len(missing)} of {len(paths)} images are missing, first {missing[0]}: check "
                                f"--images, or leave them out by --skip-broken")


def run(args: argparse.Namespace) -> None:
    if args.source == "shards":
        images = list(dict.fromkeys(args.images))
        splits = {split: layouts.read(pattern, images, args.captions_key) for split in ("train", "val", "test")
                  if (pattern := getattr(args, split))}
        if not splits:
            raise ValueError("give at least one of --train, --val and --test")
    else:
        rows = read_karpathy(args.annotations, args.source, args.images)
        splits = {split: rows[split] for split in ("train", "val", "test") if split in rows}
        if not splits:
            raise ValueError(f"{args.annotations} names no images of train, val or test")
    if not args.skip_broken:
        check_there(splits)
    write(args.out, splits, [], args.join, args.skip_broken)

"""Data that open_clip_train cannot read, refused before the model is built.

The first samples are opened as training and validation will read them. Training leaves out pairs that are damaged, and
is refused if most are. Validation is refused if some are, as its numbers would be of other data.
"""
import os
from collections import deque
from collections.abc import Iterator
from itertools import islice, takewhile

from PIL import Image

from ..data.captions import captions_of, find_apart
from ..data.csv_pairs import Row, image_path, read_table
from ..data.images import sample_image
from ..data.paths import formats, is_shard, to_shards
from ..data.shards import file_names, find_shards, read_samples
from ..errors import Problem
from .openclip import version

LOOK, LOOK_SHARDS = 1000, 8  # rows or samples, and shards, that are opened before a run


def number_of_processes() -> int:
    """Return the number of processes that train together."""
    from open_clip_train.distributed import world_info_from_env
    return world_info_from_env()[2]


def check_size(pairs: int, args) -> None:
    """Raise ValueError for too few pairs for one step. OpenCLIP would save a model that was never trained."""
    processes = number_of_processes()
    if pairs < args.batch_size * processes * args.accum_freq:
        raise ValueError(f"{pairs} pairs are fewer than one step takes: --batch-size {args.batch_size} x {processes} "
                         f"processes x --accum-freq {args.accum_freq}. Lower one of them")


def has_own_keys(args) -> bool:
    """Return whether flags of OpenCLIP 4.x name the members of samples. OpenCLIP then reads images and captions."""
    return any(getattr(args, flag, usual) != usual for flag, usual in version.KEY_FLAGS.items())


def is_csv(path: str, args) -> bool:
    """Return whether OpenCLIP will read the data as a table."""
    return args.dataset_type == "csv" or args.dataset_type == "auto" and path.endswith((".csv", ".tsv"))


def check_csv(path: str, args, is_train: bool) -> None:
    """Check rows and empty cells. OpenCLIP would drop or join rows, and train on "nan" for an empty caption."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such file")
    try:
        rows = read_table(path, args.csv_img_key, args.csv_caption_key, args.csv_separator)
    except ValueError as problem:
        named = ", or name the columns by --csv-img-key and --csv-caption-key" * ("no columns" in str(problem))
        raise ValueError(f"{problem}{named}") from problem
    for what in ("image", "caption"):
        if empty := [row.line for row in rows if not getattr(row, what).strip()]:
            raise ValueError(f"{path} has {len(empty)} rows without {what}, the first in line {empty[0]}: fill or drop "
                             "them")
    shown, lacking = look_at_images(path, rows, not is_train)
    if len(lacking) > shown / 2 or lacking and not is_train:
        raise ValueError(f"{len(lacking)} of {shown} images that were looked at cannot be read. The first is "
                         f"{lacking[0]}")
    if is_train:
        check_size(len(rows), args)


def look_at_images(path: str, rows: list[Row], every: bool = False) -> tuple[int, list[str]]:
    """Open the images of `every` row, or of some all over the table. Returns their number, and what is wrong."""
    rows, wrong = rows[::1 if every else -(-len(rows) // LOOK)], []
    for row in rows:
        image = image_path(row.image)
        try:
            if not image.is_file():
                raise ValueError("it is a folder" if image.is_dir() else "no such file")
            Image.open(image, formats=formats()).close()
        except Image.DecompressionBombError:  # `decode_image` has the limit
            continue
        except Exception as problem:  # of any kind, as of a damaged AVIF
            why = f"it is no {', '.join(formats())}" if "cannot identify" in str(problem) else problem
            wrong.append(f"{path}, line {row.line}: {row.image}: {why}")
    return len(rows), wrong


def warn_of_rows(path: str, args) -> Iterator[str]:
    """Yield a warning if some images of a training table cannot be read."""
    shown, lacking = look_at_images(path, read_table(path, args.csv_img_key, args.csv_caption_key, args.csv_separator))
    if lacking:
        yield (f"{len(lacking)} of {shown} images that were looked at cannot be read, and are left out. The first is "
               f"{lacking[0]}")


def why_no_pair(shard: str) -> Problem:
    """Return why none of the first samples of a shard is an image with a caption, or None if one is."""
    why = None
    try:
        for sample in islice(read_samples(shard), LOOK):
            try:
                captions_of(sample)
                sample_image(sample)
                return None
            except ValueError as problem:
                why = why or f"no image with a caption in its first samples. The first is {problem}"
    except (ValueError, OSError) as problem:
        return str(problem)
    return find_apart(shard) or why or f"{shard} holds no sample"


def check_samples(shards: list[str], is_train: bool) -> None:
    """Check shards on this machine: the first samples of training, all names of validation."""
    here = [shard for shard in shards if os.path.isfile(shard)]
    if is_train:
        reasons = list(takewhile(bool, map(why_no_pair, here[:LOOK_SHARDS])))
        if reasons and len(reasons) == len(here[:LOOK_SHARDS]):
            raise ValueError(reasons[0])
        return
    for shard in here:
        deque(file_names(shard), 0)  # raises if the shard is cut off
        if problem := find_apart(shard) or why_no_pair(shard):
            raise ValueError(problem)


def check_shards(path: str, args, is_train: bool) -> None:
    """Check that the shards are there, are enough for all workers, and that their number of pairs is known."""
    from open_clip_train.data import get_dataset_size
    shards, processes = find_shards(path), number_of_processes()
    if is_train and len(shards) < max(1, args.workers) * processes and not args.dataset_resampled:
        most = len(shards) // processes
        raise ValueError(f"{len(shards)} shards are too few for {max(1, args.workers)} workers x {processes} "
                         "processes, each with its own: give " + (f"--workers {most}, " if most else "") +
                         "more shards, or --dataset-resampled")
    if is_train:
        if not args.train_num_samples and len({os.path.dirname(shard) for shard in shards}) > 1:
            raise ValueError("OpenCLIP counts the pairs of several folders by the sizes.json of the first: give "
                             "--train-num-samples")
        try:
            pairs = int(args.train_num_samples or get_dataset_size(path)[0] or 0)
        except (ValueError, TypeError, LookupError, RecursionError) as problem:
            raise ValueError(f"sizes.json beside {shards[0]} is damaged or lacks a shard ({problem}): give "
                             "--train-num-samples") from problem
        if pairs <= 0:
            raise ValueError(f"no sizes.json beside {shards[0]} says how many pairs there are: give "
                             "--train-num-samples")
        check_size(pairs, args)
    if not has_own_keys(args):
        check_samples(shards, is_train)


def find_data_problem(args) -> Problem:
    """Check --train-data and --val-data. OpenCLIP would wait forever for shards that it cannot open."""
    if args.dataset_type == "synthetic":
        if args.val_data or not args.train_num_samples:
            return "--dataset-type synthetic needs --train-num-samples and no --val-data"
        check_size(args.train_num_samples, args)
        return None
    if not (args.train_data or args.val_data or args.imagenet_val or args.imagenet_v2):
        return "no data: give --train-data, --val-data, or --dataset-type synthetic"
    for split, path in (("train", args.train_data), ("val", args.val_data)):
        try:
            if path:
                check_data(path, args, split)
        except (ValueError, OSError) as problem:
            return f"--{split}-data: {problem}"
    return None


def check_data(path: str, args, split: str) -> None:
    """Raise ValueError or OSError for data of a split that cannot be read."""
    if os.path.isdir(path):
        there = any(is_shard(name) for name in os.listdir(path))
        shards = f"its shards, {path.rstrip('/')}/{{00000..00007}}.tar"
        raise ValueError(f"{path} is a folder: give {shards if there else 'shards, made by ' + to_shards(path, split)}")
    if path.lower().endswith((".parquet", ".json", ".jsonl")):
        raise ValueError(f"{path} is no shard: {to_shards(path, split)}")
    if is_csv(path, args):
        check_csv(path, args, split == "train")
    elif args.dataset_type == "auto" and not path.endswith(".tar"):
        raise ValueError(f"{path} ends in neither .tar, .csv nor .tsv: give --dataset-type")
    else:
        check_shards(path, args, split == "train")

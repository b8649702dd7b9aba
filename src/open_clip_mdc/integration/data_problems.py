"""Training data that open_clip_train cannot read, refused before the model is built."""
import os

from ..data.csv_pairs import read_table
from ..data.paths import to_shards
from ..data.shards import find_shards
from .openclip import MAJOR

OWN_KEYS = {"json_text_key": None, "text_key": "txt", "image_key": "jpg;png;jpeg;webp"} if MAJOR > 3 else {}

def number_of_processes() -> int:
    """Return the number of processes that train together."""
    from open_clip_train.distributed import world_info_from_env
    return world_info_from_env()[2]


def find_size_problem(pairs: int, args) -> str | None:
    """Check that there are enough pairs for one step. Else OpenCLIP would save a model that was never trained."""
    processes = number_of_processes()
    if pairs >= args.batch_size * processes * args.accum_freq:
        return None
    return (f"{pairs} pairs are fewer than one step takes: --batch-size {args.batch_size} x {processes} processes x "
            f"--accum-freq {args.accum_freq}. Lower one of them")


def has_own_keys(args) -> bool:
    """Return whether flags of OpenCLIP 4.x name the members of samples. OpenCLIP then reads images and captions."""
    return any(getattr(args, flag, usual) != usual for flag, usual in OWN_KEYS.items())


def is_csv(path: str, args) -> bool:
    """Return whether OpenCLIP will read the data as a table."""
    return args.dataset_type == "csv" or args.dataset_type == "auto" and path.endswith((".csv", ".tsv"))


def find_csv_problem(path: str, args, is_train: bool) -> str | None:
    """Check rows and empty cells. OpenCLIP would drop or join rows, and train on "nan" for an empty caption."""
    if not os.path.isfile(path):
        return f"{path}: no such file"
    try:
        rows = read_table(path, args.csv_img_key, args.csv_caption_key, args.csv_separator)
    except ValueError as problem:
        named = ", or name the columns by --csv-img-key and --csv-caption-key"
        return f"{problem}{named}" if "no columns" in str(problem) else str(problem)
    for what in ("image", "caption"):
        empty = [row.line for row in rows if not getattr(row, what).strip()]
        if empty:
            return f"{path} has {len(empty)} rows without {what}, the first in line {empty[0]}: fill or drop them"
    return find_size_problem(len(rows), args) if is_train else None


def find_shard_problem(path: str, args, is_train: bool) -> str | None:
    """Check that the shards are there, are enough for all workers, and that their number of pairs is known."""
    from open_clip_train.data import get_dataset_size
    try:
        shards = find_shards(path)
    except FileNotFoundError as problem:
        return str(problem)
    if not is_train:
        return None
    workers, processes = max(1, args.workers), number_of_processes()
    if len(shards) < workers * processes and not args.dataset_resampled:
        most = len(shards) // processes
        return (f"{len(shards)} shards are too few for {workers} workers x {processes} processes, each with its own: "
                "give " + (f"--workers {most}, " if most else "") + "more shards, or --dataset-resampled")
    try:
        pairs = args.train_num_samples or get_dataset_size(path)[0] or 0
        if not pairs > 0:
            return f"no sizes.json beside {shards[0]} says how many pairs there are: give --train-num-samples"
        return find_size_problem(pairs, args)
    except KeyError as missing:
        return f"sizes.json beside {shards[0]} has no entry {missing}: give --train-num-samples"
    except (ValueError, TypeError, LookupError, RecursionError) as problem:
        return f"sizes.json beside {shards[0]} is damaged ({problem}): give --train-num-samples"


def find_data_problem(args) -> str | None:
    """Check --train-data and --val-data. OpenCLIP would wait forever for shards that it cannot open."""
    if args.dataset_type == "synthetic":
        if args.val_data or not args.train_num_samples:
            return "--dataset-type synthetic needs --train-num-samples and no --val-data"
        return find_size_problem(args.train_num_samples, args)
    if not (args.train_data or args.val_data or args.imagenet_val or args.imagenet_v2):
        return "no data: give --train-data, --val-data, or --dataset-type synthetic"
    for flag, path in (("--train-data", args.train_data), ("--val-data", args.val_data)):
        if not path:
            continue
        split = flag.removeprefix("--").removesuffix("-data")
        if os.path.isdir(path):
            shards = f"its shards, {path.rstrip('/')}/{{00000..00007}}.tar"
            there = any(name.endswith(".tar") for name in os.listdir(path))
            problem = f"{path} is a folder: give {shards if there else 'shards, made by ' + to_shards(path, split)}"
        elif path.lower().endswith((".parquet", ".json", ".jsonl")):
            problem = f"{path} is no shard: {to_shards(path, split)}"
        elif is_csv(path, args):
            problem = find_csv_problem(path, args, flag == "--train-data")
        elif args.dataset_type == "auto" and not path.endswith(".tar"):
            problem = f"{path} ends in neither .tar, .csv nor .tsv: give --dataset-type"
        else:
            problem = find_shard_problem(path, args, flag == "--train-data")
        if problem:
            return f"{flag}: {problem}"
    return None

"""Score a data set's images with their own captions and keep the best: `open_clip_mdc score --pairs`.

    open_clip_mdc score --pretrained RUN --pairs 'cc12m/{00000..01242}.tar' --out scores/
    open_clip_mdc score --pretrained RUN --pairs pairs.csv --out scores/ --top 0.3 --out-shards kept/

OUT/SHARD.parquet has a row per caption: key, caption, score = log p(c | i), blind = log p(c), debiased = score -
alpha * blind, all in nats, and num_tokens, the number of tokens in these sums. A CSV file has a table
OUT/NAME-00000.parquet, ... for every 10,000 rows. A caption that is longer than the model's context has no score. --top
keeps that share of the scored captions, by debiased score, and writes shards of them. With --plain or fewer than 32
images, blind and debiased are null.
"""
import argparse
from pathlib import Path

from ..bulk.units import Worker, find_units, write_all
from ..data.csv_pairs import TABLES, split_csv
from ..data.outputs import is_folder
from ..data.paths import SHARDS, check_kind, to_shards
from ..errors import complain
from .filter_pairs import write_kept
from .shared import check_jobs

GIVE = "give shards (KEY.jpg and KEY.txt in a .tar), or a table with the columns image,caption"


def check(args: argparse.Namespace) -> None:
    if bool(args.pairs) == bool(args.images or args.captions) or bool(args.images) != bool(args.captions):
        raise ValueError("give --images and --captions, to score every caption with every image, or --pairs, to score "
                         "images with their own captions")
    if args.pairs and not is_folder(args.out):
        raise ValueError(f"--out {args.out} should be a folder (no suffix), which gets one table per shard of --pairs")
    if not args.pairs and is_folder(args.out):
        raise ValueError(f"--out {args.out} should end in .csv or .jsonl: a folder is for --pairs")
    if not args.pairs and (args.top or args.out_shards):
        raise ValueError("--top and --out-shards need --pairs")
    if args.plain and (args.blind_images or args.top is not None or args.alpha != 1):
        raise ValueError("--plain leaves out the blind and the debiased score, which --blind-images, --alpha and --top "
                         "are about")
    check_jobs(args)


def run(args: argparse.Namespace, worker: Worker) -> None:
    check(args)
    if (args.top is None) != (args.out_shards is None):
        raise ValueError("--top and --out-shards go together: give the share to keep and the folder to write it to")
    units = []
    for path in args.pairs:
        if Path(path).is_file() and not path.lower().endswith((*TABLES, *SHARDS)):
            check_kind(path)
            raise ValueError(f"--pairs {path} is an image without a caption: {GIVE}")
        units += split_csv(Path(path)) if path.lower().endswith(TABLES) else find_units([path])
    if folders := [unit for unit in units if isinstance(unit, Path) and unit.is_dir()]:
        raise ValueError(f"--pairs {folders[0]} holds no shard: if its images have captions, make shards of them by "
                         f"{to_shards(folders[0])}")
    tables, skipped, count = write_all(units, args, worker)
    if args.top is not None:
        write_kept(units, tables, args)
    complain(skipped, count)

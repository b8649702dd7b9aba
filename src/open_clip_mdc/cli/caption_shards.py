"""Captions of shards as parquet tables: `open_clip_mdc caption --out FOLDER`.

    open_clip_mdc caption --pretrained RUN 'shards/{000..999}.tar' --out captions/ --engine local --jobs 8
    RAY_ADDRESS=ray://HOST:10001 open_clip_mdc caption --pretrained RUN 's/{000..999}.tar' --out out/ --engine ray

OUT/SHARD.parquet has the columns key, caption and tokens, as the lines of caption.py: tokens in reading order, each
with the step that revealed it and its log-probability.

Place in the paper: decoding, Eq. 6 and Sec. 3.2. Dimensions: B images.
"""
import argparse
from functools import partial

import pyarrow as pa

from ..bulk.units import Unit, files_of
from ..data.images import Batch
from .caption_rows import check, decoding_options, sampling_of, settings
from .shard_table import check_out, write_shard
from .shared import load_captioner

TOKEN = pa.struct([("token", pa.string()), ("step", pa.int32()), ("log_prob", pa.float32())])
SCHEMA = pa.schema([("key", pa.string()), ("caption", pa.string()), ("tokens", pa.list_(TOKEN))])


def worker(args: argparse.Namespace, units: list[Unit], number: int):
    """The function of a worker (engine.py)."""
    check(args)  # Ray's driver cannot
    loaded = load_captioner(args, number)
    files = [file for unit in units for file in files_of(unit)]
    options, blind = decoding_options(args, loaded, files)
    about = {"tool": "caption", **settings(args, loaded, blind)}
    check_out(args.out, about)

    def columns(batch: Batch) -> dict:
        rows = loaded.decode(batch.image, sampling=sampling_of(args, batch.names, loaded.device), **options)
        return {name: [row[name] for row in rows] for name in ("caption", "tokens")}

    return partial(write_shard, loaded=loaded, args=args, schema=SCHEMA, settings=about, columns=columns)

"""The likelihoods of a data set's own captions, a filter for it: `open_clip_mdc score --pairs`.

    open_clip_mdc score --pretrained RUN --pairs 'cc12m/{00000..01242}.tar' --out scores/
    open_clip_mdc score --pretrained RUN --pairs pairs.csv --out scores/ --top 0.3 --out-shards kept/

OUT/SHARD.parquet (of a CSV file OUT/NAME-00000.parquet, ... for every 10,000 rows) has a row per caption: key, caption,
score = log p(c | i), blind = log p(c), debiased = score - alpha * blind, in nats, and num_tokens, the tokens that these
are sums over. A caption that the tokenizer would cut, being longer than the context, has no score. --top keeps that
share of the scored captions, those with the highest debiased score, and writes shards of them; an image with several
kept captions keeps them all.

Place in the paper: Eq. 7 and the heuristic of Sec. 4.2. Dimensions: B images, C captions, L positions.
"""
import argparse
import json
from collections import defaultdict
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from ..checkpoints import fingerprint
from ..data.csv_pairs import CsvRows, read_csv, split_csv
from ..data.files import write_json
from ..data.images import Batch, named_samples
from ..data.shards import image_member, image_suffix, open_tar, read_stats, stats_file, write_sizes
from ..data.tables import read_rows
from ..pretrained import PretrainedCaptioner
from ..scoring import log_likelihood
from ..tokens import CAPTION_SEPARATOR, caption_lengths, not_whole
from . import bulk
from .common import blind_image, load_captioner
from .engine import make_each

SCORES = ("score", "blind", "debiased")
SCHEMA = pa.schema([("key", pa.string()), ("caption", pa.string()), *((name, pa.float32()) for name in SCORES),
                    ("num_tokens", pa.int32())])


def captions_of(text: str | None) -> list[str]:
    """Those of one KEY.txt; white space is a space."""
    return [" ".join(caption.split()) for caption in (text or "").split(CAPTION_SEPARATOR) if caption.strip()]


def score_columns(loaded: PretrainedCaptioner, blind: torch.Tensor, alpha: float, batch: Batch) -> dict:
    """A row for each caption of each image; columns of SCHEMA."""
    model, tokenizer = loaded.model, loaded.tokenizer
    captions = [captions_of(text) for text in batch.texts]
    fits = [[c for c in own if not not_whole(c, tokenizer, model.context_length)] for own in captions]
    some, most = [i for i, own in enumerate(fits) if own], max(map(len, fits))
    found: dict[tuple[int, str], tuple] = {}
    if some:
        # Rows of equal length: what is repeated costs nothing.
        text = tokenizer([(fits[i] + fits[i][:1] * most)[c] for i in some for c in range(most)])
        text = text.view(len(some), most, -1).to(loaded.device)
        with loaded.autocast():
            score = log_likelihood(model, batch.image[some], text).cpu()
            prior = log_likelihood(model, None, text, blind=blind).cpu()
        count = caption_lengths(text, model.vocab_size).cpu() - 1
        values = torch.stack((score, prior, score - alpha * prior), -1).tolist()
        for row, i in enumerate(some):
            for c, caption in enumerate(fits[i]):
                found[i, caption] = (*values[row][c], int(count[row, c]))
    rows = [(key, caption, *found.get((i, caption), (None,) * 4))
            for i, (key, own) in enumerate(zip(batch.names, captions, strict=True)) for caption in own]
    return {name: [row[place] for row in rows] for place, name in enumerate(SCHEMA.names)}


def worker(args: argparse.Namespace, units: list[bulk.Unit], number: int):
    """The function of a worker (engine.py)."""
    loaded = load_captioner(args, number)
    settings = {"tool": "score", "model": fingerprint(loaded.model), "precision": loaded.precision,
                "alpha": args.alpha, "blind": args.blind_images or bulk.unit_name(units[0])}
    bulk.check_out(args.out, settings)
    blind = blind_image(loaded, units, args, bulk.BLIND_IMAGES)
    return partial(bulk.write_shard, loaded=loaded, args=args, schema=SCHEMA, settings=settings,
                   columns=partial(score_columns, loaded, blind, args.alpha))


def threshold(tables: list[Path], top: float) -> float:
    """The debiased score that the share `top` of the scored captions has at least.

    Raises:
        ValueError: no caption has a score.
    """
    scores = [read_rows(path, ["debiased"])["debiased"].drop_null().to_numpy() for path in tables]
    scores = np.concatenate(scores)
    if not len(scores):
        raise ValueError("no caption has a score: nothing can be kept")
    place = len(scores) - max(1, round(top * len(scores)))
    return float(np.partition(scores, place)[place])


def keep(least: float, job: tuple, out: Path) -> None:
    """Writes the samples of a unit with a caption of this debiased score, and TARGET_stats.json: the threshold, and
    numbers of pairs (images) and captions kept.

    Args:
        job: the unit, its table, and the target's name.
        out: the file to write.
    """
    unit, table, target = job
    rows = read_rows(table, ["key", "caption", "debiased"]).to_pylist()
    kept: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row["debiased"] is not None and row["debiased"] >= least:
            kept[row["key"]].append(row["caption"])
    stats = {"source": str(unit.path if isinstance(unit, CsvRows) else unit), "threshold": least, "pairs": 0,
             "captions": 0}
    with open_tar(out) as writer:
        for key, suffix, image, metadata in images_of(unit, kept):
            writer.write({"__key__": f"{table.stem}{stats['pairs']:06d}", suffix: image, "json": metadata,
                          "txt": CAPTION_SEPARATOR.join(kept[key])})
            stats["pairs"] += 1
            stats["captions"] += len(kept[key])
    write_json(stats_file(target), stats)


def images_of(unit: bulk.Unit, kept: dict):
    """Key, suffix, bytes and KEY.json of the images of a unit that are kept."""
    if isinstance(unit, CsvRows):
        for key, path, _ in read_csv(unit):
            if key in kept:
                image = path.read_bytes()
                yield key, image_suffix(image), image, json.dumps({"image": key})
        return
    for key, sample in named_samples(unit):
        if key in kept:
            suffix = image_member(sample)
            yield key, suffix, sample[suffix], sample.get("json", b"{}")


def keeper(least: float, number: int):
    """The function of a worker (engine.py)."""
    return partial(keep, least)


def write_kept(units: list[bulk.Unit], tables: list[Path], args: argparse.Namespace) -> None:
    """The shards of --out-shards.

    Raises:
        ValueError: others are there.
    """
    least, folder = threshold(tables, args.top), Path(args.out_shards).absolute()
    targets = [folder / f"{table.stem}.tar" for table in tables]
    work = [((unit, table, target), target) for unit, table, target in zip(units, tables, targets, strict=True)]
    stats = []
    for target in make_each(partial(keeper, least), work, args):
        stats.append(read_stats(target))
        if stats[-1].get("threshold") != least:
            raise ValueError(f"{target} holds what had {stats[-1].get('threshold')} or more, and --top {args.top} is "
                             f"{least}: give another --out-shards")
    write_sizes(folder)
    print(f"{sum(s['captions'] for s in stats)} captions of {sum(s['pairs'] for s in stats)} images with a debiased "
          f"score of {least:.3f} or more: {args.out_shards}")


def run(args: argparse.Namespace) -> None:
    """Writes a table of scores for each shard, and the shards of what --top keeps.

    Raises:
        ValueError: one of --top and --out-shards is missing, or a folder of images is given.
    """
    if (args.top is None) != (args.out_shards is None):
        raise ValueError("--top and --out-shards go together: the share to keep, and where to")
    units: list[bulk.Unit] = []
    for path in args.pairs:
        units += split_csv(Path(path)) if path.lower().endswith(".csv") else bulk.find_units([path])
    folders = [unit for unit in units if isinstance(unit, Path) and unit.is_dir()]
    if folders:
        raise ValueError(f"--pairs {folders[0]}: a folder of images has no captions; give shards, or a CSV file with "
                         f"the columns image,caption")
    tables = bulk.write_all(partial(worker, args, units), units, args)
    if args.top is not None:
        write_kept(units, tables, args)

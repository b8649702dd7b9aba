"""The paper's random subsets of Recap-DataComp, with the recaptioned text in the place of the alt text.

    open_clip_mdc prepare recap --shards 'recap/{00000..99999}.tar' --pairs 10000000 --out recap-wds --jobs 8

Reads shards as img2dataset writes them with --save_additional_columns '["re_caption"]': KEY.jpg and KEY.json. A seed
orders the shards at random; they are written in that order as OUT/00000.tar, 00001.tar, ... until there are as many
pairs as asked for, to the end of the shard. So 5 million pairs are the first shards of 10 million in the same folder:
the paper's 5, 10, 20 and 30 million are nested, and asking for more adds shards to what is there. Whatever is there is
not written again; an interrupted run resumes, and several may share a folder.
"""
import argparse
import json
import random
from concurrent.futures import ProcessPoolExecutor
from itertools import accumulate
from pathlib import Path

from tqdm import tqdm

from ..data.files import write_json
from ..data.shards import find_picture, find_shards, read_metadata, read_samples, shard_pattern, tar_writer


def recaption(source: str, target: Path) -> dict:
    """Writes one shard, and what is in it to TARGET_stats.json, unless it is there.

    Returns:
        source, and the numbers of pairs, of samples without_caption and without_picture.

    Raises:
        ValueError: the source is damaged, or the target was made from another shard.
    """
    record = target.with_name(f"{target.stem}_stats.json")
    if target.exists():
        stats = json.loads(record.read_text())
        if stats["source"] != source:
            raise ValueError(f"{target} was made from {stats['source']}, not from {source}: other --shards or another "
                             f"--seed need another --out")
        return stats
    stats = {"source": source, "pairs": 0, "without_caption": 0, "without_picture": 0}
    with tar_writer(target) as writer:
        for sample in read_samples(source):
            suffix, caption = find_picture(sample), read_metadata(sample).get("re_caption")
            text = " ".join(caption.split()) if isinstance(caption, str) else ""
            if not suffix or not text:
                stats["without_caption" if suffix else "without_picture"] += 1
                continue
            key = f"{target.stem}{stats['pairs']:06d}"  # our own; the source's is in its json
            writer.write({"__key__": key, suffix: sample[suffix], "txt": text, "json": sample["json"]})
            stats["pairs"] += 1
        write_json(record, stats)  # before the shard appears
    return stats


def write_sizes(out: Path) -> None:
    """sizes.json, where OpenCLIP reads the numbers of pairs, of all shards that are there, whoever wrote them."""
    records = {path.name: json.loads(path.with_name(f"{path.stem}_stats.json").read_text())
               for path in sorted(out.glob("*.tar"))}
    write_json(out / "sizes.json", {name: stats["pairs"] for name, stats in records.items()})


def run(args: argparse.Namespace) -> None:
    """Run `open_clip_mdc prepare recap`."""
    sources, out = find_shards(args.shards), Path(args.out)
    sources = random.Random(args.seed).sample(sources, len(sources))
    targets = [out / f"{number:05d}.tar" for number in range(len(sources))]
    done: list[dict] = []
    with ProcessPoolExecutor(args.jobs) as pool, tqdm(total=args.pairs, unit="pair") as bar:
        while len(done) < len(sources) and sum(stats["pairs"] for stats in done) < args.pairs:
            some = slice(len(done), len(done) + args.jobs)
            for stats in pool.map(recaption, sources[some], targets[some]):
                done.append(stats)
                bar.update(stats["pairs"])
    write_sizes(out)
    totals = list(accumulate(stats["pairs"] for stats in done))
    if totals[-1] < args.pairs:
        raise ValueError(f"all {len(sources)} shards hold {totals[-1]} pairs with a re_caption, fewer than --pairs "
                         f"{args.pairs}; they are in {out}")
    count = 1 + next(i for i, total in enumerate(totals) if total >= args.pairs)
    for what, why in (("without_caption", "no re_caption in their json"), ("without_picture", "no picture")):
        dropped = sum(stats[what] for stats in done[:count])
        if dropped:
            print(f"{dropped} samples left out: {why}")
    print(f"{totals[count - 1]} pairs: --train-data '{shard_pattern(out, count)}'")

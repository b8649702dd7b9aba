"""Draw the paper's random subsets of Recap-DataComp, with the recaptioned text instead of the alt text.

    python -m experiments.prepare_recap --shards 'recap/{00000..99999}.tar' --pairs 10000000 --out recap-wds --jobs 8

Reads shards that img2dataset wrote. With its --save_additional_columns '["re_caption"]' the text is in KEY.json. With
--caption_col re_caption, as in the data set's README, the text is KEY.txt, and no KEY.json has a re_caption. The seed
orders the shards at random. They are written in that order as OUT/00000.tar, 00001.tar, ... until there are --pairs
pairs. So the paper's 5, 10, 20 and 30 million are nested, and a larger --pairs adds shards to the folder.
"""
import argparse
import random
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

from open_clip_mdc.bulk.engine import make_each
from open_clip_mdc.cli.arguments import SHARDS, add
from open_clip_mdc.cli.shared import natural, positive
from open_clip_mdc.data import shards as tars
from open_clip_mdc.data.captions import is_text
from open_clip_mdc.data.files import write_json
from open_clip_mdc.data.shards import find_shards
from open_clip_mdc.errors import plural
from open_clip_mdc.progress import progress_bar

from . import tool


def re_caption(sample: dict, in_json: bool) -> str:
    text = tars.read_metadata(sample).get("re_caption") if in_json else \
        sample.get("txt", b"").decode("utf-8", "replace")
    return " ".join(text.split()) if is_text(text) else ""


def recaption(job: tuple[str, Path], part: Path) -> None:
    """Write a shard for `job` (source, target) to `part`, and its counts to TARGET_stats.json."""
    source, target = job
    in_json = any("re_caption" in tars.read_metadata(sample) for sample in tars.read_samples(source, ("json",)))
    stats = {"source": source, "text": "json" if in_json else "txt", "pairs": 0, "without_caption": 0,
             "without_image": 0}
    with tars.open_tar(part) as writer:
        for sample in tars.read_samples(source):
            suffix, text = tars.image_member(sample), re_caption(sample, in_json)
            if not suffix or not text:
                stats["without_caption" if suffix else "without_image"] += 1
                continue
            key = f"{target.stem}{stats['pairs']:06d}"  # a new one, as the source's key is in its json
            writer.write({"__key__": key, suffix: sample[suffix], "txt": text, "json": sample.get("json", b"{}")})
            stats["pairs"] += 1
    write_json(tars.stats_file(target), stats, follow=False)  # before the shard appears, so that none lacks it


def worker(number: int) -> Callable:
    return recaption


def run(args: argparse.Namespace) -> None:
    sources, out = find_shards(args.shards), Path(args.out).absolute()
    sources = random.Random(args.seed).sample(sources, len(sources))
    targets = [out / f"{number:05d}.tar" for number in range(len(sources))]
    done = []
    with progress_bar(total=args.pairs, what="recap", unit="pair") as bar:
        while len(done) < len(sources) and sum(stats["pairs"] for stats in done) < args.pairs:
            missing, most = args.pairs - sum(counts := [stats["pairs"] for stats in done]), max([1, *counts])
            some = slice(len(done), len(done) + max(args.jobs or 1, missing // most if done else 0))
            work = [((source, target), target) for source, target in zip(sources[some], targets[some], strict=True)]
            list(make_each(worker, work, args.jobs))
            for (source, target), _ in work:
                done.append(tars.read_stats(target))
                if done[-1]["source"] != source:
                    raise ValueError(f"{target} was made from {done[-1]['source']}, not from {source}: for other "
                                     f"--shards or another --seed give another --out")
                bar.update(done[-1]["pairs"])
    tars.write_sizes(out)
    totals = list(accumulate(stats["pairs"] for stats in done))
    if totals[-1] < args.pairs:
        raise ValueError(f"all {len(sources)} shards hold {totals[-1]} pairs with a re_caption, fewer than --pairs "
                         f"{args.pairs} (they are in {out})")
    count = 1 + next(i for i, total in enumerate(totals) if total >= args.pairs)
    if from_txt := sum(stats["text"] == "txt" for stats in done[:count]):
        print(f"{from_txt} of {count} shards have no re_caption in any KEY.json: their text is KEY.txt")
    for what, why in (("without_caption", "no re_caption"), ("without_image", "no image")):
        if dropped := sum(stats[what] for stats in done[:count]):
            print(f"{plural(dropped, 'sample')} left out: {why}")
    print(f"{plural(totals[count - 1], 'pair')}: --train-data '{tars.shard_pattern(args.out, count)}'")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shards", required=True, help=f"{SHARDS}, of Recap-DataComp")
    parser.add_argument("--out", required=True, help="folder to write, or to resume")
    parser.add_argument("--pairs", type=positive, required=True,
                       help="number of image-text pairs to write, rounded up to whole shards")
    parser.add_argument("--seed", type=natural, default=0,
                       help="random seed of the order of shards (default: %(default)s)")
    add(parser, "jobs")


def main(argv: list[str] | None = None) -> None:
    tool.main("experiments.prepare_recap", __doc__, add_flags, run, {"out": ()}, argv)


if __name__ == "__main__":
    main()

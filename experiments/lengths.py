"""Count the tokens of the captions of webdatasets, and draw their histogram (Fig. 3 of the paper).

    python -m experiments.lengths 'cc12m/{00000..01242}.tar' 'recap/{000..099}.tar' --names CC12M Recap

Lengths include SOT and EOT, and are before truncation. Only the KEY.txt members are read. No image is decoded.
"""
import argparse
import os
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import open_clip
import pandas as pd
from matplotlib.figure import Figure
from open_clip.tokenizer import SimpleTokenizer

from open_clip_mdc.cli.arguments import SHARDS
from open_clip_mdc.data.captions import captioned, warnings_of
from open_clip_mdc.data.files import new_file
from open_clip_mdc.data.outputs import Default
from open_clip_mdc.data.shards import find_shards, read_samples
from open_clip_mdc.integration.patches import register
from open_clip_mdc.progress import progress_bar

from . import tool

PERCENTILES = (5, 25, 50, 75, 95, 99)


def caption_lengths(shards: Sequence[str], tokenizer: SimpleTokenizer) -> np.ndarray:
    """Return token counts [N] of all captions in the shards, SOT and EOT included, before truncation."""
    samples = (sample for shard in progress_bar(shards, os.path.dirname(shards[0]), "shard")
               for sample in read_samples(shard, ("txt",)))
    lengths = [len(tokenizer.encode(text)) + 2
               for _, captions in captioned(samples, with_image=False) for text in captions]
    if not lengths:
        raise ValueError(f"{shards[0]}: no caption (KEY.txt) in {len(shards)} shard(s)")
    return np.array(lengths)


def length_table(names: Sequence[str], lengths: Sequence[np.ndarray], context: int = 77) -> pd.DataFrame:
    rows = [{
        "captions": len(values), "mean": values.mean(), **{f"p{p}": np.percentile(values, p) for p in PERCENTILES},
        "max": values.max(), f"> {context} (%)": 100 * (values > context).mean(),
    } for values in lengths]
    return pd.DataFrame(rows, index=list(names))


def draw_histogram(path: str | Path, names: Sequence[str], lengths: Sequence[np.ndarray], context: int = 77) -> None:
    top = max(int(np.percentile(values, 99.9)) for values in lengths) + 2
    width = max(1, top // 100)
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for name, values in zip(names, lengths, strict=True):
        share = np.full(len(values), 100 / len(values) / width)
        label = f"{name}: mean {values.mean():.1f}, n = {len(values):,}"
        edges = np.arange(0, top + width, width) - 0.5  # whole numbers lie inside the bins
        axes.hist(values, edges, weights=share, histtype="stepfilled", alpha=0.4, label=label)
    if top > context:
        axes.axvline(context, color="black", linestyle="--", linewidth=1, label=f"context: {context}")
    axes.set(xlabel="tokens per caption (with SOT and EOT)", ylabel="captions of each length (%)", xlim=(0, top))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", frameon=False)  # the bars may be anywhere in the axes
    with new_file(path) as partial:
        figure.savefig(partial, format="png", dpi=150)


def run(args: argparse.Namespace) -> None:
    sets = [find_shards(pattern) for pattern in args.shards]
    names = args.names or [os.path.dirname(shards[0]) or shards[0] for shards in sets]
    if len(names) != len(sets):
        raise ValueError(f"--names has {len(names)} names for {len(sets)} data sets: give one name each, and quote the "
                         "patterns of shards")
    register()
    tokenizer = open_clip.get_tokenizer(args.tokenizer)
    if open_clip.get_model_config(args.tokenizer) is None or not isinstance(tokenizer, SimpleTokenizer):
        raise ValueError(f"--tokenizer {args.tokenizer}: no model with a BPE tokenizer like CLIP's")
    for warning in chain.from_iterable(map(warnings_of, sets)):
        print(f"warning: {warning}", file=sys.stderr)
    lengths = [caption_lengths(shards, tokenizer) for shards in sets]
    context = tokenizer.context_length
    print(length_table(names, lengths, context).round(1).to_string())
    draw_histogram(args.out, names, lengths, context)
    print(f"histogram: {args.out}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shards", nargs="+", metavar="SHARDS", help=f"{SHARDS}, one data set each")
    parser.add_argument("--names", nargs="+", help="names of the data sets (default: their folders)")
    parser.add_argument("--out", default=Default("lengths.png"), help="histogram to write (default: %(default)s)")
    parser.add_argument("--tokenizer", default="ViT-B-32", metavar="MODEL",
                        help="model whose tokenizer counts the tokens (default: %(default)s, CLIP's BPE)")


def main(argv: list[str] | None = None) -> None:
    tool.main("experiments.lengths", __doc__, add_flags, run, {"out": (".png",)}, argv)


if __name__ == "__main__":
    main()

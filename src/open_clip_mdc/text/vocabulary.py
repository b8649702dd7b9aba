"""Cuts CLIP's BPE down to given words, as logits of all 49,408 ids would be most of a small model's compute.

The files in this package are made by

    python -c "from open_clip_mdc.text.vocabulary import write; from open_clip_mdc.scenes import plain, rich
    write('scenes_bpe.txt.gz', plain.caption_words()); write('rich_bpe.txt.gz', rich.caption_words())"
    python -m experiments.flickr8k bpe --shards 'flickr8k/train/{00000..00005}.tar' --out flickr8k_bpe.txt.gz
"""
import gzip
from collections.abc import Iterable
from pathlib import Path

from open_clip.tokenizer import SimpleTokenizer


def clip_merges(words: Iterable[str]) -> list[tuple[str, str]]:
    """Return the merges of CLIP's BPE, in its order, that make these words. Each must be one token of CLIP's."""
    ranks = SimpleTokenizer().bpe_ranks
    made_by = {"".join(merge): merge for merge in ranks}  # no two merges make the same piece
    pieces, used = [f"{word}</w>" for word in words], set()
    while pieces:
        # A piece is made of two shorter ones, down to single bytes, which need no merge.
        merge = made_by.get(pieces.pop())
        if merge:
            used.add(merge)
            pieces += merge
    return sorted(used, key=ranks.get)


def write_merges(path: str | Path, merges: Iterable[tuple[str, str]]) -> None:
    """Write merges, in this order, to a file that OpenCLIP's SimpleTokenizer reads as its `bpe_path`."""
    lines = ["#version: 0.2", *map(" ".join, merges)]
    with open(path, "wb") as stream, gzip.GzipFile("", "wb", fileobj=stream, mtime=0) as packed:
        packed.write("\n".join(lines).encode())


def write(path: str | Path, words: Iterable[str]) -> int:
    """Write the merges that these words need, and return the size of the vocabulary."""
    write_merges(path, clip_merges(words))
    return SimpleTokenizer(bpe_path=str(path)).vocab_size

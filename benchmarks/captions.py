"""Return captions to measure with: real ones from a file, or made-up ones with the lengths of Flickr8k's."""
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from open_clip_mdc.text.special_tokens import eot_id, sot_id

WORDS = ("a the an in on with of and two dog man girl boy child woman people ball water snow grass street red black "
         "white brown blue running jumping standing playing sitting wearing holding at near through large").split()
MEAN, SPREAD = 14.1, 0.28  # tokens of Flickr8k's test captions: their mean, and the standard deviation of their log
LONG = 12  # this many captions joined have more than 77 tokens


def lengths(number: int, mean: float = MEAN, seed: int = 0) -> np.ndarray:
    """Return numbers of tokens, SOT and EOT included, distributed like Flickr8k's: log-normal, from 4 to 77."""
    tokens = np.exp(np.random.default_rng(seed).normal(np.log(mean), SPREAD, number))
    for _ in range(20):  # clipping to 4 and 77 moves the mean, so it is corrected until it stays
        tokens = (tokens * mean / tokens.mean()).clip(4, 77)
    return tokens.round().astype(int)


def random_text(number: int, vocab_size: int, mean: float = MEAN, seed: int = 0) -> Tensor:
    rng = np.random.default_rng(seed)
    text = torch.zeros(number, 77, dtype=torch.long)
    for row, length in zip(text, lengths(number, mean, seed), strict=True):
        row[:length] = torch.from_numpy(rng.integers(1, vocab_size - 2, length))
        row[0], row[length - 1] = sot_id(vocab_size), eot_id(vocab_size)
    return text


def read_captions(path: str | None) -> list[str]:
    if not path:
        rng = np.random.default_rng(0)
        return [" ".join(rng.choice(WORDS, length - 2)) for length in lengths(5000)]
    text = Path(path).read_text(encoding="utf-8")
    captions = ([row["caption"] for row in json.loads(text)["annotations"]] if path.endswith(".json")
                else [line for line in text.splitlines() if line.strip()])
    if not captions:
        raise ValueError(f"--captions {path}: no caption in it")
    return captions


def evenly_spaced(captions: list[str], number: int, long: bool = False) -> list[str]:
    """Return `number` captions at even distances in the list. Long ones join neighbours until 77 tokens are full."""
    stride = max(1, len(captions) // number)
    starts = [i * stride % len(captions) for i in range(number)]
    return [" ".join(captions[i:i + LONG]) if long else captions[i] for i in starts]

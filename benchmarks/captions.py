"""Captions to measure with: real ones from a file, or a rendered twin of the same lengths where there is no file."""
import json
from pathlib import Path

import numpy as np

WORDS = ("a the an in on with of and two dog man girl boy child woman people ball water snow grass street red black "
         "white brown blue running jumping standing playing sitting wearing holding at near through large").split()
LONG = 12  # captions joined: more than 77 tokens


def rendered_captions(number: int = 5000, seed: int = 0) -> list[str]:
    """Words in a row, as many as Flickr8k's captions have (log-normal, 12 on average, 4 to 37 tokens)."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(2.42, 0.335, number)).round().clip(2, 35).astype(int)
    return [" ".join(rng.choice(WORDS, length)) for length in lengths]


def read_captions(path: str | None) -> list[str]:
    """Captions of a text file (one a line) or of a COCO captions json; rendered ones if there is no path.

    Raises:
        ValueError: the file holds no caption.
    """
    if not path:
        return rendered_captions()
    text = Path(path).read_text(encoding="utf-8")
    captions = ([row["caption"] for row in json.loads(text)["annotations"]] if path.endswith(".json")
                else [line for line in text.splitlines() if line.strip()])
    if not captions:
        raise ValueError(f"--captions {path}: no caption in it")
    return captions


def spread(captions: list[str], number: int, long: bool = False) -> list[str]:
    """`number` captions at even distances; long ones join their neighbours until 77 tokens are full."""
    stride = max(1, len(captions) // number)
    starts = [i * stride % len(captions) for i in range(number)]
    return [" ".join(captions[i:i + LONG]) if long else captions[i] for i in starts]

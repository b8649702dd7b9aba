"""Cache the outputs of image encoders for every image of a split, one file per batch.

FOLDER/KEY/NUMBER.safetensors holds a batch's tensors, memory-mapped, with tokens in 16 bit. KEY is a hash of everything
that decides them (`features.cache_key`). A file is written whole or not at all. So a resumed pass encodes only what is
missing, and processes share the batches.

Dimensions: B images of a batch, N images, R rows.
"""
import itertools
import json
from argparse import Namespace
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from open_clip_mdc.data.cache import name_of, read_tensors
from open_clip_mdc.data.files import write_json
from open_clip_mdc.data.weights import save_tensors

from .distributed import everywhere, merge, own_batches
from .features import Encode, Tensors, encode_batch

ROWS = 64  # of a part
MOST_OPEN = 16_000  # files that are mapped at once, of some tensors each. Linux allows a process 65,530 maps


class TokenCache:
    """The tensors of a split, by name. Targets are class ids, long [N], or N masks, uint8 [height, width]."""

    def __init__(self, files: list[Path]):
        self.files = files
        self.part = lru_cache(MOST_OPEN)(lambda number: read_tensors(files[number]))
        lengths = [len(next(x for name, x in self.part(number).items() if not name.startswith("mask.")))
                   for number in range(len(files))]
        self.ends = list(itertools.accumulate(lengths))

    def __len__(self) -> int:
        return self.ends[-1]

    def column(self, name: str) -> Tensor:
        """Return a tensor of all images, [N, ...], read into memory."""
        first = self.part(0)[name]
        column = first.new_empty(len(self), *first.shape[1:])
        for number, end in enumerate(self.ends):
            own = self.part(number)[name]
            column[end - len(own):end] = own
        return column

    def rows(self, name: str, which: Iterable[int]) -> Tensor:
        """Return a tensor of the images `which`, float32 [R, ...], read from disk."""
        return torch.stack([part[name][row] for part, row in map(self._place, which)]).float()

    def masks(self, which: Iterable[int]) -> list[Tensor]:
        return [part[f"mask.{row}"] for part, row in map(self._place, which)]

    def batches(self, name: str) -> Iterator[Tensor]:
        """Yield the tensor of all rows, in order and in parts."""
        for rows in torch.arange(len(self)).split(ROWS):
            yield self.rows(name, rows.tolist())

    def _place(self, row: int) -> tuple[Tensors, int]:
        number = bisect_right(self.ends, row)
        return self.part(number), row - (self.ends[number - 1] if number else 0)


def load(key: dict, dataloader: Iterable, encode: Encode, args: Namespace) -> TokenCache:
    """Return the cache of a key, after encoding the batches that it lacks.

    Targets of the loader are class ids, or lists of masks. Raises ValueError if the loader is empty, or a feature is
    not finite.
    """
    place, desc = Path(args.feature_root, f"{key['split']}-tokens-{name_of(key)}"), f"{key['split']} tokens"
    place.mkdir(parents=True, exist_ok=True)
    about = place / "about.json"  # written last, and tells people what the folder holds
    found = sorted(place.glob("*.safetensors"))
    whole = {"batches": len(found), "key": key}
    if everywhere(about.exists() and about.read_text() == json.dumps(whole)):
        return TokenCache(found)
    numbers = []
    for number, (images, targets) in own_batches(dataloader, desc):
        path = place / f"{number:08d}.safetensors"
        if not path.exists():
            save_tensors(path, encode_batch(encode, images, targets, args, desc))
        numbers.append((number, number))
    count = len(merge(numbers))
    if not count:
        raise ValueError(f"{desc}: the data set is empty")
    write_json(about, {"batches": count, "key": key})
    return TokenCache(sorted(place.glob("*.safetensors")))

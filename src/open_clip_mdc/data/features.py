"""Patch tokens of images in 16 bit, found by the hash of an image's bytes.

PLACE/NAME.safetensors holds tokens and hashes of some images, memory-mapped. It appears once it is complete.

Dimensions: B images of a file, P patches, D width.
"""
import hashlib
from collections.abc import Callable, Iterable
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from . import cache
from .files import check_readable, hash_file
from .fingerprint import fingerprint, text_of
from .weights import save_tensors

DIGEST = "S16"  # numpy's bytes, which end in zeros. So all 16 are compared


def digest(image: bytes | Path | BytesIO) -> bytes:
    """Return the hash that identifies an image, 16 bytes, by its bytes or its file."""
    if isinstance(image, Path):
        check_readable(image)
        return bytes.fromhex(hash_file(image, "blake2b", digest_size=16))
    return hashlib.blake2b(image.getbuffer() if isinstance(image, BytesIO) else image, digest_size=16).digest()


def place_of(folder: Path, tower: nn.Module, transform: Callable, precision: str) -> Path:
    """Return the folder, made if need be, of the tokens that a tower gives at these settings."""
    place = folder / cache.name_of(f"{fingerprint(tower)}{text_of(transform)} {precision}", 32)
    place.mkdir(parents=True, exist_ok=True)
    return place


def save(file: Path, digests: Iterable[bytes], tokens: Tensor) -> None:
    """Write the tokens of images, float16 [B, P, D], and their hashes."""
    save_tensors(file, {"tokens": tokens,
                        "digests": torch.tensor([list(name) for name in digests], dtype=torch.uint8).view(-1, 16)})


class Features:
    """The tokens of the images in `files`."""

    def __init__(self, files: Iterable[Path] = ()):
        self.opened = {}
        self.index(list(files))

    def index(self, files: list[Path]) -> None:
        """Read the hashes of all files, sorted, with the place of each in the row of all images: 24 bytes an image."""
        found = [np.empty((0, 16), np.uint8), *(cache.read_tensors(file)["digests"].numpy().copy() for file in files)]
        self.files, self.starts = files, np.cumsum(list(map(len, found)))
        digests = np.ascontiguousarray(np.concatenate(found)[::-1]).view(DIGEST).ravel()
        # Of an image that comes again, the last place counts, which is the first one in the reversed order.
        self.digests, places = np.unique(digests, return_index=True)
        self.places = len(digests) - 1 - places

    def find(self, name: bytes) -> int | None:
        """Return the place of an image among all, by its `digest`. None if it is not there."""
        wanted = np.array(name, DIGEST)
        near = np.searchsorted(self.digests, wanted)
        return None if near == len(self.digests) or self.digests[near] != wanted else int(self.places[near])

    def __contains__(self, name: str) -> bool:
        """Return whether there are tokens of a `digest` in hexadecimal."""
        return self.find(bytes.fromhex(name)) is not None

    def tokens(self, name: bytes) -> Tensor | None:
        """Return the tokens [P, D] of an image by its `digest`. None if there are none."""
        if (place := self.find(name)) is None:
            return None
        number = np.searchsorted(self.starts, place, side="right") - 1
        file = self.files[number]
        if file not in self.opened:
            self.opened[file] = cache.read_tensors(file)["tokens"]
        return self.opened[file][place - self.starts[number]]

    def __getstate__(self) -> dict:  # for worker processes, which open the files themselves
        return {**vars(self), "opened": {}}

"""`--cache-features DIR`: compute the patch tokens of a locked image tower once per image, in 16 bit, for all runs.

DIR/KEY/SHA256.safetensors holds the tokens of a shard's images, memory-mapped. KEY is a hash of the tower's weights and
settings, the transform and the precision. SHA256 is that of the shard. So runs share the files that fit them. A file
appears once it is complete, so an interrupted run continues at the next shard. The hash of an image's bytes finds its
tokens. With `--unlock-image-after N` they are read in the first N epochs, and images in later ones.

Dimensions: B images, H and W pixels, P patches, D width.
"""
import hashlib
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from open_clip_train.data import SharedEpoch
from open_clip_train.precision import get_autocast
from PIL import Image
from torch import Tensor, nn

from ..data import cache
from ..data.captions import captioned
from ..data.files import lock, open_own, sha256
from ..data.fingerprint import fingerprint
from ..data.images import decoded, image_pairs
from ..data.shards import CAPTION_SEPARATOR, find_shards, image_member, read_samples
from ..data.weights import save_tensors
from ..models import towers

BATCH = 32
DIGEST = "S16"  # numpy's bytes, which end in zeros. So all 16 are compared


def digest(image: bytes) -> bytes:
    """Return the hash that identifies an image, 16 bytes."""
    return hashlib.blake2b(image, digest_size=16).digest()


class FeatureCache:
    """Patch tokens by image. After `fill`, `pairs` replaces the decoding of images in the first `epochs` epochs."""

    def __init__(self, folder: str, shards: str, transform: Callable[[Image.Image], Tensor],
                 epochs: int | None = None):
        self.folder, self.shards, self.transform = Path(folder), find_shards(shards), transform
        self.epochs = epochs or math.inf  # the tower is locked in these
        self.files: list[Path] = []
        self.opened: dict = {}

    def fill(self, tower: nn.Module, precision: str, device: str, rank: int = 0, world_size: int = 1) -> None:
        """Compute missing tokens, then index all files. Later calls do nothing.

        Each process begins at its part of the shards and then takes any that no other process computes. They wait for
        one another at the files' locks, as a shard may take longer than the time-out of a collective operation.
        """
        if self.files:
            return
        # The repr of a function in the transform holds its address in memory.
        settings = re.sub(r" at 0x\w+", "", f"{self.transform} {precision}")
        place = self.folder / cache.name_of(fingerprint(tower) + settings, 32)
        place.mkdir(parents=True, exist_ok=True)
        files, start, count = [place / f"{sha256(shard)}.safetensors" for shard in self.shards], time.monotonic(), 0
        pairs, first = list(zip(self.shards, files, strict=True)), rank * len(files) // world_size
        for wait in (False, True):  # at the end for shards that another process is computing
            for shard, file in pairs[first:] + pairs[:first]:
                if file.exists():  # without a lock, as the folder may be read-only
                    continue
                with open_own(hidden := place / f".{file.stem}.lock", "ab") as locked:
                    if not lock(locked.fileno(), wait):
                        continue
                    if not file.exists():
                        count += self._write(tower, shard, file, precision, device)
                    hidden.unlink(missing_ok=True)  # who waits for it, or makes another, finds the file
        self.index(files)
        logging.info(f"Features of {len(self.digests)} images in {place}: {count} computed here in "
                     f"{time.monotonic() - start:.1f} s")

    def index(self, files: list[Path]) -> None:
        """Read the hashes of all files, sorted, with the place of each in the row of all images: 24 bytes an image."""
        found = [cache.read_tensors(file)["digests"].numpy() for file in files]
        self.files, self.starts = files, np.cumsum([0, *map(len, found)])
        digests = np.ascontiguousarray(np.concatenate(found)[::-1]).view(DIGEST).ravel()
        # Of an image that comes again, the last place counts, which is the first one in the reversed order.
        self.digests, places = np.unique(digests, return_index=True)
        self.places = len(digests) - 1 - places

    @torch.no_grad()
    def _write(self, tower: nn.Module, shard: str, file: Path, precision: str, device: str) -> int:
        training, digests, tokens = tower.training, [], []
        tower.eval()
        for names, image in batches(shard, self.transform):
            with get_autocast(precision, device_type=torch.device(device).type)():
                found = towers.patch_tokens(tower, image.to(device))
            digests += names
            tokens.append(found.to("cpu", torch.float16))
        tower.train(training)
        known = towers.tower(tower)
        shape = known.num_patches, known.width
        save_tensors(file, {
            "tokens": torch.cat([torch.empty(0, *shape, dtype=torch.float16), *tokens]),
            "digests": torch.tensor([list(name) for name in digests], dtype=torch.uint8).view(-1, 16)})
        return len(digests)

    def pairs(self, samples: Iterable[dict], shared_epoch: SharedEpoch) -> Iterator[dict]:
        """Yield `image`, float16 tokens [P, D], and `text` of each sample. After the last locked epoch, `image_pairs`.

        A pass over samples is within one epoch, also in a worker that lasts for the whole run.
        """
        if shared_epoch.get_value() >= self.epochs:
            yield from image_pairs(samples)
            return
        for sample, captions in captioned(samples):
            tokens = self.tokens(sample[image_member(sample)])
            if tokens is not None:  # else the image cannot be read, which `batches` logged
                yield {"image": tokens, "text": CAPTION_SEPARATOR.join(captions)}

    def tokens(self, image: bytes) -> Tensor | None:
        """Return the tokens [P, D] of an image by its bytes, None if there are none."""
        wanted = np.array(digest(image), DIGEST)
        near = np.searchsorted(self.digests, wanted)
        if near == len(self.digests) or self.digests[near:near + 1] != wanted:
            return None
        place = self.places[near]
        number = np.searchsorted(self.starts, place, side="right") - 1
        file = self.files[number]
        if file not in self.opened:
            self.opened[file] = cache.read_tensors(file)["tokens"]
        return self.opened[file][place - self.starts[number]]

    def __getstate__(self) -> dict:  # for worker processes, which open the files themselves
        return {**vars(self), "opened": {}}


def batches(shard: str, transform: Callable[[Image.Image], Tensor]) -> Iterator[tuple[list[bytes], Tensor]]:
    """Yield hashes and preprocessed images [B, 3, H, W] of a shard, each once. Images that are broken are logged."""
    rows = decoded(distinct(read_samples(shard)), transform)
    while some := list(islice(rows, BATCH)):
        yield [digest(content) for content, _ in some], torch.stack([pair["image"] for _, pair in some])


def distinct(samples: Iterable[dict]) -> Iterator[dict]:
    """Yield the first sample of each image. A shard may have one sample for each caption of an image."""
    seen = set()
    for sample in samples:
        if (name := digest(sample[image_member(sample)])) not in seen:
            seen.add(name)
            yield sample

"""`--cache-features DIR`: compute the patch tokens of a locked image tower once per image, in 16 bit, for all runs.

DIR/KEY/SHA256.safetensors holds the tokens of a shard's images, memory-mapped. KEY is a hash of the tower's weights and
settings, the transform and the precision. SHA256 is that of the shard. So runs share the files that fit them. A file
appears once it is complete, so an interrupted run continues at the next shard. The hash of an image's bytes finds its
tokens. With `--unlock-image-after N` they are read in the first N epochs, and images in later ones.

Dimensions: B images, H and W pixels, P patches, D width.
"""
import logging
import math
import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from open_clip import get_input_dtype
from open_clip_train.data import SharedEpoch
from open_clip_train.precision import get_autocast
from torch import Tensor, nn

from ..bulk.locks import make_once
from ..data.captions import CAPTION_SEPARATOR, captioned
from ..data.features import Features, digest, place_of, save
from ..data.files import sha256
from ..data.images import Transform, decoded, image_pairs
from ..data.shards import file_names, find_shards, image_member, read_samples
from ..models import towers
from ..models.precision import in_eval_mode

BATCH = 32


class FeatureCache(Features):
    """Patch tokens by image. After `fill`, `pairs` replaces the decoding of images in the first `epochs` epochs."""

    def __init__(self, folder: str, shards: str, transform: Transform, epochs: int | None = None):
        self.folder, self.shards, self.transform = Path(folder), find_shards(shards), transform
        self.epochs = epochs or math.inf  # the tower is locked in these
        super().__init__()

    def fill(self, tower: nn.Module, precision: str, device: str, rank: int = 0, world_size: int = 1) -> None:
        """Compute missing tokens, then index all files. Later calls do nothing.

        Each process begins at its part of the shards and then takes any that no other process computes. They wait for
        one another at the files' locks, as a shard may take longer than the time-out of a collective operation.
        """
        if self.files:
            return
        place = place_of(self.folder, tower, self.transform, precision)
        files, start, counts = [place / f"{sha256(shard)}.safetensors" for shard in self.shards], time.monotonic(), []
        pairs, first = list(zip(self.shards, files, strict=True)), rank * len(files) // world_size
        for wait in (False, True):  # at the end for shards that another process is computing
            for shard, file in pairs[first:] + pairs[:first]:
                if not file.exists():  # without a lock, as the folder may be read-only
                    make_once(file, partial(self._write, counts, tower, shard, precision, device), wait)
        self.index(files)
        logging.info(f"Features of {len(self.digests)} images in {place}: {sum(counts)} computed here in "
                     f"{time.monotonic() - start:.1f} s")

    @torch.no_grad()
    def _write(self, counts: list[int], tower: nn.Module, shard: str, precision: str, device: str, file: Path) -> None:
        digests, known = [], towers.tower(tower)
        count = sum(1 for _ in file_names(shard))  # the most. Memory that nothing is written to is not taken
        tokens = torch.empty(count, known.num_patches, known.width, dtype=torch.float16)
        with in_eval_mode(tower):
            for names, image in batches(shard, self.transform):
                with get_autocast(precision, device_type=torch.device(device).type)():
                    tokens[len(digests):len(digests) + len(names)] = towers.patch_tokens(
                        tower, image.to(device, get_input_dtype(precision)))
                digests += names
        save(file, digests, tokens[:len(digests)])
        counts.append(len(digests))

    def pairs(self, samples: Iterable[dict], shared_epoch: SharedEpoch) -> Iterator[dict]:
        """Yield `image`, float16 tokens [P, D], and `text` of each sample. After the last locked epoch, `image_pairs`.

        A pass over samples is within one epoch, also in a worker that lasts for the whole run.
        """
        if shared_epoch.get_value() >= self.epochs:
            yield from image_pairs(samples)
            return
        for sample, captions in captioned(samples):
            tokens = self.tokens(digest(sample[image_member(sample)]))
            if tokens is not None:  # else the image cannot be read, which `batches` logged
                yield {"image": tokens, "text": CAPTION_SEPARATOR.join(captions)}


def batches(shard: str, transform: Transform) -> Iterator[tuple[list[bytes], Tensor]]:
    """Yield hashes and preprocessed images [B, 3, H, W] of a shard, each once. Images that are broken are logged."""
    rows = decoded(distinct(read_samples(shard)), transform)
    while some := list(islice(rows, BATCH)):
        yield [digest(content) for content, _ in some], torch.stack([pair["image"] for _, pair in some])


def distinct(samples: Iterable[dict]) -> Iterator[dict]:
    """Yield the first usable sample of each image. A shard may have one sample for each caption of an image."""
    seen = set()
    for sample, _ in captioned(samples):
        if (name := digest(sample[image_member(sample)])) not in seen:
            seen.add(name)
            yield sample

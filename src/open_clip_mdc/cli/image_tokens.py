"""`--cache-features DIR` of a command: the tower runs once an image, and later commands read its tokens in 16 bit.

The hash of an image's bytes finds its tokens, whatever its name. Training reads the same files.

Dimensions: B images, P patches, D width.
"""
import argparse
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor

from ..data.cache import name_of
from ..data.features import Features, digest, place_of, save
from ..data.images import Images, Source, as_it_is, open_image
from ..data.paths import ANY_IMAGES, find_images
from ..data.shards import count_images
from ..integration.pretrained import PretrainedCaptioner
from ..models.towers import patch_tower
from ..progress import progress_bar

Reader = Callable[..., Images]  # (paths, limit=None) -> batches of their images, or of these images' tokens


class ByContent(Images):
    """Images that are named by their hash, in hexadecimal. One that cannot be read is left out."""

    def batches(self) -> Iterator[tuple[int, list[Source]]]:
        for number, rows in super().batches():
            yield number, [Source(name.hex(), row.source) for row in rows if (name := hash_of(row.source))]


def hash_of(source: Path | BytesIO | ValueError) -> bytes | None:
    """Return the hash of an image's bytes, None if it cannot be read: `open_image` says why."""
    try:
        return None if isinstance(source, ValueError) else digest(source)
    except (ValueError, OSError):
        return None


def tokens_of(features: Features, source: Path | BytesIO | ValueError, name: str) -> Tensor:
    """Return the tokens [P, D] of an image. Raises ValueError if it cannot be read, or changed meanwhile."""
    known = hash_of(source)
    found = None if known is None else features.tokens(known)
    if found is None:
        open_image(source, name)
        raise ValueError(f"{name} changed while it was read: run the same command again")
    return found


@torch.no_grad()
def image_reader(args: argparse.Namespace, loaded: PretrainedCaptioner, paths: list) -> Reader:
    """Return the reader of images for `loaded.from_bytes`. With --cache-features it reads the tokens of `paths`.

    Those that DIR lacks are computed before, a file for each batch, so that an interrupted command resumes.
    """
    if not args.cache_features:
        return lambda paths, limit=None: Images(paths, loaded.to_bytes, args.batch_size, limit)
    place = place_of(Path(args.cache_features), patch_tower(loaded.model), loaded.transform, loaded.precision)
    features = Features(sorted(place.glob("*.safetensors")))
    if args.blind_images:
        paths = [*paths, *find_images(args.blind_images, ANY_IMAGES)]
    images = ByContent(paths, loaded.to_bytes, args.batch_size, known=features)
    with progress_bar(total=count_images(paths), what="images to encode") as bar:
        for batch in images.loader(args.workers):
            if batch.new:
                with loaded.autocast():
                    tokens = loaded.model.encode_image_tokens(loaded.from_bytes(batch.image))
                save(place / f"{name_of(''.join(batch.new))}.safetensors", map(bytes.fromhex, batch.new),
                     tokens.to("cpu", torch.float16))
            bar.update(len(batch.names))
    features.index(sorted(place.glob("*.safetensors")))
    return lambda paths, limit=None: Images(paths, as_it_is, args.batch_size, limit,
                                            opened=partial(tokens_of, features))

"""Read images from files, tables and webdataset shards, for training and the command-line tools.

Dimensions: B images, H and W pixels, L positions.
"""
import base64
import logging
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from .captions import CAPTION_SEPARATOR, captioned, find_apart, text_of, without_image
from .files import AnyPath, check_readable
from .paths import formats, is_shard
from .shards import image_member, image_suffix, read_samples
from .text import unique
from .workers import STUCK, fitting, image_bytes

if TYPE_CHECKING:
    from .csv_pairs import CsvRows

Transform = Callable[[Image.Image], Tensor]  # from an RGB image to what a model takes, [3, H, W]
Pairs = Iterator[tuple[Tensor, Tensor]]  # of an image and the ids of a caption, or batches of these
MAX_PIXELS = 160_000_000  # as the header says: the largest cameras have 151 million, and half a gigabyte is decoded
MAX_ASPECT = 100  # a narrower image, resized by its shorter side, would fill the memory


class MissingImages(ValueError):
    """Some samples of a shard have no image. The others are read."""


class Source(NamedTuple):
    """An image that is not decoded yet."""

    name: str
    source: Path | BytesIO | ValueError  # for `open_image`
    text: str | None = None  # of the sample in a shard, or of the row in a table


def named_samples(shard: Path, lacking: list[str] | None = None) -> Iterator[tuple[str, dict]]:
    """Yield name and sample of each with an image: KEY, or KEY#NUMBER if a key comes again. `lacking` lists others."""
    keys, lacking = set(), [] if lacking is None else lacking
    for number, sample in enumerate(read_samples(str(shard))):
        if image_member(sample):
            yield unique(sample["__key__"], number, keys), sample
        else:
            lacking.append(without_image(sample))
    if lacking and not keys:
        raise ValueError(f"{shard}: none of its {len(lacking)} samples has an image. The first is {lacking[0]}"
                         f"{why_apart(shard)}")


def why_apart(shard: AnyPath) -> str:
    """Return the end of a message about samples that lack a file, if it is elsewhere in the shard."""
    apart = find_apart(str(shard))
    return f". {apart}" if apart else ""


def read_images(paths: "list[Path | CsvRows]") -> Iterator[Source]:
    """Yield the images of files, tables and shards. Those of a shard are called SHARD::KEY (`named_samples`).

    After a shard that is cut off comes a ValueError that says so, and after one with samples that have no image a
    `MissingImages`.
    """
    for path in paths:
        if not isinstance(path, Path):
            from .csv_pairs import read_csv  # only tables need it
            yield from (Source(*row) for row in read_csv(path))
            continue
        if not is_shard(path):
            yield Source(str(path), path)
            continue
        lacking, no_texts = [], []
        try:
            for key, sample in named_samples(path, lacking):
                try:
                    text = text_of(sample)
                except ValueError as problem:
                    text = no_texts.append(str(problem))
                yield Source(f"{path}::{key}", BytesIO(sample[image_member(sample)]), text)
        except (ValueError, OSError) as problem:
            yield Source(str(path), ValueError(str(problem)))
        else:
            if lacking:
                yield Source(str(path), MissingImages(f"{path}: no image in {len(lacking)} of its samples. The first "
                                                      f"is {lacking[0]}{why_apart(path)}"))
        if no_texts:
            logging.warning("%d of the .txt in %s are no caption. The first is %s", len(no_texts), path, no_texts[0])


def eight_bits(image: Image.Image) -> Image.Image:
    """Return the upper 8 bits of 16-bit grey, as Pillow does for 16-bit colours. Its `convert` would clip at 255."""
    if image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PNG"):  # the latter in older Pillow
        return image.convert("I").point(lambda grey: grey / 256)
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} have no known range: save the image with 8 bits")
    return image


def upright(image: Image.Image) -> Image.Image:
    """Return the current frame as RGB, rotated as its EXIF orientation says. Every model sees images so."""
    if image.format == "TIFF":  # load it without its name: Pillow would memory-map grey pixels in rotated order
        name, image.filename = image.filename, ""
        image.load()
        image.filename = name
    image = ImageOps.exif_transpose(eight_bits(image))
    if image.mode == "P" and "transparency" in image.info:  # by way of RGBA, as Pillow would warn
        image = image.convert("RGBA")
    return image.convert("RGB")


def decode_image(source: Path | BytesIO, name: str | None = None,
                 box: tuple[int, int, int, int] | None = None, most: int = MAX_PIXELS) -> Image.Image:
    """Return an image as `upright` RGB. `box` is the part to keep: left, upper, right, lower in pixels as stored.

    Raises ValueError, which contains `name` or `source`, for a damaged image, a format that is not in `formats`, or
    more than `most` pixels, which are not decoded.
    """
    if isinstance(source, Path):
        check_readable(source)
    try:
        with Image.open(source, formats=formats()) as file:
            if file.width * file.height > most:
                raise ValueError(f"it has {file.width} x {file.height} pixels, and at most {most // 10 ** 6} million "
                                 "are read: make it smaller")
            return upright(file if box is None else file.crop(box))
    except UnidentifiedImageError as problem:  # its own text names an object in memory
        raise ValueError(f"cannot read the image {name or source}: it is no {', '.join(formats())}") from problem
    except Exception as problem:  # Pillow's decoders fail in many ways on damaged files
        raise ValueError(f"cannot read the image {name or source}: {problem}") from problem


def open_image(source: Path | BytesIO | ValueError | Image.Image, name: str | None = None,
               most: int = MAX_PIXELS) -> Image.Image:
    """Return an image as `upright` RGB.

    Raises ValueError if it cannot be decoded, has more than `most` pixels, or is much longer than wide.
    """
    if isinstance(source, ValueError):
        raise source
    if isinstance(source, Image.Image):
        try:
            image = upright(source)
        except OSError as problem:
            raise ValueError(f"cannot read the image {name or source}: {problem}") from problem
    else:
        image = decode_image(source, name, most=most)
    if not 0 < max(image.size) <= MAX_ASPECT * min(image.size):
        raise ValueError(f"cannot use the image {name or source}: it is {image.width} x {image.height} pixels")
    return image


class Batch(NamedTuple):
    """Decoded images, and the reasons why others cannot be read."""

    names: list[str]  # images that can be read
    image: Tensor | None  # [B, 3, H, W] for the names in `new`, or None if there are none
    other: Tensor | None  # the same images by another model's transform, if there is one
    new: list[str]
    thumbnails: list[str | None]  # one for each of `names`
    texts: list[str | None]  # one for each of `names`
    problems: list[str]  # why other images cannot be read
    damaged: list[str]  # those of the problems that are about shards that are cut off


@dataclass(eq=False, repr=False)
class Images(Dataset):
    """Batches of images in the order of `read_images`. The main process reads the files, and workers decode them."""

    paths: "list[Path | CsvRows]"
    transform: Callable  # the model's, from an RGB image to [3, H, W], with or without its last steps (`to_bytes`)
    batch_size: int
    limit: int | None = None  # number of images to read, from the first
    known: Container[str] = ()  # names of images that need not be opened, except for a thumbnail
    thumbnail: Callable[[Image.Image], str] | None = None  # returns the small image for a page
    other_transform: Callable | None = None  # of a second model that sees the same images
    seed: int | None = None  # for a random transform: each batch is seeded by this and its number
    opened: Callable | None = None  # gives from source and name what the transform takes (default: `open_image`)

    def batches(self) -> Iterator[tuple[int, list[Source]]]:
        """Yield the number and the undecoded images of each batch."""
        images = islice(read_images(self.paths), self.limit)
        yield from enumerate(iter(lambda: list(islice(images, self.batch_size)), []))

    def __getitem__(self, numbered: tuple[int, list[Source]]) -> Batch:
        number, rows = numbered
        with torch.random.fork_rng(devices=[], enabled=self.seed is not None):
            if self.seed is not None:
                torch.manual_seed(np.random.SeedSequence([self.seed, number]).generate_state(1).item())
            return self.decode(rows)

    def decode(self, rows: list[Source]) -> Batch:
        """Return a batch of which either no image or every image is new."""
        batch = self.decode_new(rows, self.known)
        # If only some are known, decode all: the random numbers of an image depend on those before it.
        return self.decode_new(rows, ()) if 0 < len(batch.new) < len(batch.names) else batch

    def decode_new(self, rows: list[Source], known: Container[str]) -> Batch:
        """Return a batch with tensors for the images that are not `known`."""
        names, images, others, new, thumbnails, texts, problems, damaged = [], [], [], [], [], [], [], []
        for name, source, text in rows:
            thumbnail = None
            try:
                if name not in known or self.thumbnail:
                    decoded = (self.opened or open_image)(source, name)
                    thumbnail = self.thumbnail and self.thumbnail(decoded)
                    if name not in known:
                        images.append(self.transform(decoded))
                        others += [self.other_transform(decoded)] if self.other_transform else []
                        new.append(name)
            except ValueError as problem:
                problems.append(str(problem))
                damaged += [str(problem)] * (isinstance(source, ValueError) and not isinstance(source, MissingImages))
                continue
            names.append(name)
            thumbnails.append(thumbnail)
            texts.append(text)
        image, other = (torch.stack(tensors) if tensors else None for tensors in (images, others))
        return Batch(names, image, other, new, thumbnails, texts, problems, damaged)

    def loader(self, workers: int) -> DataLoader:
        """Return a loader of batches, decoded by up to so many worker processes. With 0 this process decodes."""
        with torch.random.fork_rng(devices=[]):
            workers = workers and fitting(workers, self.batch_size * image_bytes(self.transform, self.other_transform))
        return DataLoader(self, sampler=one_ahead(self.batches()), batch_size=None, num_workers=workers,
                          collate_fn=as_it_is, pin_memory=torch.cuda.is_available(), timeout=STUCK * (workers > 0))


def one_ahead(items: Iterator) -> Iterator:
    """Yield items. A thread reads the next one while the caller waits for workers or the device."""
    end = object()
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, items, end)
        while (item := following.result()) is not end:
            following = thread.submit(next, items, end)
            yield item


def as_it_is(x: Any) -> Any:
    return x


def data_url(content: bytes, mime: str) -> str:
    """Return bytes as a data: URL."""
    return f"data:{mime};base64,{base64.b64encode(content).decode()}"


def sample_image(sample: dict) -> Image.Image:
    """Return the image of a shard's sample by `decode_image`, whose errors name the shard and the key."""
    return decode_image(BytesIO(sample[image_member(sample)]), f"{sample['__url__']}, sample {sample['__key__']}")


def read_pairs(shards: list[str], transform: Callable, tokenizer: Callable) -> Pairs:
    """Yield image [3, H, W] and caption [L] of each sample that has both. The first of several captions is taken."""
    for sample, captions in captioned(sample for shard in shards for sample in read_samples(shard)):
        yield transform(sample_image(sample)), tokenizer(captions[0])[0]


def decoded(samples: Iterable[dict], transform: Callable) -> Iterator[tuple[bytes, dict]]:
    """Yield the bytes of each `captioned` sample's image, and `image`, transformed, with `text`. Logs damaged ones."""
    for sample, captions in captioned(samples):
        try:
            image = transform(sample_image(sample))
        except ValueError as problem:
            logging.warning("Handling webdataset error (%r). Ignoring.", problem)
            continue
        yield sample[image_member(sample)], {"image": image, "text": CAPTION_SEPARATOR.join(captions)}


def image_pairs(samples: Iterable[dict]) -> Iterator[dict]:
    """Yield `image` and `text` of each sample that training can use."""
    return (pair for _, pair in decoded(samples, as_it_is))


def stored(image: bytes, name: str) -> tuple[str, bytes]:
    """Return suffix and bytes of an image to write to a shard: JPEG, PNG and WebP as they are, others as PNG."""
    try:
        return image_suffix(image), image
    except UnidentifiedImageError:
        return "png", encode_png(decode_image(BytesIO(image), name))


def batched(pairs: Pairs, size: int) -> Pairs:
    """Yield image [size, 3, H, W] and text [size, L]. The last batch may be smaller."""
    while rows := list(islice(pairs, size)):
        yield default_collate(rows)


def encode_png(image: Image.Image) -> bytes:
    """Return the bytes of a PNG file."""
    buffer = BytesIO()
    image.save(buffer, "png")
    return buffer.getvalue()

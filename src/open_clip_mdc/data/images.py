"""Images of files and of webdataset shards, for training and the tools.

Dimensions: B images, H and W pixels, L positions.
"""
import base64
import logging
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .csv_pairs import CsvRows, read_csv
from .paths import SHARDS, formats
from .shards import CAPTION_SEPARATOR, image_member, image_suffix, members, read_samples

MAX_ASPECT = 100  # resized to a model's height, what is narrower fills the memory


class Lacking(ValueError):
    """Samples of a shard have no image. The others are read."""


class Source(NamedTuple):
    name: str
    source: Path | BytesIO | ValueError  # what `open_image` takes
    text: str | None = None  # of its sample


def without_image(sample: dict) -> str:
    return f"sample {sample['__key__']} ({', '.join(members(sample))})"


def named_samples(shard: Path, lacking: list[str] | None = None) -> Iterator[tuple[str, dict]]:
    """Yield the samples with an image by KEY, or by KEY#NUMBER where a key comes again. Notes others in `lacking`."""
    keys: set[str] = set()
    lacking = [] if lacking is None else lacking
    for number, sample in enumerate(read_samples(str(shard))):
        key = sample["__key__"]
        if image_member(sample):
            yield key + f"#{number}" * (key in keys), sample
            keys.add(key)
        else:
            lacking.append(without_image(sample))
    if lacking and not keys:
        raise ValueError(f"{shard}: none of its {len(lacking)} samples has an image; the first is {lacking[0]}")


def read_images(paths: list[Path | CsvRows]) -> Iterator[Source]:
    """Yield files as they are, the rows of CSV files, and shards image by image, called SHARD::KEY (`named_samples`).

    A shard that breaks off is followed by a ValueError that says so, one with samples without an image by a Lacking.
    """
    for path in paths:
        if isinstance(path, CsvRows):
            yield from (Source(*row) for row in read_csv(path))
            continue
        if path.suffix.lower() not in SHARDS:
            yield Source(str(path), path)
            continue
        lacking: list[str] = []
        try:
            for key, sample in named_samples(path, lacking):
                text = sample.get("txt", b"").decode("utf-8-sig", errors="replace")
                yield Source(f"{path}::{key}", BytesIO(sample[image_member(sample)]), text)
        except (ValueError, OSError) as problem:
            yield Source(str(path), ValueError(str(problem)))
        else:
            if lacking:
                yield Source(str(path), Lacking(f"{path}: no image in {len(lacking)} of its samples; the first is "
                                                f"{lacking[0]}"))


def eight_bits(image: Image.Image) -> Image.Image:
    """Return 16-bit grey by its upper 8 bits, as Pillow reads 16-bit colours. Its `convert` cuts off at 255."""
    if image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PNG"):  # of older Pillow
        return image.convert("I").point(lambda grey: grey / 256)
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} have no known range: scale them to 8 bits")
    return image


def upright(image: Image.Image) -> Image.Image:
    """Return RGB, the way up that the camera noted (EXIF), of the frame at hand: what every model sees."""
    if image.format == "TIFF":  # Pillow maps a grey one on the disk into memory as if it were stored turned
        name, image.filename = image.filename, ""
        image.load()
        image.filename = name
    return ImageOps.exif_transpose(eight_bits(image)).convert("RGB")


def decode_image(source: Path | BytesIO, name: str | None = None,
                 box: tuple[int, int, int, int] | None = None) -> Image.Image:
    """Return RGB, `upright`. `box` is the part to keep: left, upper, right, lower in pixels as stored.

    Raises ValueError, with `name` or `source`, for what is none of `formats`, or damaged.
    """
    try:
        with Image.open(source, formats=formats()) as file:
            return upright(file if box is None else file.crop(box))
    except UnidentifiedImageError as problem:  # its text would name the object in memory
        raise ValueError(f"cannot read the image {name or source}: it is no {', '.join(formats())}") from problem
    except Exception as problem:  # Pillow's decoders fail in many ways on damaged files
        raise ValueError(f"cannot read the image {name or source}: {problem}") from problem


def open_image(source: Path | BytesIO | ValueError | Image.Image, name: str | None = None) -> Image.Image:
    """Return RGB, upright. Raises ValueError where it cannot be decoded, or is much longer than wide."""
    if isinstance(source, ValueError):
        raise source
    if isinstance(source, Image.Image):
        try:
            image = upright(source)
        except OSError as problem:
            raise ValueError(f"cannot read the image {name or source}: {problem}") from problem
    else:
        image = decode_image(source, name)
    if not 0 < max(image.size) <= MAX_ASPECT * min(image.size):
        raise ValueError(f"cannot use the image {name or source}: it is {image.width} x {image.height} pixels")
    return image


class Batch(NamedTuple):
    """Decoded images, and what could not be read."""

    names: list[str]  # of the images that can be read
    image: Tensor | None  # [B, 3, H, W], of those whose names are in `new`; None where there are none
    other: Tensor | None  # the same images by another model's transform, where there is one
    new: list[str]
    thumbnails: list[str | None]  # one for each name
    texts: list[str | None]  # one for each name
    problems: list[str]  # why others cannot be read
    damaged: list[str]  # shards that broke off, among the problems


@dataclass(eq=False, repr=False)
class Images(Dataset):
    """Batches of images in the order of `read_images`, which reads files once. Workers get them to decode."""

    paths: list[Path | CsvRows]
    transform: Callable  # of the model, from an RGB image to [3, H, W], or but for its last steps (`to_bytes`)
    batch_size: int
    limit: int | None = None  # only the first so many images
    known: Container[str] = ()  # names of images that are not needed, nor opened, unless for a thumbnail
    thumbnail: Callable[[Image.Image], str] | None = None  # makes the small image for a page
    other_transform: Callable | None = None  # of a second model that looks at the same images
    seed: int | None = None  # of a transform that draws: by it and a batch's number, not by the worker

    def batches(self) -> Iterator[tuple[int, list[Source]]]:
        """Yield the number and the undecoded images of each batch."""
        images = islice(read_images(self.paths), self.limit)
        yield from enumerate(iter(lambda: list(islice(images, self.batch_size)), []))

    def __getitem__(self, numbered: tuple[int, list[Source]]) -> Batch:
        number, rows = numbered
        with torch.random.fork_rng(devices=[], enabled=self.seed is not None):
            if self.seed is not None:
                torch.manual_seed(int(np.random.SeedSequence([self.seed, number]).generate_state(1)[0]))
            return self.decode(rows)

    def decode(self, rows: list[Source]) -> Batch:
        batch = self.decode_new(rows, self.known)
        # If some are known it is done again as a whole: what is drawn for an image depends on all.
        return self.decode_new(rows, ()) if 0 < len(batch.new) < len(batch.names) else batch

    def decode_new(self, rows: list[Source], known: Container[str]) -> Batch:
        names, images, others, new, thumbnails, texts, problems, damaged = [], [], [], [], [], [], [], []
        for name, source, text in rows:
            thumbnail = None
            try:
                if name not in known or self.thumbnail:
                    decoded = open_image(source, name)
                    thumbnail = self.thumbnail and self.thumbnail(decoded)
                    if name not in known:
                        images.append(self.transform(decoded))
                        others += [self.other_transform(decoded)] if self.other_transform else []
                        new.append(name)
            except ValueError as problem:
                problems.append(str(problem))
                damaged += [str(problem)] * (isinstance(source, ValueError) and not isinstance(source, Lacking))
                continue
            names.append(name)
            thumbnails.append(thumbnail)
            texts.append(text)
        image, other = (torch.stack(tensors) if tensors else None for tensors in (images, others))
        return Batch(names, image, other, new, thumbnails, texts, problems, damaged)

    def loader(self, workers: int) -> DataLoader:
        """Return batches decoded by so many processes. 0 is this one."""
        return DataLoader(self, sampler=one_ahead(self.batches()), batch_size=None, num_workers=workers,
                          collate_fn=_as_it_is, pin_memory=torch.cuda.is_available())


def one_ahead(items: Iterator) -> Iterator:
    """Yield items. A thread takes the next one while the caller waits for workers or for the device."""
    end = object()
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, items, end)
        while (item := following.result()) is not end:
            following = thread.submit(next, items, end)
            yield item


def _as_it_is(batch: Batch) -> Batch:
    return batch


def data_url(content: bytes, mime: str) -> str:
    return f"data:{mime};base64,{base64.b64encode(content).decode()}"


def captioned(samples: Iterable[dict]) -> Iterator[dict]:
    """Yield the samples that have an image and a text. The log counts the others and names the first."""
    lacking, first, usable = Counter(), None, set()
    try:
        for sample in samples:
            shard = sample["__url__"]
            if image_member(sample) and "txt" in sample:
                usable.add(shard)
                yield sample
            else:
                lacking[shard] += 1
                first = first or f"{shard}, {without_image(sample)}"
    finally:  # an epoch may end within a pass
        if lacking:
            logging.warning("Left out %d of the samples, in %d of the shards, as they have no image or no .txt. The "
                            "first is %s. Shards without any other sample: %d.", lacking.total(), len(lacking), first,
                            len(lacking.keys() - usable))


def read_pairs(shards: list[str], transform: Callable, tokenizer: Callable) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield image [3, H, W] and caption [L], the first of several, of each sample that has both, in order."""
    for sample in captioned(sample for shard in shards for sample in read_samples(shard)):
        image = decode_image(BytesIO(sample[image_member(sample)]), f"{sample['__url__']}::{sample['__key__']}")
        caption = sample["txt"].decode("utf-8-sig", errors="replace").split(CAPTION_SEPARATOR)[0]
        yield transform(image), tokenizer(caption)[0]


def image_pairs(samples: Iterable[dict]) -> Iterator[dict]:
    """Yield `image`, decoded, and `text` of each sample that is `captioned`. The log names what cannot be read."""
    for sample in captioned(samples):
        try:
            image = decode_image(BytesIO(sample[image_member(sample)]),
                                 f"{sample['__url__']}, sample {sample['__key__']}")
            yield {"image": image, "text": sample["txt"].decode("utf-8-sig")}
        except ValueError as problem:
            logging.warning("Handling webdataset error (%r). Ignoring.", problem)


def stored(image: bytes, name: str) -> tuple[str, bytes]:
    """Return suffix and bytes of an image for every reader of shards: JPEG, PNG, WebP as they are, others as PNG."""
    try:
        return image_suffix(image), image
    except UnidentifiedImageError:
        return "png", encode_png(decode_image(BytesIO(image), name))


def batched(pairs: Iterator[tuple[Tensor, Tensor]], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield image [size, 3, H, W] and text [size, L]. The last batch may be smaller."""
    while rows := list(islice(pairs, size)):
        yield tuple(map(torch.stack, zip(*rows, strict=True)))


def encode_png(image: Image.Image) -> bytes:
    buffer = BytesIO()
    image.save(buffer, "png")
    return buffer.getvalue()

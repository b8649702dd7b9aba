"""Images of files, folders, patterns and webdataset shards, for the tools that read other people's files.

Dimensions: H and W pixels, L positions.
"""
import glob
import os
from collections.abc import Callable, Iterator
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image, ImageOps, UnidentifiedImageError

from .shards import find_picture, read_samples

if TYPE_CHECKING:
    from torch import Tensor

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")  # named to Pillow: left to choose, it runs Ghostscript on an EPS
SHARDS = (".tar",)
MAX_ASPECT = 100  # resized to a model's height, what is narrower fills the memory


def find_pictures(paths: list[str], kinds: tuple[str, ...] = PICTURES) -> list[Path]:
    """Files as given, what patterns ("*.jpg", "{000..009}.tar") match, and the files in folders; each sorted.

    Args:
        kinds: suffixes of the files that are looked for in folders.

    Raises:
        FileNotFoundError: a path does not exist, a pattern matches nothing, or a folder holds nothing of these kinds.
    """
    from webdataset.shardlists import expand_urls  # imports torch
    found = []
    for path in paths:
        # What is there by that very name is no pattern: "holiday[1].jpg".
        for pattern in [path] if os.path.exists(path) else expand_urls(path):
            matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
            if not matches:
                raise FileNotFoundError(f"no picture or folder {pattern}")
            for match in map(Path, matches):
                files = [match] if not match.is_dir() else sorted(
                    p for p in match.rglob("*") if p.suffix.lower() in kinds and p.is_file())
                if not files:
                    raise FileNotFoundError(f"no picture in {match} ({', '.join(kinds)})")
                found += files
    return found


def read_pictures(paths: list[Path]) -> Iterator[tuple[str, Path | BytesIO | ValueError]]:
    """Names of pictures, and what `open_picture` takes: files as they are, shards picture by picture.

    The pictures of a shard are called SHARD::KEY. A shard that breaks off is followed by a ValueError that says so.
    """
    for path in paths:
        if path.suffix.lower() not in SHARDS:
            yield str(path), path
            continue
        try:
            for sample in read_samples(str(path.absolute())):  # absolute: a file may be called "pipe:COMMAND.tar"
                suffix = find_picture(sample)
                if suffix:
                    yield f"{path}::{sample['__key__']}", BytesIO(sample[suffix])
        except (ValueError, OSError) as problem:
            yield str(path), ValueError(str(problem))


def decode_picture(source: Path | BytesIO, name: str | None = None, upright: bool = False) -> Image.Image:
    """RGB; the only place where Pillow meets a file of others.

    Args:
        name: what the message calls it; by default `source`.
        upright: turn it the way up that the camera noted.

    Raises:
        ValueError: it is none of FORMATS, or damaged.
    """
    try:
        with Image.open(source, formats=FORMATS) as image:
            return (ImageOps.exif_transpose(image) if upright else image).convert("RGB")
    except UnidentifiedImageError as problem:  # its text would name the object in memory
        raise ValueError(f"cannot read the picture {name or source}: it is no {', '.join(FORMATS)}") from problem
    except Exception as problem:  # Pillow's decoders fail in many ways on damaged files
        raise ValueError(f"cannot read the picture {name or source}: {problem}") from problem


def open_picture(source: Path | BytesIO | ValueError, name: str | None = None) -> Image.Image:
    """RGB, upright, for `source` of `read_pictures`.

    Raises:
        ValueError: it cannot be decoded, or is much longer than wide.
    """
    if isinstance(source, ValueError):
        raise source
    picture = decode_picture(source, name, upright=True)
    if max(picture.size) > MAX_ASPECT * min(picture.size):
        raise ValueError(f"cannot use the picture {name or source}: it is {picture.width} x {picture.height} pixels")
    return picture


def read_pairs(shards: list[str], transform: Callable, tokenizer: Callable) -> Iterator[tuple["Tensor", "Tensor"]]:
    """Image [3, H, W] and caption [L], the first of several, of each sample that has both, in the shards' order.

    Raises:
        ValueError: a shard or an image is damaged.
    """
    from ..tokens import CAPTION_SEPARATOR
    for shard in shards:
        for sample in read_samples(shard):
            suffix = find_picture(sample)
            if suffix and "txt" in sample:
                image = decode_picture(BytesIO(sample[suffix]), f"{shard}::{sample['__key__']}")
                caption = sample["txt"].decode("utf-8", errors="replace").split(CAPTION_SEPARATOR)[0]
                yield transform(image), tokenizer(caption)[0]


def batched(pairs: Iterator[tuple["Tensor", "Tensor"]], size: int) -> Iterator[tuple["Tensor", "Tensor"]]:
    """Image [size, 3, H, W] and text [size, L]; the last batch may be smaller."""
    import torch
    while rows := list(islice(pairs, size)):
        yield tuple(map(torch.stack, zip(*rows, strict=True)))

"""Webdataset shards of captioned images: the one reader, the one writer. Read as a stream, written whole or not at all.

A sample is KEY.jpg (png, webp), KEY.txt and KEY.json. Names and contents of members are not to be trusted: what is
written gets keys of our own.
"""
import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlparse

from open_clip_train.data import group_by_keys_nothrow
from PIL import Image
from webdataset.gopen import gopen
from webdataset.shardlists import expand_urls
from webdataset.tariterators import base_plus_ext
from webdataset.writer import TarWriter

from .files import new_file, write_json

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")  # the members that OpenCLIP and clip_benchmark look for
INCOMPLETE = "not a complete tar file; fetch or write it again"
SUFFIXES = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}  # by Pillow's format; some JPEGs are an MPO


def find_shards(pattern: str) -> list[str]:
    """Expands a pattern as OpenCLIP does: "{000..009}" counts, "::" joins, a shard is a path or a URL.

    Raises:
        FileNotFoundError: a shard is not there.
    """
    shards = expand_urls(pattern)
    missing = [shard for shard in shards if not os.path.exists(shard) and not urlparse(shard).scheme]
    if missing:
        raise FileNotFoundError(f"{missing[0]}: no such shard ({len(missing)} of {len(shards)} of {pattern} missing)")
    return shards


@contextmanager
def open_tar(path: Path) -> Iterator[TarWriter]:
    """Writes to `path` as it goes; same samples, same bytes."""
    with path.open("wb") as stream, TarWriter(stream, user="", group="", mtime=0) as writer:
        yield writer


@contextmanager
def tar_writer(path: Path) -> Iterator[TarWriter]:
    """Writes a shard that appears as `path` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as partial, open_tar(partial) as writer:
        yield writer


def stats_file(shard: Path) -> Path:
    """Where the counts of a shard lie: written before it appears."""
    return shard.with_name(f"{shard.stem}_stats.json")


def read_stats(shard: Path) -> dict:
    """Where a shard comes from, and how many "pairs" it holds.

    Raises:
        ValueError: nothing says so.
    """
    try:
        return json.loads(stats_file(shard).read_text())
    except (OSError, ValueError) as problem:
        raise ValueError(f"{shard} has no {stats_file(shard).name} beside it, so something else wrote it: give another "
                         f"folder") from problem


def write_sizes(folder: Path) -> None:
    """sizes.json, where OpenCLIP reads the numbers of pairs, of all shards that are there, whoever wrote them."""
    write_json(folder / "sizes.json", {path.name: read_stats(path)["pairs"] for path in sorted(folder.glob("*.tar"))})


class Header(tarfile.TarInfo):
    """Of a member, for `tarfile.open(tarinfo=Header)`: where a damaged one, or nothing, stands in its place, tarfile by
    itself sees the end of the archive. Here zeros are the end, and all else is an error."""

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> "Header":
        """As tarfile's, of a block of 512 bytes; raises tarfile.ReadError for one that is damaged or missing."""
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as problem:
            if buf == bytes(tarfile.BLOCKSIZE):
                raise
            raise tarfile.ReadError(str(problem)) from problem


def read_members(stream: BinaryIO, wanted: Callable[[str], bool]) -> Iterator[dict]:
    """The files of a tar stream, as `webdataset.tariterators.tar_file_iterator`: fname and data, without its own meta
    data, but to the end or to an error."""
    with tarfile.open(fileobj=stream, mode="r|*", tarinfo=Header) as archive:
        for member in archive:
            if member.isreg() and not re.match(r"__[^/]*__($|/)", member.name) and wanted(member.name):
                yield {"fname": member.name, "data": archive.extractfile(member).read()}
            archive.members.clear()  # they would add up


def read_samples(shard: str, suffixes: tuple[str, ...] | None = None) -> Iterator[dict]:
    """Streams a shard's samples, grouped as OpenCLIP groups them in training: `__key__` and {suffix: bytes}.

    Args:
        suffixes: only these members are read, in lower case; default all.

    Raises:
        ValueError: the shard is no complete tar file.
    """
    def wanted(name: str) -> bool:
        return suffixes is None or (base_plus_ext(name)[1] or "").lower() in suffixes

    try:
        with gopen(shard) as stream:
            yield from group_by_keys_nothrow({**member, "__url__": shard} for member in read_members(stream, wanted))
    except OSError:
        raise
    except Exception as problem:  # tarfile fails in many ways on damaged files
        raise ValueError(f"{shard}: {INCOMPLETE}") from problem


def check_shard(path: Path) -> None:
    """Raises ValueError for a damaged or cut archive, by its headers alone: for readers that use tarfile's own."""
    try:
        with tarfile.open(path, tarinfo=Header) as archive:
            for _ in archive:
                archive.members.clear()
    except OSError:
        raise
    except Exception as problem:  # as above
        raise ValueError(f"{path}: {INCOMPLETE}") from problem


def image_member(sample: dict) -> str | None:
    """The suffix of a sample's image."""
    return next((suffix for suffix in IMAGE_SUFFIXES if suffix in sample), None)


def read_metadata(sample: dict) -> dict:
    """KEY.json, or {} where there is none or it is no JSON object."""
    try:
        metadata = json.loads(sample.get("json", b"{}"))
    except (ValueError, RecursionError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def is_text(value: object) -> bool:
    """Whether it is a caption: a text that is not empty and can be written. JSON can hold half of a letter's code."""
    try:
        return isinstance(value, str) and bool(value.strip() and value.encode())
    except UnicodeEncodeError:
        return False


def image_suffix(data: bytes) -> str:
    """Decodes an image (a JPEG at an eighth of its size, which reads all of it) and says what to call it.

    Raises:
        ValueError: it is no JPEG, PNG or WebP, or it is damaged.
    """
    try:
        with Image.open(io.BytesIO(data), formats=["JPEG", "PNG", "WEBP"]) as image:
            image.draft(None, (1, 1))
            image.load()
            return SUFFIXES[image.format]
    except Image.UnidentifiedImageError as problem:
        raise ValueError("not a JPEG, PNG or WebP image") from problem
    except Exception as problem:  # Pillow's decoders fail in many ways on damaged files
        raise ValueError(str(problem)) from problem


def shard_pattern(folder: str | Path, count: int) -> str:
    """What `--train-data` takes for the first `count` shards of a folder."""
    return f"{folder}/00000.tar" if count == 1 else f"{folder}/{{00000..{count - 1:05d}}}.tar"

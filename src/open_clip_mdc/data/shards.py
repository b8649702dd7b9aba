"""Webdataset shards of captioned images: the one reader, the one writer. Read as a stream, written whole or not at all.

A sample is KEY.jpg (or another of IMAGE_SUFFIXES), KEY.txt and KEY.json. Names and contents of members are not to be
trusted: what is written gets keys of our own.
"""
import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlparse

from open_clip_train.data import group_by_keys_nothrow
from PIL import Image, UnidentifiedImageError
from webdataset.gopen import gopen
from webdataset.shardlists import expand_urls
from webdataset.tariterators import base_plus_ext
from webdataset.writer import TarWriter

from .files import new_file, write_json
from .paths import IMAGE_SUFFIXES, check_kind, is_hidden

LABELS = {"txt", "json", "cls", "npy"}  # what makes an image a sample of its own, see `regroup`
LARGEST, LARGEST_TEXT = 2 ** 28, 2 ** 24  # bytes of a member that are read to memory; of KEY.txt and KEY.json
EXTENSIONS = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME,
              tarfile.GNUTYPE_LONGLINK)  # members whose content tarfile itself reads to memory
SCHEMES = ("file", "http", "https", "ftps", "sftp", "scp", "gs", "hf")  # that tools read; "pipe" and "ais" run commands
META = r"__[^/]*__($|/)"  # names that webdataset takes for its own
INCOMPLETE = "not a complete tar file; fetch or write it again"
SUFFIXES = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}  # by Pillow's format; some JPEGs are an MPO


def as_file(shard: str) -> str:
    """Return what webdataset opens as a file where there is one of that name, even "pipe:...", or a URL."""
    return os.path.abspath(shard) if os.path.exists(shard) else shard


def find_shards(pattern: str) -> list[str]:
    """Return the shards of a pattern as OpenCLIP does: "{000..009}" counts, "::" joins. Raises FileNotFoundError."""
    shards = expand_urls(pattern)
    missing = [shard for shard in shards if not os.path.exists(shard) and not urlparse(shard).scheme]
    if missing:
        raise FileNotFoundError(f"{missing[0]}: no such shard ({len(missing)} of {len(shards)} of {pattern} missing)")
    return shards


@contextmanager
def open_tar(path: Path) -> Iterator[TarWriter]:
    """Yield a writer to `path` as it goes. The same samples give the same bytes."""
    with path.open("wb") as stream, TarWriter(stream, user="", group="", mtime=0) as writer:
        yield writer


@contextmanager
def tar_writer(path: Path) -> Iterator[TarWriter]:
    """Yield a writer of a shard that appears as `path` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as partial, open_tar(partial) as writer:
        yield writer


def stats_file(shard: Path) -> Path:
    """Return where the counts of a shard lie, which are written before it appears."""
    return shard.with_name(f"{shard.stem}_stats.json")


def read_stats(shard: Path) -> dict:
    """Return where a shard comes from, and how many "pairs" it holds. Raises ValueError where nothing says so."""
    try:
        return json.loads(stats_file(shard).read_text())
    except (OSError, ValueError) as problem:
        raise ValueError(f"{shard} has no {stats_file(shard).name} beside it, so something else wrote it: give another "
                         f"folder") from problem


def write_sizes(folder: Path) -> None:
    """Write sizes.json, where OpenCLIP reads the numbers of pairs, of all shards that are there, whoever wrote them."""
    write_json(folder / "sizes.json", {path.name: read_stats(path)["pairs"] for path in sorted(folder.glob("*.tar"))},
               follow=False)


class TooLarge(ValueError):
    pass


def check_size(member: tarfile.TarInfo) -> None:
    """Raise TooLarge for a member that is no image and no caption, before it fills the memory."""
    most = LARGEST_TEXT if member.name.lower().endswith((".txt", ".json")) or member.type in EXTENSIONS else LARGEST
    if member.size > most:
        raise TooLarge(f"its member {member.name!r} has {member.size:,} bytes, more than the {most:,} that are read")


class Bounded(tarfile.TarInfo):
    """TarInfo for `tarfile.open(tarinfo=Bounded)` with which tarfile reads no long name of any size."""

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> "Bounded":
        member = super().frombuf(buf, encoding, errors)
        if member.type in EXTENSIONS:
            check_size(member)
        return member


class Header(Bounded):
    """TarInfo that raises on a corrupt or missing header, where tarfile sees the archive's end. Zeros are the end."""

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> "Header":
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as problem:
            if buf == bytes(tarfile.BLOCKSIZE):
                raise
            raise tarfile.ReadError(str(problem)) from problem


def read_members(stream: BinaryIO, wanted: Callable[[str], bool]) -> Iterator[dict]:
    """Yield fname and data (None unless `wanted`) of a tar's files. webdataset's own reader hides a broken end."""
    with tarfile.open(fileobj=stream, mode="r|*", tarinfo=Header) as archive:
        for member in archive:
            if member.isreg() and not re.match(META, member.name):
                data = None
                if wanted(member.name):
                    check_size(member)
                    data = archive.extractfile(member).read()
                yield {"fname": member.name, "data": data}
            archive.members.clear()  # they would add up


def training_members(stream: BinaryIO, skip: str | None, handler: Callable[[Exception], bool],
                     select: Callable[[str], bool] | None, rename: Callable[[str], str] | None) -> Iterator[dict]:
    """Yield fname and data of a tar's files by the rules of webdataset's reader, and `check_size` of each.

    `handler` says whether to read on behind a file that cannot be read.
    """
    archive = tarfile.open(fileobj=stream, mode="r|*", tarinfo=Bounded)
    for member in archive:
        try:
            if not member.isreg() or skip is not None and re.match(skip, member.name):
                continue
            name = rename(member.name) if rename else member.name
            if select is None or select(name):
                check_size(member)
                yield {"fname": name, "data": archive.extractfile(member).read()}
                archive.members = []
        except Exception as problem:
            problem.args = (f"{problem} @ {stream}",)
            if not handler(problem):
                break


def split_name(name: str) -> tuple[str | None, str]:
    """Return webdataset's key of a member, up to the first dot, and the rest, whose end is in lower case."""
    key, rest = base_plus_ext(name)
    stem, dot, suffix = (rest or "").rpartition(".")
    return key, stem + dot + suffix.lower()


def members(sample: dict) -> list[str]:
    return [name for name in sample if not name.startswith("__")]


def owner(stem: str, parts: dict[str, dict]) -> str:
    """Return the stem of the sample that the members KEY.STEM.* are part of. "" is KEY itself."""
    if not stem or image_member(parts[stem]) and parts[stem].keys() & LABELS:
        return stem
    above = stem
    while above:
        above = above.rpartition(".")[0]
        if image_member(parts.get(above, {})):
            return owner(above, parts)
    return stem


def regroup(samples: Iterable[dict]) -> Iterator[dict]:
    """Yield samples by their owner's keys, of samples by webdataset's, which end at the first dot of a name.

    KEY.jpg, KEY.txt and KEY.depth.png are one sample. Where KEY has no image, or KEY.v1.jpg has a KEY.v1.txt (or one of
    LABELS) beside it, KEY.v1 is a sample of its own, and KEY.v1.depth.png a part of it. What is hidden (`is_hidden`) is
    left out.
    """
    for sample in samples:
        key, parts = sample["__key__"], {}  # by what stands between KEY and the last dot
        for name in members(sample):
            if not is_hidden(f"{key}.{name}"):
                stem, _, suffix = name.rpartition(".")
                parts.setdefault(stem, {})[suffix] = sample[name]
        some, groups = any(map(image_member, parts.values())), {}
        for stem, part in parts.items():
            own = owner(stem, parts) if some else ""
            within = stem[len(own) + bool(own):]
            groups.setdefault(own, {}).update({f"{within}." * bool(within) + name: x for name, x in part.items()})
        about = {name: value for name, value in sample.items() if name.startswith("__")}
        for own in sorted(groups, key=bool):  # KEY first, the others as they stand
            yield about | {"__key__": f"{key}.{own}" if own else key} | groups[own]


def read_samples(shard: str, suffixes: tuple[str, ...] | None = None) -> Iterator[dict]:
    """Yield a shard's samples, grouped as in training (`regroup`): `__key__` and {suffix: bytes}.

    Only members of `suffixes` are read, in lower case. Default all. Raises ValueError: the shard is no complete tar
    file, a member is too large, or a URL would run a command.
    """
    scheme = "" if os.path.exists(shard) else urlparse(shard).scheme
    if scheme and (scheme not in SCHEMES or "'" in shard):  # webdataset puts the URL into a shell's command
        raise ValueError(f"{shard} is no file, and no URL of {', '.join(SCHEMES)}")

    def wanted(name: str) -> bool:
        return suffixes is None or name.rpartition(".")[2].lower() in suffixes

    try:
        with gopen(as_file(shard)) as stream:
            files = ({**member, "__url__": shard} for member in read_members(stream, wanted))
            for sample in regroup(group_by_keys_nothrow(files, split_name, lcase=False)):
                sample = {name: value for name, value in sample.items() if value is not None}
                if members(sample):
                    yield sample
    except OSError:
        raise
    except TooLarge as problem:
        raise ValueError(f"{shard}: {problem}") from problem
    except Exception as problem:  # tarfile fails in many ways on damaged files
        check_kind(shard)
        raise ValueError(f"{shard}: {INCOMPLETE}") from problem


def warn_of_lines(shards: list[str]) -> Iterator[str]:
    """Yield a warning where most first texts hold several captions, a line each, as clip_benchmark's sets do."""
    texts: list[str] = []
    try:
        if shards and os.path.isfile(shards[0]):
            texts = [sample["txt"].decode(errors="replace").strip() for sample in
                     islice(read_samples(shards[0], ("txt",)), 50)]
    except (OSError, ValueError):  # who reads all of it will say so
        return
    if sum("\n" in text and CAPTION_SEPARATOR not in text for text in texts) > len(texts) / 2:
        yield (f"most texts of {shards[0]} have several lines: each KEY.txt is one caption here; if every line is one, "
               f"make shards of them by open_clip_mdc prepare shards")


def image_member(sample: dict) -> str | None:
    return next((suffix for suffix in IMAGE_SUFFIXES if suffix in sample), None)


def read_metadata(sample: dict) -> dict:
    """Return KEY.json, or {} where there is none or it is no JSON object."""
    try:
        metadata = json.loads(sample.get("json", b"{}"))
    except (ValueError, RecursionError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def is_text(value: object) -> bool:
    """Return whether it is a caption: not empty, and can be written. JSON can hold half of a letter's code."""
    try:
        return isinstance(value, str) and bool(value.strip() and value.encode())
    except UnicodeEncodeError:
        return False


def image_suffix(data: bytes) -> str:
    """Return the suffix of an image. Raises UnidentifiedImageError: no JPEG, PNG or WebP. ValueError: damaged."""
    try:
        with Image.open(io.BytesIO(data), formats=["JPEG", "PNG", "WEBP"]) as image:
            image.draft(None, (1, 1))  # a JPEG at an eighth of its size, which reads all of it
            image.load()
            return SUFFIXES[image.format]
    except UnidentifiedImageError:
        raise
    except Exception as problem:  # Pillow's decoders fail in many ways on damaged files
        raise ValueError(str(problem)) from problem


def shard_pattern(folder: str | Path, count: int) -> str:
    """Return what `--train-data` takes for the first `count` shards of a folder."""
    return f"{folder}/00000.tar" if count == 1 else f"{folder}/{{00000..{count - 1:05d}}}.tar"


# Between the captions of one image in one KEY.txt: ASCII's record separator, which no caption contains, while alt
# texts do contain line ends.
CAPTION_SEPARATOR = "\x1e"

"""Read and write webdataset shards of captioned images: as streams in, whole files out.

A sample is KEY.jpg (or another of IMAGE_SUFFIXES), KEY.txt and KEY.json. Names and contents of members are not trusted,
so written shards get new keys.
"""
import io
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlparse

from PIL import Image, UnidentifiedImageError
from webdataset.gopen import gopen
from webdataset.tariterators import base_plus_ext
from webdataset.writer import TarWriter

from .files import AnyPath, check_readable, json_object, new_file, write_json
from .paths import IMAGE_FILES, IMAGE_SUFFIXES, check_kind, expand, find_images, is_hidden, is_shard

LABELS = {"txt", "json", "cls", "npy"}  # members that make an image a sample of its own (`regroup`)
LARGEST, LARGEST_TEXT = 2 ** 28, 2 ** 24  # maximum bytes of a member, and of a KEY.txt or KEY.json
EXTENSIONS = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME,
              tarfile.GNUTYPE_LONGLINK)  # types of members that tarfile itself reads to memory
SCHEMES = ("file", "http", "https", "ftps", "sftp", "scp", "gs", "hf")  # allowed URLs. "pipe" and "ais" run commands
META = r"__[^/]*__($|/)"  # names that webdataset reserves
INCOMPLETE = "not a complete tar file. Download or write it again"
COUNTED = 8  # shards of unknown size whose members are counted before the work. The others are taken for like them
SUFFIXES = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}  # by Pillow's format. Some JPEGs are MPO files


def as_file(shard: str) -> str:
    """Return a file's absolute path, so that webdataset opens it even if it is called "pipe:...". URLs stay as is."""
    return os.path.abspath(shard) if os.path.exists(shard) else shard


def find_shards(pattern: str) -> list[str]:
    """Expand a pattern of shards (`paths.expand`). Raises FileNotFoundError if one is missing."""
    shards = expand(pattern)
    if missing := [shard for shard in shards if not os.path.exists(shard) and not urlparse(shard).scheme]:
        raise FileNotFoundError(f"{missing[0]}: no such shard ({len(missing)} of {len(shards)} of {pattern} missing)")
    return shards


@contextmanager
def open_tar(path: Path) -> Iterator[TarWriter]:
    """Yield a writer of a shard that appears at once. The same samples give the same bytes."""
    with path.open("wb") as stream, TarWriter(stream, user="", group="", mtime=0) as writer:
        yield writer


@contextmanager
def tar_writer(path: Path) -> Iterator[TarWriter]:
    """Yield a writer of a shard that appears as `path` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as partial, open_tar(partial) as writer:
        yield writer


def stats_file(shard: Path) -> Path:
    """Return the path of a shard's counts, which are written before the shard appears."""
    return shard.with_name(f"{shard.stem}_stats.json")


def read_stats(shard: Path) -> dict:
    """Return a shard's source and its number of "pairs". Raises ValueError if no file beside it tells."""
    file = stats_file(shard)
    stats = json_object(file.read_bytes()) if file.is_file() else {}
    if "pairs" not in stats:  # img2dataset writes files of this name, too
        raise ValueError(f"{shard} was not written by this command, as no {file.name} beside it says so: give another "
                         "folder")
    return stats


def write_sizes(folder: Path) -> None:
    """Write sizes.json, from which OpenCLIP reads the number of pairs, for all shards in a folder."""
    write_json(folder / "sizes.json", {path.name: read_stats(path)["pairs"] for path in sorted(folder.glob("*.tar"))},
               follow=False)


class TooLarge(ValueError):
    """A member of a shard would fill the memory."""


def check_size(member: tarfile.TarInfo) -> None:
    """Raise TooLarge for a member that is too large for an image or a caption, before it is read."""
    most = LARGEST_TEXT if member.name.lower().endswith((".txt", ".json")) or member.type in EXTENSIONS else LARGEST
    if member.size > most:
        raise TooLarge(f"its member {member.name!r} has {member.size:,} bytes, more than the {most:,} that are read")


class Bounded(tarfile.TarInfo):
    """TarInfo for `tarfile.open(tarinfo=Bounded)`, which bounds the size of long names and other headers."""

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> "Bounded":
        member = super().frombuf(buf, encoding, errors)
        if member.type in EXTENSIONS:
            check_size(member)
        return member


class Header(Bounded):
    """TarInfo that raises on a corrupt or missing header, which tarfile takes for the end. Only zeros are the end."""

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> "Header":
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as problem:
            if buf == bytes(tarfile.BLOCKSIZE):
                raise
            raise tarfile.ReadError(str(problem)) from problem


def files_of(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members that are files. Raises ReadError for a negative size, after which tarfile would go back."""
    for member in archive:
        if member.size < 0:
            raise tarfile.ReadError
        if member.isreg():
            yield member
        archive.members.clear()  # otherwise tarfile keeps all of them in memory


def read_members(stream: BinaryIO, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes | None]]:
    """Yield name and data (None unless `wanted`) of a tar's files. Unlike webdataset's reader it reports a cut end."""
    with tarfile.open(fileobj=stream, mode="r|*", tarinfo=Header) as archive:
        for member in files_of(archive):
            if not re.match(META, member.name):
                data = None
                if wanted(member.name):
                    check_size(member)
                    data = archive.extractfile(member).read()
                yield member.name, data


def file_names(shard: str) -> Iterator[str]:
    """Yield the names of a tar's files, reading no content. Raises ValueError if the tar is cut off or is none."""
    try:
        with tarfile.open(shard, tarinfo=Header) as archive:
            for member in files_of(archive):
                yield member.name
    except OSError:
        raise
    except Exception as problem:  # tarfile fails in many ways on damaged files
        raise ValueError(f"{shard}: {INCOMPLETE}") from problem


def split_name(name: str) -> tuple[str | None, str]:
    """Split a member's name into webdataset's key, up to the first dot, and the rest, with its suffix in lower case."""
    key, rest = base_plus_ext(name)
    stem, dot, suffix = (rest or "").rpartition(".")
    return key, stem + dot + suffix.lower()


def group_by_key(files: Iterable[tuple[str, bytes | None]], shard: str = "") -> Iterator[dict]:
    """Yield a sample for each row of members, (name, data), with one key, as open_clip_train groups them.

    A suffix that comes again begins the next sample.
    """
    sample = {}
    for name, data in files:
        key, suffix = split_name(name)
        if key is None:
            continue
        if key != sample.get("__key__") or suffix in sample:
            if sample:
                yield sample
            sample = {"__key__": key, "__url__": shard}
        sample[suffix] = data
    if sample:
        yield sample


def members(sample: dict) -> list[str]:
    """Return the suffixes of a sample's files."""
    return [name for name in sample if not name.startswith("__")]


def owner(stem: str, parts: dict[str, dict]) -> str:
    """Return the stem of the sample to which the members KEY.STEM.* belong. "" stands for KEY itself."""
    if not stem or image_member(parts[stem]) and parts[stem].keys() & LABELS:
        return stem
    above = stem
    while above:
        above = above.rpartition(".")[0]
        if image_member(parts.get(above, {})):
            return owner(above, parts)
    return stem


def regroup(samples: Iterable[dict]) -> Iterator[dict]:
    """Split webdataset's samples, whose keys end at the first dot of a name, into the samples that are meant.

    KEY.jpg, KEY.txt and KEY.depth.png are one sample. If KEY has no image, or if KEY.v1.jpg has a KEY.v1.txt (or one of
    LABELS) beside it, KEY.v1 is a sample of its own, and KEY.v1.depth.png belongs to it. Hidden files (`is_hidden`) are
    left out.
    """
    for sample in samples:
        key, parts = sample["__key__"], {}  # by the stem between KEY and the last dot
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
        for own in sorted(groups, key=bool):  # KEY first, the others in their order
            yield about | {"__key__": f"{key}.{own}" if own else key} | groups[own]


def read_samples(shard: str, suffixes: tuple[str, ...] | None = None) -> Iterator[dict]:
    """Yield a shard's samples, grouped as in training (`regroup`): `__key__` and {suffix: bytes}.

    Only members with one of the `suffixes`, in lower case, are read. The default is all. Raises ValueError if the shard
    is not a complete tar file, if a member is too large, or if a URL would run a command.
    """
    scheme = "" if os.path.exists(shard) else urlparse(shard).scheme
    if scheme and (scheme not in SCHEMES or "'" in shard):  # webdataset puts the URL into a shell command
        raise ValueError(f"{shard} is no file, and no URL of {', '.join(SCHEMES)}")

    def wanted(name: str) -> bool:
        return suffixes is None or name.rpartition(".")[2].lower() in suffixes

    check_readable(shard)
    try:
        with gopen(as_file(shard)) as stream:
            for sample in regroup(group_by_key(read_members(stream, wanted), shard)):
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


def image_member(sample: dict) -> str | None:
    """Return the suffix of a sample's image, or None if it has none."""
    return next((suffix for suffix in IMAGE_SUFFIXES if suffix in sample), None)


def read_metadata(sample: dict) -> dict:
    """Return the content of KEY.json, or {} if there is none or if it is not a JSON object."""
    return json_object(sample.get("json", b"{}"))


def image_suffix(data: bytes) -> str:
    """Return the suffix of an image. Raises UnidentifiedImageError if not JPEG, PNG or WebP, ValueError if damaged."""
    try:
        with Image.open(io.BytesIO(data), formats=["JPEG", "PNG", "WEBP"]) as image:
            image.draft(None, (1, 1))  # decode a JPEG at an eighth of its size: faster, and all bytes are still read
            image.load()
            return SUFFIXES[image.format]
    except UnidentifiedImageError:
        raise
    except Exception as problem:  # Pillow's decoders fail in many ways on damaged files
        raise ValueError(str(problem)) from problem


def shard_pattern(folder: AnyPath, count: int) -> str:
    """Return the `--train-data` pattern of the first `count` shards in a folder."""
    return f"{folder}/00000.tar" if count == 1 else f"{folder}/{{00000..{count - 1:05d}}}.tar"


def read_sizes(folder: Path) -> dict:
    """Return the content of a folder's sizes.json, {} if there is none."""
    try:
        return json_object((folder / "sizes.json").read_bytes())
    except OSError:
        return {}


@cache
def images_in(shard: Path) -> int:
    """Return the number of keys with an image, up to where the shard is damaged."""
    keys = set()
    with suppress(OSError, ValueError):  # who reads the images says what is wrong
        for name in file_names(str(shard)):
            if name.lower().endswith(IMAGE_FILES) and not is_hidden(name):
                keys.add(re.sub(r"\.[^/]*$", "", name))  # up to the first dot behind the folder
    return len(keys)


def sizes_of(units: list) -> dict:
    """Return the images in each shard, file, folder or part of a table, by sizes.json or a count, None if unknown."""
    found, read = {}, cache(read_sizes)  # once a folder, as it may list 100,000 shards
    for unit in units:
        if not isinstance(unit, Path):
            found[unit] = unit.count
        elif unit.is_dir():
            found[unit] = len(find_images([str(unit)]))
        elif is_shard(unit):
            size = read(unit.parent).get(unit.name)
            found[unit] = size if type(size) is int and 0 <= size < 1e15 else None
        else:
            found[unit] = 1
    for unit in [unit for unit, size in found.items() if size is None][:COUNTED]:
        found[unit] = images_in(unit)
    return found


def total_of(sizes: dict) -> int | None:
    """Return the number of all images. A shard of unknown size counts as the average. None if nothing is known."""
    known = [size for size in sizes.values() if size is not None]
    return round(sum(known) / len(known) * len(sizes)) if known else None


def count_images(paths: list, limit: int | None = None) -> int | None:
    """Return the number of images, up to `limit`, for a progress bar."""
    total = total_of(sizes_of(paths))
    return total if total is None or limit is None else min(total, limit)

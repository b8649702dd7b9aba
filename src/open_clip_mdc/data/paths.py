"""The files that a command line names: paths, folders, patterns. Imports no torch, for bulk/units.py."""
import glob
import os
import re
from functools import cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from shlex import quote

from braceexpand import braceexpand
from PIL import Image, UnidentifiedImageError

# Named to Pillow wherever it opens others' files: left to choose, it runs Ghostscript on an EPS.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "AVIF", "HEIF", "JPEG2000", "PPM")
IMAGE_SUFFIXES = ("jpg", "png", "jpeg", "webp",  # in OpenCLIP's order, where a sample has several
                  "jfif", "jpe", "bmp", "gif", "tif", "tiff", "avif", "heic", "heif", "jp2", "j2k", "ppm", "pgm", "pbm")
IMAGE_FILES = tuple(f".{suffix}" for suffix in IMAGE_SUFFIXES)
# Not read, but named where a folder holds them, as their owner may take them for images.
UNREADABLE_FILES = (".svg", ".eps", ".psd", ".jxl", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raw", ".tga", ".ico")
SHARDS = (".tar",)
# What users have beside images and shards, by suffix.
OTHERS = {".parquet": "a parquet table", ".arrow": "an Arrow table", ".json": "a JSON file",
          ".jsonl": "a JSON Lines file", ".csv": "a table", ".tsv": "a table", ".txt": "a text",
          ".zip": "a zip archive", ".npy": "a NumPy array",
          ".h5": "an HDF5 file", ".lmdb": "a database", ".html": "a page", ".pdf": "a PDF", ".mp4": "a video"}

TO_SHARDS = (".parquet", ".json", ".jsonl", ".csv", ".tsv")  # of them what `prepare shards` reads


@cache
def formats() -> list[str]:
    """Return those of FORMATS that this Pillow reads: AVIF since 11.3, HEIF by pillow_heif."""
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def is_hidden(name: str) -> bool:
    """Return whether a path, or a part of it, is hidden or what macOS adds: .thumbnails/, ._cat.jpg, __MACOSX/."""
    return any(part.startswith(".") and part not in (".", "..") or part == "__MACOSX" for part in name.split("/"))


def is_image(path: str | Path) -> bool:
    """Return whether a file counts as an image: by its suffix, or by its content where the suffix is no image's."""
    if Path(path).suffix.lower() in IMAGE_FILES + UNREADABLE_FILES:
        return True
    try:
        with Image.open(path, formats=formats()):
            return True
    except (UnidentifiedImageError, ValueError, SyntaxError):
        return False
    except (OSError, Image.DecompressionBombError):  # who reads it will say why it cannot be read
        return True


def inside(folder: Path, name: str, path: Path, row: str | int) -> Path:
    """Return `folder`/`name` of a row of a file `path`. Raises ValueError if that could lead out of the folder."""
    parts = PurePosixPath(name).parts
    if (not parts or PurePosixPath(name).is_absolute() or ".." in parts or "\\" in name or "\0" in name
            or PureWindowsPath(name).drive):
        raise ValueError(f"{path}, row {row}: refused the file name {name!r}, which leads out of {folder}")
    return folder / name


def to_shards(path: str | Path, split: str = "train") -> str:
    """Return the command that makes shards of images with captions in another layout."""
    out = re.sub(r"\W+", "-", Path(os.path.abspath(path)).name.partition(".")[0]).strip("-") or split
    return f"open_clip_mdc prepare shards --{split} {quote(str(path))} --out {out}-wds"


def check_kind(path: str | Path) -> None:
    """Raise ValueError for a file that is no image and no shard. Says what it is, and what to make of it."""
    suffix = Path(path).suffix.lower()
    kind = OTHERS.get(suffix)
    if kind and not is_image(path):
        what = (f"make shards of it by {to_shards(path)}" if suffix in TO_SHARDS else
                "write its images to files, or with their captions to shards (KEY.jpg and KEY.txt in a .tar)")
        raise ValueError(f"{path} is {kind}, no image and no shard: {what}")


def expand(pattern: str) -> list[str]:
    """Return the paths of a pattern, as in training."""
    if "${" in pattern:  # $WDS_NAME of the environment; webdataset's own function imports torch
        from webdataset.shardlists import expand_urls
        return expand_urls(pattern)
    return [path for part in pattern.split("::") for path in braceexpand(part)]


def find_images(paths: list[str], kinds: tuple[str, ...] = IMAGE_FILES) -> list[Path]:
    """Return files as given, what patterns ("*.jpg", "{000..009}.tar") match, and the files in folders, each sorted.

    `kinds` are the suffixes that are looked for in folders; with those of images all that `is_image`, but nothing that
    `is_hidden`. Raises FileNotFoundError where a path, pattern or folder gives nothing.
    """
    found = []
    for path in paths:
        there = os.path.exists(path)  # what is there by that very name is no pattern: "holiday[1].jpg"
        for pattern in [path] if there else expand(path):
            matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
            if not matches:
                raise FileNotFoundError(f"no image or folder {pattern}")
            for match in map(Path, matches):
                if match.is_file():
                    check_kind(match)
                files = [match] if not match.is_dir() else sorted(
                    p for p in match.rglob("*") if not is_hidden(str(p.relative_to(match))) and (
                        p.is_file() or p.is_symlink() and not p.exists()) and (
                        p.suffix.lower() in kinds or ".jpg" in kinds and is_image(p)))
                if not files:
                    other = next((path.name for path in match.rglob("*") if path.suffix.lower() in TO_SHARDS), None)
                    raise FileNotFoundError(f"no image in {match} ({', '.join(kinds)})" + (
                        f": make shards of {other} and the like by {to_shards(match)}" if other else ""))
                found += files
    return found


def count_images(paths: list, limit: int | None = None) -> int | None:
    """Return how many images there are, up to `limit`, or None where a shard or table holds an unknown number."""
    known = all(isinstance(path, Path) and path.suffix.lower() not in SHARDS for path in paths)
    return len(paths[:limit]) if known else None

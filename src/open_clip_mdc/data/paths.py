"""Find the files that a command line names by paths, folders and patterns. Imports no torch."""
import glob
import os
import re
from functools import cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from shlex import quote

from braceexpand import braceexpand
from PIL import Image, UnidentifiedImageError

from .files import AnyPath, check_readable, files_below

# The formats that Pillow may open: by default it would also run Ghostscript on an EPS file.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "AVIF", "HEIF", "JPEG2000", "PPM")
IMAGE_SUFFIXES = ("jpg", "png", "jpeg", "webp",  # OpenCLIP's order, for a sample with several images
                  "jfif", "jpe", "bmp", "gif", "tif", "tiff", "avif", "heic", "heif", "jp2", "j2k", "ppm", "pgm", "pbm")
IMAGE_FILES = tuple(f".{suffix}" for suffix in IMAGE_SUFFIXES)
# Images that cannot be read. They are reported if a folder holds them, as users may expect them to be read.
UNREADABLE_FILES = (".svg", ".eps", ".psd", ".jxl", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raw", ".tga", ".ico")
SHARDS = (".tar", ".tar.gz", ".tgz")
ANY_IMAGES = IMAGE_FILES + SHARDS  # files that hold images
TO_SHARDS = (".parquet", ".json", ".jsonl", ".csv", ".tsv")  # those that `open_clip_mdc prepare shards` reads
# Other files that users give where images or shards are expected.
OTHERS = (*TO_SHARDS, ".arrow", ".txt", ".zip", ".npy", ".h5", ".lmdb", ".html", ".pdf", ".mp4")


@cache
def formats() -> list[str]:
    """Return those of FORMATS that the installed Pillow reads: AVIF needs 11.3, HEIF needs pillow_heif."""
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def is_hidden(name: str) -> bool:
    """Return whether a path has a part that is hidden or added by macOS: .thumbnails/, ._cat.jpg, __MACOSX/."""
    return any(part.startswith(".") and part not in (".", "..") or part == "__MACOSX" for part in name.split("/"))


def is_image(path: AnyPath) -> bool:
    """Return whether a file is an image, by its suffix or else by its content."""
    if Path(path).suffix.lower() in IMAGE_FILES + UNREADABLE_FILES:
        return True
    try:
        with Image.open(path, formats=formats()):
            return True
    except (UnidentifiedImageError, ValueError, SyntaxError):
        return False
    except Exception:  # of any kind, as of a damaged AVIF. The code that reads it reports why it cannot be read
        return True


def inside(folder: Path, name: str, path: Path, row: str | int) -> Path:
    """Return `folder`/`name`. Raises ValueError, with `path` and `row`, if that could lead out of the folder."""
    posix = PurePosixPath(name.replace("\\", "/"))  # Windows writes \\ between folders
    if not posix.parts or posix.is_absolute() or ".." in posix.parts or "\0" in name or PureWindowsPath(name).drive:
        raise ValueError(f"{path}, row {row}: refused the file name {name!r}, which leads out of {folder}")
    return folder / posix


def files_beside(image: Path, folders: dict) -> dict[str, Path]:
    """Return the files of an image's name in its folder, KEY.TXT as well as KEY.txt or KEY.jpg.txt, by suffix (txt).

    Args: `folders` keeps what was found, by folder, name and suffix, as each folder is listed once.
    """
    if (names := folders.get(image.parent)) is None:
        names = folders[image.parent] = {}
        for name in sorted(os.listdir(image.parent), reverse=True):  # .txt before .TXT
            stem, dot, suffix = name.rpartition(".")
            if dot and f".{suffix.lower()}" not in IMAGE_FILES:
                names.setdefault(stem, {}).setdefault(suffix.lower(), image.parent / name)
    return names.get(image.name, {}) | names.get(image.stem, {})


def for_shell(name: AnyPath) -> str:
    """Return a name as one word of a command to paste. Characters that do not print are written out, for bash."""
    if str(name).isprintable():
        return quote(str(name))
    return "$'" + "".join(chr(c) if c < 128 and chr(c).isalnum() else f"\\x{c:02x}" for c in os.fsencode(name)) + "'"


def to_shards(path: AnyPath, split: str = "train") -> str:
    """Return the command that makes shards of images with captions that are stored in another way."""
    out = re.sub(r"\W+", "-", Path(os.path.abspath(path)).name.partition(".")[0]).strip("-") or split
    return f"open_clip_mdc prepare shards --{split} {for_shell(path)} --out {out}-wds"


def is_shard(path: AnyPath) -> bool:
    """Return whether a path has the name of a shard, compressed or not."""
    return str(path).lower().endswith(SHARDS)


def without_suffix(path: Path) -> str:
    """Return the name of a shard or file without its suffix: 00000 for 00000.tar.gz, too."""
    return Path(re.sub(r"(?i)(\.tar)\.gz$", r"\1", path.name)).stem


def check_kind(path: AnyPath) -> None:
    """Raise ValueError, with a way to convert it, for what is neither an image nor a shard."""
    check_readable(path)
    suffix = Path(path).suffix.lower()
    if suffix in OTHERS and not is_image(path):
        what = (f"make shards of it by {to_shards(path)}" if suffix in TO_SHARDS else
                "write its images to files, or with their captions to shards (KEY.jpg and KEY.txt in a .tar)")
        raise ValueError(f"{path} is a {suffix} file, no image and no shard: {what}")


def expand(pattern: str) -> list[str]:
    """Expand a pattern of shards as in training: {000..009}, A::B and ${NAME} for WDS_NAME, if that variable is set."""
    return [path for part in pattern.split("::") for path in braceexpand(
        re.sub(r"\${(\w+)}", lambda found: os.environ.get(f"WDS_{found[1]}", found[0]), part))]


def find_images(paths: list[str], kinds: tuple[str, ...] = IMAGE_FILES) -> list[Path]:
    """Return the files that paths name, that patterns match ("*.jpg", "{000..009}.tar") and that folders hold, sorted.

    In folders the files with the suffixes in `kinds` count. If these are image suffixes, so do all files that
    `is_image`. Files that are hidden (`is_hidden`) do not count. Raises FileNotFoundError if a path, pattern or folder
    gives no file.
    """
    found = []
    for path in paths:
        # A file of that very name, such as "holiday[1].jpg", is no pattern.
        for pattern in [path] if os.path.exists(path) else expand(path):
            matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
            if not matches:
                raise FileNotFoundError(f"no image or folder {pattern}")
            for match in map(Path, matches):
                check_kind(match)
                if not match.is_dir():
                    found.append(match)
                    continue
                below = list(map(Path, files_below(match)))
                files = sorted(p for p in below if not is_hidden(str(p.relative_to(match))) and (
                    p.name.lower().endswith(kinds) or ".jpg" in kinds and (p.is_file() or not p.exists())
                    and is_image(p)))
                if not files:
                    other = next((path.name for path in below if path.suffix.lower() in TO_SHARDS), None)
                    raise FileNotFoundError(f"no image in {match} ({', '.join(kinds)})" + (
                        f": make shards of {other} and the like by {to_shards(match)}" if other else ""))
                found += files
    return found

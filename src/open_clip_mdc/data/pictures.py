"""Pictures of files, folders, patterns and webdataset shards, for the tools that read other people's pictures."""
import glob
import os
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError
from webdataset.shardlists import expand_urls

from .shards import find_picture, read_samples

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
SHARDS = (".tar",)
MAX_ASPECT = 100  # resized to a model's height, what is narrower fills the memory


def find_pictures(paths: list[str], kinds: tuple[str, ...] = PICTURES) -> list[Path]:
    """Files as given, what patterns ("*.jpg", "{000..009}.tar") match, and the files in folders; each sorted.

    Args:
        kinds: suffixes of the files that are looked for in folders.

    Raises:
        FileNotFoundError: a path does not exist, a pattern matches nothing, or a folder holds nothing of these kinds.
    """
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


def open_picture(source: Path | BytesIO | ValueError, name: str | None = None) -> Image.Image:
    """RGB, the way up that the camera noted.

    Args:
        name: what the message calls it; by default `source`.

    Raises:
        ValueError: it is no picture, or one much longer than wide.
    """
    if isinstance(source, ValueError):
        raise source
    try:
        with Image.open(source) as image:
            picture = ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError as problem:  # its text would name the object in memory
        raise ValueError(f"cannot read the picture {name or source}: not a format known here") from problem
    except Exception as problem:  # Pillow's decoders fail in many ways on damaged files
        raise ValueError(f"cannot read the picture {name or source}: {problem}") from problem
    if max(picture.size) > MAX_ASPECT * min(picture.size):
        raise ValueError(f"cannot use the picture {name or source}: it is {picture.width} x {picture.height} pixels")
    return picture

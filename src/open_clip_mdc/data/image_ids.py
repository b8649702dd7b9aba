"""The numbers that COCO and its servers know images by, and captions in COCO's results format.

A number is "image_id" of the KEY.json beside an image or in its shard. Else the digits that end the name of the file,
or the "filename" of KEY.json: 391895 of COCO_val2014_000000391895.jpg. Letters before the digits make it no number:
0013ea2087020901.jpg has none.
"""
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path, PurePosixPath

from .images import named_samples
from .paths import SHARDS
from .shards import read_metadata


def image_id(metadata: Mapping, name: str) -> int | None:
    """Return the number of an image by its KEY.json and its name without folders, or None."""
    value = metadata.get("image_id")
    if type(value) is int and value >= 0 or isinstance(value, str) and re.fullmatch("[0-9]+", value):
        return int(value)
    filename = metadata.get("filename")
    stem = PurePosixPath(filename if isinstance(filename, str) and filename else name).stem
    found = re.search(r"(?:^|[^0-9A-Za-z])([0-9]+)$", stem)
    return int(found[1]) if found else None


def _found(paths: Iterable[Path]) -> Iterator[tuple[str, int | None]]:
    for path in paths:
        if path.suffix.lower() in SHARDS:
            for key, sample in named_samples(path):
                yield f"{path}::{key}", image_id(read_metadata(sample), f"{sample['__key__']}.jpg")
        else:
            beside = path.with_suffix(".json")
            about = read_metadata({"json": beside.read_bytes()}) if beside.is_file() else {}
            yield str(path), image_id(about, path.name)


def read_image_ids(paths: Iterable[Path], limit: int | None = None) -> dict[str, int]:
    """Return the number of each image by its name, in the order of `read_images`.

    Raises ValueError for a shard that cannot be read, an image without a number and one whose number another has.
    """
    return check_image_ids(islice(_found(paths), limit))


def check_image_ids(found: Iterable[tuple[str, int | None]]) -> dict[str, int]:
    """Return {name: number}. Raises ValueError for a name without a number and for a number that comes twice."""
    ids: dict[str, int] = {}
    owners: dict[int, str] = {}
    for name, number in found:
        if number is None:
            raise ValueError(f"{name} has no image_id for COCO's results format: give one in the KEY.json beside it, "
                             f"or a name that ends in digits, as COCO_val2014_000000391895.jpg does")
        if number in owners:
            raise ValueError(f"{name} and {owners[number]} both have the image_id {number}: COCO's results format "
                             f"takes one caption an image")
        ids[name] = number
        owners[number] = name
    return ids


def coco_results(captions: Mapping[str, str], ids: Mapping[str, int]) -> list[dict]:
    """Return COCO's results format, [{"image_id": number, "caption": text}, ...], of captions by name."""
    return [{"image_id": ids[name], "caption": caption} for name, caption in captions.items()]

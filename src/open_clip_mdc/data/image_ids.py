"""The image_id of each image, and captions in COCO's results format.

It is the "image_id" in the KEY.json beside the image or in its shard. Without one, it is the number at the end of the
"filename" in KEY.json, or else of the file's name: 391895 for COCO_val2014_000000391895.jpg. Digits that follow a
letter are not such a number, so 0013ea2087020901.jpg has none.
"""
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path, PurePosixPath

from .files import json_object
from .images import named_samples
from .paths import files_beside, is_shard
from .shards import read_metadata


def image_id(metadata: Mapping, name: str) -> int | None:
    """Return the image_id by KEY.json and the image's name without folders, or None if there is none."""
    value = metadata.get("image_id")
    if isinstance(value, (int, str)) and re.fullmatch("[0-9]{1,19}", str(value)):
        return int(value)
    filename = metadata.get("filename")
    stem = PurePosixPath(filename if isinstance(filename, str) and filename else name).stem
    found = re.search(r"(?:^|[^0-9A-Za-z])([0-9]{1,19})$", stem)
    return int(found[1]) if found else None


def _found(paths: Iterable[Path]) -> Iterator[tuple[str, int | None]]:
    folders = {}
    for path in paths:
        if is_shard(path):
            for key, sample in named_samples(path):
                yield f"{path}::{key}", image_id(read_metadata(sample), f"{sample['__key__']}.jpg")
        else:
            beside = files_beside(path, folders).get("json")
            about = json_object(beside.read_bytes()) if beside and beside.is_file() else {}
            yield str(path), image_id(about, path.name)


def read_image_ids(paths: Iterable[Path], limit: int | None = None) -> dict[str, int]:
    """Return {name: image_id} in the order of `read_images`.

    Raises ValueError for a shard that cannot be read, an image without an image_id, and an image_id that comes twice.
    """
    return check_image_ids(islice(_found(paths), limit))


def check_image_ids(found: Iterable[tuple[str, int | None]]) -> dict[str, int]:
    """Return {name: image_id}. Raises ValueError for a name without one, and for one that comes twice."""
    owners = {}
    for name, number in found:
        if number is None:
            raise ValueError(f"{name} has no image_id for COCO's results format: give one in the KEY.json beside it, "
                             f'{{"image_id": 1}}, or a name that ends in digits after a sign, as in val_0001.jpg')
        if number in owners:
            raise ValueError(f"{name} and {owners[number]} both have the image_id {number}: COCO's results format "
                             f"takes one caption per image")
        owners[number] = name
    return {name: number for number, name in owners.items()}


def coco_results(captions: Mapping[str, str], ids: Mapping[str, int]) -> list[dict]:
    """Return captions by name in COCO's results format, [{"image_id": number, "caption": text}, ...]."""
    return [{"image_id": ids[name], "caption": caption} for name, caption in captions.items()]

"""Read images with captions in common layouts, for `open_clip_mdc prepare shards`.

    DIR/a.jpg, DIR/a.txt or DIR/a.json          captions beside images, also in subfolders (img2dataset's files), and
                                                a.caption. Suffixes may be capital
    DIR/metadata.csv, DIR/metadata.jsonl        Hugging Face's imagefolder: file_name relative to it, and a caption
    DIR/*.parquet                               a column of image bytes, or of {bytes, path} (Hugging Face, img2dataset)
    captions_val2017.json                       COCO's captions, with the images in --images
    rows.json, rows.jsonl                       rows of an image and its caption, or captions
    pairs.csv, captions.txt                     a table as open_clip_train reads it, Kaggle's Flickr8k
    DIR/*.tar                                   webdataset shards (img2dataset's webdataset)

The content is not trusted: names must stay within their folder, only regular files are opened, and sizes have limits.
"""
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from glob import glob
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ..data.captions import CAPTION_SEPARATOR, coco_rows, find_apart, text_of, without_image
from ..data.csv_pairs import (
    CAPTIONS,
    FILE_NAME,
    IMAGES,
    SEPARATORS,
    TABLES,
    image_path,
    read_forms,
    read_rows,
)
from ..data.files import files_below, parse_json
from ..data.paths import IMAGE_FILES, IMAGE_SUFFIXES, files_beside, inside, is_hidden, is_shard
from ..data.shards import LARGEST_TEXT, find_shards, image_member, members, read_metadata, read_samples
from ..data.text import decode_text, read_lines
from ..progress import progress_bar

BESIDE = ("txt", "caption", "json")  # suffixes of captions beside images
NAMES = ("filename", "file_name", "key", "id")  # keys of the image's name beside its bytes


class Sample(NamedTuple):
    """An image and its captions as the source has them."""

    name: str  # the image's, kept in KEY.json
    image: bytes | Path
    captions: object  # a list of texts, or whatever the source has instead
    seen: str = ""  # for a message: where else the captions may be


def read_file(path: Path, most: int) -> bytes:
    """Return the bytes of a file. Raises OSError, or ValueError for a device or more than `most` bytes."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise ValueError(f"{path} is not a regular file")
    if about.st_size > most:
        raise ValueError(f"{path} has {about.st_size:,} bytes, more than the limit of {most:,}")
    return path.read_bytes()


def caption_of(row: Mapping, key: str, names: tuple[str, ...] = CAPTIONS) -> object:
    """Return the value of a row under `key`, or under the first of `names` that it has if `key` is the default."""
    return next((row[name] for name in (names if key == CAPTIONS[0] else (key,)) if row.get(name)), None)


def captions_of(sample: dict, text: str, key: str) -> tuple[object, str]:
    """Return the captions in KEY.json, or else in the lines of KEY.txt, and where else they may be for a message."""
    metadata = read_metadata(sample)
    captions = caption_of(metadata, key, CAPTIONS[:2])
    if captions is None and key == CAPTIONS[0]:
        captions = re.split(f"[\n{CAPTION_SEPARATOR}]", text) if text.strip() else metadata.get("text")
    return captions, f" (members: {', '.join(members(sample))}" + (
        f", keys of the JSON: {', '.join(metadata)}, see --captions-key)" if metadata else ")")


def read_shards(shards: list[str], key: str) -> Iterator[Sample]:
    """Stream shards of KEY.jpg with captions in KEY.json or KEY.txt."""
    for shard in progress_bar(shards, "prepare", "shard"):
        apart = None
        for sample in read_samples(shard):
            suffix, metadata = image_member(sample), read_metadata(sample)
            name = str(metadata.get("filename", f"{sample['__key__']}.{suffix}" if suffix else without_image(sample)))
            try:
                captions, seen = captions_of(sample, text_of(sample), key)
            except ValueError as problem:
                captions, seen = None, f": {problem}"
            if not captions and apart is None:
                apart = find_apart(shard) or ""  # once per shard
            yield Sample(name, sample.get(suffix, b""), captions, f"{seen}. {apart}" if apart else seen)


def read_beside(folder: Path, images: list[Path], key: str) -> list[Sample]:
    """Return the images of a folder with the captions in the .txt, .caption or .json of the same name."""
    found, folders, captioned = [], {}, False
    for path in images:
        try:
            beside = files_beside(path, folders)
            files = {suffix: beside[suffix] for suffix in BESIDE if suffix in beside}
            sample = {suffix: read_file(file, LARGEST_TEXT) for suffix, file in files.items()}
            text = next((decode_text(sample[suffix], files[suffix]) for suffix in BESIDE[:2] if suffix in files), "")
            captions, seen = captions_of(sample, text, key)
            captioned |= bool(files)
        except (OSError, ValueError) as problem:
            captions, seen, captioned = None, f": {problem}", True
        found.append(Sample(str(path.relative_to(folder)), path, captions, seen))
    if not captioned:
        raise ValueError(f"{folder} has no captions: none of its {len(found)} images has a .txt, .caption or .json "
                         f"beside it, and there is no metadata.csv or metadata.jsonl")
    return found


def image_file(folders: Sequence[str | Path], name: str, source: Path, number: int) -> Path:
    """Return the image of a row in the one of the folders that holds it. Raises ValueError if several do."""
    places = [inside(Path(folder), name, source, number) for folder in folders]
    there = [path for path in places if os.path.exists(path)] if len(places) > 1 else places
    if len(there) > 1:
        raise ValueError(f"{source}, row {number}: {name} is {there[0]} and {there[1]}: give one --images, or prepare "
                         f"the splits one by one, each into its own --out")
    return (there or places)[0]


def from_rows(rows: Iterable, source: Path, folders: Sequence[str | Path], key: str) -> list[Sample]:
    """Return each image once, with the captions of all its rows.

    Args:
        rows: objects with the name of an image and its captions.
        folders: those of the images. Without any, names are paths from the working directory.

    Raises ValueError for a row that is not an object, or names an image outside the folder.
    """
    found: dict[str, Sample] = {}
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"{source}, row {number} is {type(row).__name__}, not an object such as "
                             '{"image": "a.jpg", "caption": "a dog"}')
        name, captions = next((row[name] for name in IMAGES if row.get(name)), None), caption_of(row, key)
        if not isinstance(name, str):
            name, image = f"row {number} (keys: {', '.join(row)})", b""
        else:
            image = image_file(folders, name, source, number) if folders else image_path(name)
        sample = found.setdefault(name, Sample(name, image, [], f" (keys: {', '.join(row)}, see --captions-key)"))
        sample.captions.extend(captions if isinstance(captions, list) else [captions])
    if not found:
        raise ValueError(f"{source} has no rows")
    return list(found.values())


def read_json(path: Path, images: Sequence[str], key: str) -> list[Sample]:
    """Return the images of COCO's captions, of a JSON list of rows, or of JSON lines (`from_rows`)."""
    folder = path.parent
    if path.suffix.lower() == ".jsonl":
        rows = [parse_json(line, f"{path}, line {number}") for number, line in enumerate(read_lines(path), 1)]
    else:
        rows = parse_json(path.read_bytes(), path)
    if isinstance(rows, dict):
        year = path.stem.removeprefix("captions_")  # COCO's annotations/captions_val2017.json names images in val2017/
        folder = next((there for above in (folder, folder.parent) if (there := above / year).is_dir()), folder)
        try:
            rows = coco_rows(rows, key)
        except (KeyError, TypeError, ValueError) as problem:
            why = f"it has no {problem}, only {', '.join(list(rows)[:5])}" if isinstance(problem, KeyError) else problem
            raise ValueError(f"{path} is neither a captions_*.json of COCO nor a list of images with captions: {why}. "
                             f"Karpathy's dataset_coco.json is for `prepare coco`") from problem
    if not isinstance(rows, list):
        raise ValueError(f"{path} holds {type(rows).__name__}, no images with captions")
    return from_rows(rows, path, images or [folder], key)


def read_csv(path: Path, images: Sequence[str], key: str) -> list[Sample]:
    """Return the images of a table.

    A column file_name is relative to the table. Other names are paths, as open_clip_train reads them.
    """
    names = CAPTIONS if key == CAPTIONS[0] else (key,)
    form, found = read_forms(path, list(product(IMAGES, names)), SEPARATORS,
                             lambda lines, form: (form, list(read_rows(lines, form))))
    folders = images or [path.parent] * (form.image == FILE_NAME)
    return from_rows(({"image": row.image.strip(), key: [row.caption]} for row in found), path, folders, key)


def find_columns(schema: pa.Schema, path: Path) -> tuple[str, bool]:
    """Return the column of image bytes, and whether it is {bytes, path}. Raises ValueError if there is none."""
    found = {}
    for field in schema:
        kind = field.type
        whole = pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
        if pa.types.is_binary(part := kind.field("bytes").type if whole else kind) or pa.types.is_large_binary(part):
            found[field.name] = whole
    if not found:
        raise ValueError(f"{path} has no column of image bytes, only {', '.join(schema.names)}: if img2dataset wrote "
                         f"it, give the shards or folders beside it")
    name = next((name for name in ("image", *IMAGE_SUFFIXES) if name in found), next(iter(found)))
    return name, found[name]


def read_parquet(paths: list[str], key: str) -> Iterator[Sample]:
    """Stream tables of image bytes and captions. Raises ValueError if one is damaged or has no images."""
    for path in map(Path, progress_bar(paths, "prepare", "table")):
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                names = file.schema_arrow.names
                image, whole = find_columns(file.schema_arrow, path)
                wanted = [name for name in names if name in (image, *NAMES, *CAPTIONS, key)]
                seen = f" (columns: {', '.join(names)}, see --captions-key)"
                # One row at a time: a 4 kB file may repeat one large image, so that 16 rows are gigabytes.
                for number, batch in enumerate(file.iter_batches(1, columns=wanted)):
                    [row] = batch.to_pylist()
                    data, name = row.pop(image), caption_of(row, CAPTIONS[0], NAMES)
                    if whole and data:
                        name, data = data.get("path") or name, data["bytes"]
                    yield Sample(str(name or f"{path.name}#{number}"), data or b"", caption_of(row, key), seen)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as problem:
            why = " ".join(str(problem).split())
            raise ValueError(f"{path} is damaged: fetch or write it again ({why})") from problem


def read_folder(folder: Path, images: Sequence[str], key: str) -> Iterable[Sample]:
    """Return the samples of a folder by the first of: its metadata, shards, images with captions beside, tables."""
    below = [path for path in map(Path, files_below(folder)) if not is_hidden(str(path.relative_to(folder)))]
    files = [path for path in below if path.is_file()]  # leaves out a link to /dev/zero
    if tables := [path for path in files if path.name in ("metadata.csv", "metadata.jsonl")]:
        if len({path.parent for path in tables}) < len(tables):
            raise ValueError(f"{tables[0].parent} has metadata.csv and metadata.jsonl: remove one")
        return [sample._replace(name=str(table.parent.relative_to(folder) / sample.name)) for table in tables
                for sample in read(str(table), images, key)]
    if shards := [str(path) for path in files if is_shard(path)]:
        return read_shards(shards, key)
    if pictures := [path for path in below if path.suffix.lower() in IMAGE_FILES]:
        return read_beside(folder, pictures, key)
    if found := [str(path) for path in files if path.suffix.lower() == ".parquet"]:
        return read_parquet(found, key)
    raise FileNotFoundError(f"{folder} holds no image, no shard (.tar) and no table (.parquet)")


def read(pattern: str, images: Sequence[str], key: str) -> Iterable[Sample]:
    """Return the samples of a folder, a file or a pattern, as a list if images are files.

    Args:
        images: folders of the images that a table or JSON names, by default that of the table or JSON.
        key: key of the captions, where `CAPTIONS[0]` means any of CAPTIONS.

    Raises FileNotFoundError, or ValueError if it has none of the layouts at the head of this file. Samples that cannot
    be used are returned without image or captions.
    """
    if Path(pattern).is_dir():
        return read_folder(Path(pattern), images, key)
    paths = [pattern] if Path(pattern).exists() else sorted(glob(pattern)) or find_shards(pattern)
    name = paths[0].lower()
    if name.endswith(".parquet"):
        return read_parquet(paths, key)
    if name.endswith((".json", ".jsonl", *TABLES)):
        of = read_csv if name.endswith(TABLES) else read_json
        return [sample for path in paths for sample in of(Path(path), images, key)]
    return read_shards(paths, key)

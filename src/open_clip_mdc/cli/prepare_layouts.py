"""Images with captions in the layouts that people have them in, for `open_clip_mdc prepare shards`.

    DIR/a.jpg, DIR/a.txt or DIR/a.json          captions beside images, in folders within, too (img2dataset's files)
    DIR/metadata.csv, DIR/metadata.jsonl        Hugging Face's imagefolder: file_name, from there, and a caption
    DIR/*.parquet                               image bytes, or {bytes, path}, in a column (Hugging Face, img2dataset)
    captions_val2017.json                       COCO's captions; the images are in --images
    chat.json, chat.jsonl                       rows of an image and its caption, or LLaVA's conversations, of which the
                                                first answer is the caption
    pairs.csv                                   a table as open_clip_train reads it
    DIR/*.tar                                   webdataset's shards (img2dataset's webdataset)

Nothing in them is trusted: names stay within their folder, what is no file is not opened, sizes have limits.
"""
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from glob import glob
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ..data.csv_pairs import COLUMNS, SEPARATORS, open_table, read_forms, read_rows
from ..data.files import files_below, parse_json
from ..data.images import without_image
from ..data.paths import IMAGE_FILES, IMAGE_SUFFIXES, inside, is_hidden
from ..data.shards import (
    CAPTION_SEPARATOR,
    LARGEST_TEXT,
    find_shards,
    image_member,
    members,
    read_metadata,
    read_samples,
)
from ..data.text import decode_text, read_lines
from ..progress import progress_bar

CAPTIONS = ("captions", "caption", "text")  # where captions are looked for; the first is --captions-key's default
IMAGES = ("file_name", "image")  # names of a row's image
NAMES = ("filename", "file_name", "key", "id")  # of the image, beside its bytes
CSV = (".csv", ".tsv", ".csv.gz", ".tsv.gz")


class Sample(NamedTuple):
    """An image and its captions as the source has them."""

    name: str  # of the image, kept in KEY.json
    image: bytes | Path
    captions: object  # a list of texts, or what stood in its place
    seen: str = ""  # where else there may be captions


def read_file(path: Path, most: int) -> bytes:
    """Return the bytes of a file. Raises OSError, or ValueError for one that has more than `most`, or a device."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise ValueError(f"{path} is no file")
    if about.st_size > most:
        raise ValueError(f"{path} has {about.st_size:,} bytes, more than the {most:,} that are read")
    return path.read_bytes()


def caption_of(row: Mapping, key: str, names: tuple[str, ...] = CAPTIONS) -> object:
    """Return what a row has under `key`, or under the first of `names` where `key` is the default."""
    return next((row[name] for name in (names if key == CAPTIONS[0] else (key,)) if row.get(name)), None)


def captions_of(sample: dict, text: str, key: str) -> tuple[object, str]:
    """Return captions in KEY.json, or else in the lines of KEY.txt, and where else there may be some."""
    metadata = read_metadata(sample)
    captions = caption_of(metadata, key, CAPTIONS[:2])
    if captions is None and key == CAPTIONS[0]:
        captions = re.split(f"[\n{CAPTION_SEPARATOR}]", text) if text.strip() else metadata.get("text")
    return captions, f"; its members: {', '.join(members(sample))}" + (
        f", keys of its JSON: {', '.join(metadata)}; see --captions-key" if metadata else "")


def read_shards(shards: list[str], key: str) -> Iterator[Sample]:
    """Stream shards of KEY.jpg with captions in KEY.json or KEY.txt."""
    for shard in progress_bar(shards, "prepare", "shard"):
        for sample in read_samples(shard):
            suffix, metadata = image_member(sample), read_metadata(sample)
            name = str(metadata.get("filename", f"{sample['__key__']}.{suffix}" if suffix else without_image(sample)))
            text = sample.get("txt", b"").decode("utf-8-sig", errors="replace")
            yield Sample(name, sample.get(suffix, b""), *captions_of(sample, text, key))


def read_beside(folder: Path, images: list[Path], key: str) -> list[Sample]:
    """Return images of a folder with the captions in a .txt or .json of their name."""
    found = []
    for path in images:
        try:
            files = {suffix: file for suffix in ("txt", "json") if (file := path.with_suffix(f".{suffix}")).exists()}
            sample = {suffix: read_file(file, LARGEST_TEXT) for suffix, file in files.items()}
            text = decode_text(sample["txt"], files["txt"]) if files.get("txt") else ""
            captions, seen = captions_of(sample, text, key)
        except (OSError, ValueError) as problem:
            files, captions, seen = {"txt": path}, None, f": {problem}"
        found.append((Sample(str(path.relative_to(folder)), path, captions, seen), files))
    if not any(files for _, files in found):
        raise ValueError(f"{folder}: none of its {len(found)} images has a .txt or .json beside it, and there is no "
                         f"metadata.csv or metadata.jsonl: where are its captions?")
    return [sample for sample, _ in found]


def from_rows(rows: Iterable, source: Path, folder: Path | None, key: str) -> list[Sample]:
    """Return an image once with the captions of all its rows.

    Args:
        rows: objects with the name of an image and its captions.
        folder: that images are in. None to take names as paths, from the present folder.

    Raises ValueError for a row that is no object, or names an image outside the folder.
    """
    found: dict[str, Sample] = {}
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"{source}, row {number} is {type(row).__name__}, not an object such as "
                             '{"image": "a.jpg", "caption": "a dog"}')
        name, captions = next((row[name] for name in IMAGES if row.get(name)), None), caption_of(row, key)
        if captions is None and isinstance(turns := row.get("conversations"), list):
            captions = next((turn.get("value") for turn in turns if isinstance(turn, dict) and turn.get("from") in (
                "gpt", "assistant")), None)
        if not isinstance(name, str):
            name, image = f"row {number}", b""
        else:
            image = Path(name) if folder is None else inside(folder, name, source, number)
        sample = found.setdefault(name, Sample(name, image, [], f"; its keys: {', '.join(row)}; see --captions-key"))
        sample.captions.extend(captions if isinstance(captions, list) else [captions])
    if not found:
        raise ValueError(f"{source} has no row")
    return list(found.values())


def coco_rows(content: dict, key: str) -> list[dict]:
    captions: dict[object, list] = {}
    for row in content["annotations"]:
        captions.setdefault(row["image_id"], []).append(row["caption"])
    return [{"file_name": image["file_name"], key: captions.get(image["id"])} for image in content["images"]]


def parse_line(path: Path, number: int, line: str) -> object:
    try:
        return parse_json(line)
    except ValueError as problem:
        raise ValueError(f"{path}, line {number} is no JSON: {problem}") from problem


def read_json(path: Path, images: str | None, key: str) -> list[Sample]:
    """Return the images of COCO's captions, or of a list or lines of rows (`from_rows`)."""
    if path.suffix.lower() == ".jsonl":
        rows = [parse_line(path, number, line) for number, line in enumerate(read_lines(path), 1)]
    else:
        try:
            rows = parse_json(path.read_bytes())
        except ValueError as problem:
            raise ValueError(f"{path} is no JSON: {problem}") from problem
    folder = path.parent
    if isinstance(rows, dict):
        year = path.stem.removeprefix("captions_")  # COCO's annotations/captions_val2017.json is of val2017/
        folder = next((there for above in (folder, folder.parent) if (there := above / year).is_dir()), folder)
        try:
            rows = coco_rows(rows, key)
        except (KeyError, TypeError) as problem:
            raise ValueError(f"{path} is no captions_*.json of COCO, nor a list of images with captions (it has no "
                             f"{problem}); Karpathy's dataset_coco.json is for: prepare coco") from problem
    return from_rows(rows, path, Path(images) if images else folder, key)


def read_csv(path: Path, images: str | None, key: str) -> list[Sample]:
    """Return the images of a table. Those of a column file_name are beside it, others where open_clip_train looks."""
    names = CAPTIONS if key == CAPTIONS[0] else (key,)
    columns = [*((image, name) for image in IMAGES for name in names), COLUMNS[1]]
    found = read_forms(path, columns, SEPARATORS, lambda lines, form: list(read_rows(lines, form)))
    with open_table(path) as file:
        beside = IMAGES[0].encode() in next(line for line in file if line.strip())
    folder = Path(images) if images else path.parent if beside else None
    return from_rows(({"image": row.image.strip(), key: [row.caption]} for row in found), path, folder, key)


def find_columns(schema: pa.Schema, path: Path) -> tuple[str, bool]:
    """Return the column of image bytes, and whether it is {bytes, path}. Raises ValueError where there is none."""
    found = {}
    for field in schema:
        kind = field.type
        whole = pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
        if pa.types.is_binary(part := kind.field("bytes").type if whole else kind) or pa.types.is_large_binary(part):
            found[field.name] = whole
    if not found:
        raise ValueError(f"{path} has no column of image bytes, only {', '.join(schema.names)}: img2dataset writes "
                         f"such tables beside its shards and folders: name these")
    name = next((name for name in ("image", *IMAGE_SUFFIXES) if name in found), next(iter(found)))
    return name, found[name]


def read_parquet(paths: list[str], key: str) -> Iterator[Sample]:
    """Stream tables of image bytes and captions. Raises ValueError where one is damaged or has no images."""
    for path in map(Path, progress_bar(paths, "prepare", "table")):
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                names = file.schema_arrow.names
                image, whole = find_columns(file.schema_arrow, path)
                wanted = [name for name in names if name in (image, *NAMES, *CAPTIONS, key)]
                seen = f"; its columns: {', '.join(names)}; see --captions-key"
                # One row at a time: 16 of a file of 4 kB that says one large image again and again are gigabytes.
                for number, batch in enumerate(file.iter_batches(1, columns=wanted)):
                    [row] = batch.to_pylist()
                    data, name = row.pop(image), caption_of(row, CAPTIONS[0], NAMES)
                    if whole and data:
                        name, data = data.get("path") or name, data["bytes"]
                    yield Sample(str(name or f"{path.name}#{number}"), data or b"", caption_of(row, key), seen)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as problem:
            why = " ".join(str(problem).split())
            raise ValueError(f"{path} is no whole parquet table; fetch or write it again ({why})") from problem


def read_folder(folder: Path, images: str | None, key: str) -> Iterable[Sample]:
    """Return what a folder holds: images by its metadata, shards, images with captions beside them, or tables."""
    below = [Path(name) for name in files_below(folder)]
    below = [path for path in below if not is_hidden(str(path.relative_to(folder)))]
    files = [path for path in below if path.is_file()]  # no link to /dev/zero
    tables = [path for path in files if path.name in ("metadata.csv", "metadata.jsonl")]
    if tables:
        if len({path.parent for path in tables}) < len(tables):
            raise ValueError(f"{tables[0].parent} has metadata.csv and metadata.jsonl: remove one")
        found = [[sample._replace(name=str(table.parent.relative_to(folder) / sample.name)) for sample in
                  (read_csv if table.suffix == ".csv" else read_json)(table, images, key)] for table in tables]
        return [sample for samples in found for sample in samples]
    if shards := [str(path) for path in files if path.suffix.lower() == ".tar"]:
        return read_shards(shards, key)
    if pictures := [path for path in below if path.suffix.lower() in IMAGE_FILES]:
        return read_beside(folder, pictures, key)
    if found := [str(path) for path in files if path.suffix.lower() == ".parquet"]:
        return read_parquet(found, key)
    raise FileNotFoundError(f"{folder} holds no image, no shard (.tar) and no table (.parquet)")


def read(pattern: str, images: str | None, key: str) -> Iterable[Sample]:
    """Return the samples of a folder, a file or a pattern. A list where images are files.

    Args:
        images: the folder of the images that a table or JSON names, by default its own.
        key: name of the captions, of `CAPTIONS[0]` any of CAPTIONS.

    Raises FileNotFoundError. ValueError where it is none of the layouts (head of this file). What cannot be used of a
    layout is left in, without image or captions.
    """
    if Path(pattern).is_dir():
        return read_folder(Path(pattern), images, key)
    paths = sorted(glob(pattern)) or find_shards(pattern)
    name = paths[0].lower()
    if name.endswith(".parquet"):
        return read_parquet(paths, key)
    if name.endswith((".json", ".jsonl", *CSV)):
        of = read_csv if name.endswith(CSV) else read_json
        return [sample for path in paths for sample in of(Path(path), images, key)]
    return read_shards(paths, key)

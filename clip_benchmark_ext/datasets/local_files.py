"""Find and read annotation files and images that you downloaded, and say how to get those that are missing.

Nothing is downloaded here. File names in a data file are not trusted.
"""
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from open_clip_mdc.data.files import parse_json
from open_clip_mdc.data.text import read_text


@dataclass(frozen=True)
class Source:
    """A data set's files: where they are found, and where to get them if they are missing."""

    file: str
    folders: tuple[str, ...]  # of `file`, below the root, tried in this order
    images: tuple[str, ...]  # folders of the images, below that of `file`, tried in this order
    fetch: str  # what to download, for a message
    layout: str  # where to put it, for a message


@lru_cache(maxsize=2)  # rows are read in order
def _row_group(table: Path, number: int) -> pa.Table:
    with pq.ParquetFile(table) as file:
        return file.read_row_group(number)


@dataclass(frozen=True)
class Cell:
    """An image in a Parquet table in Hugging Face's form {"bytes", "path"}, by row group and row."""

    table: Path
    group: int
    row: int
    column: str

    @property
    def name(self) -> str:
        return f"{self.table.name}#{self.group}.{self.row}.{self.column}"

    def open(self) -> BytesIO:
        """Return the encoded image. Raises ValueError if the cell holds none."""
        content = _row_group(self.table, self.group)[self.column][self.row].as_py()
        if not isinstance(content, dict) or not isinstance(content.get("bytes"), bytes):
            raise ValueError(f"{self.table}: {self.name} holds no image")
        return BytesIO(content["bytes"])


def find(source: Source, name: str, root: Path) -> Path:
    for folder in source.folders:
        if (path := root / folder / source.file).is_file():
            return path
    raise FileNotFoundError(f"{name}: no {source.file} in {root}. {how_to_get(source)}")


def image_folder(source: Source, name: str, path: Path) -> Path:
    for folder in source.images:
        if (candidate := path.parent / folder).is_dir():
            return candidate
    raise FileNotFoundError(
        f"{name}: no folder of images ({' or '.join(source.images)}) in {path.parent}. {how_to_get(source)}")


def need_images(source: Source, name: str, folder: Path, cases: list) -> None:
    """Raise FileNotFoundError, with one message for all, if images are missing, and ValueError if there are no rows."""
    rows = [case.images for case in cases]
    if not rows:
        raise ValueError(f"{name}: {source.file} has no rows")
    missing = {path for path in {path for row in rows for path in row} if not path.is_file()}
    if missing:
        count = sum(any(path in missing for path in row) for row in rows)
        raise FileNotFoundError(f"{name}: {count} of {len(rows)} rows have no image, as {len(missing)} files are "
                                f"missing in {folder}, such as {min(missing).name}. {how_to_get(source)}")


def how_to_get(source: Source) -> str:
    return f"Fetch {source.fetch}. The folder given by --dataset_root (ROOT) should then hold: {source.layout}"


def read_json(path: Path, kind: type) -> dict | list:
    try:
        content = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, kind):
        raise ValueError(f"{path} should hold a JSON {kind.__name__}, not a {type(content).__name__}")
    return content


def read_json_lines(path: Path) -> Iterator[tuple[int, object]]:
    """Yield number and content of each line that is not empty. Raises ValueError for a line that is not JSON."""
    for index, line in enumerate(read_text(path).split("\n")):
        if line.strip():
            try:
                row = parse_json(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {index + 1} is not JSON: {error}") from error
            yield index, row


def value(row: dict, key: str, kind: type | tuple[type, ...], path: Path, number: str | int):
    value = row.get(key) if isinstance(row, dict) else None
    if not isinstance(value, kind):
        raise ValueError(f"{path}, row {number}: {key!r} is missing or of a wrong kind ({value!r})")
    return value


def texts(row: dict, keys: Iterable[str], path: Path, number: str | int) -> list[str]:
    return [value(row, key, str, path, number) for key in keys]

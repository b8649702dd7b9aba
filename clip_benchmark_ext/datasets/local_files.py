"""Find and read annotation files and images that you downloaded, and say how to get those that are missing.

Nothing is downloaded here. File names in a data file are not trusted. `row` is a row of datasets.json.
"""
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from open_clip_mdc.data.files import parse_json
from open_clip_mdc.data.text import read_text


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


def find(row: dict, name: str, root: Path) -> Path:
    for folder in row["folders"]:
        if found := sorted((root / folder).glob(row["file"])):
            return found[0]
    raise FileNotFoundError(f"{name}: no {row['file']} in {root}. {how_to_get(row)}")


def image_folder(row: dict, name: str, path: Path) -> Path:
    if not row["images"]:  # names in the file are from its folder on
        return path.parent
    for folder in row["images"]:
        if (candidate := path.parent / folder).is_dir():
            return candidate
    raise FileNotFoundError(
        f"{name}: no folder of images ({' or '.join(row['images'])}) in {path.parent}. {how_to_get(row)}")


def need_images(row: dict, name: str, folder: Path, cases: list) -> None:
    """Raise FileNotFoundError, with one message for all, if images are missing, and ValueError if there are no rows."""
    if not cases:
        raise ValueError(f"{name}: {row['file']} has no rows" + f" of the split {row['split']!r}" * (
            "split" in row.get("columns", ())))
    files = {path for case in cases for path in case.images if not isinstance(path, Cell)}
    missing = {path for path in files if not path.is_file()}
    if missing:
        count = sum(not missing.isdisjoint(case.images) for case in cases)
        raise FileNotFoundError(f"{name}: {count} of {len(cases)} rows have no image, as {len(missing)} files are "
                                f"missing in {folder}, such as {min(missing).name}. {how_to_get(row)}")


def how_to_get(row: dict) -> str:
    fetch = f"Fetch {row['fetch']}. " if "fetch" in row else ""
    layout = row.get("layout", f"ROOT/{row['file']}")
    return f"{fetch}The folder given by --dataset_root (ROOT) should then hold: {layout}"


def read_json(path: Path, *kinds: str) -> dict | list:
    """Return the content of a JSON file, which should be one of `kinds`, "dict" or "list"."""
    content = parse_json(path.read_bytes(), path)
    if type(content).__name__ not in kinds:
        raise ValueError(f"{path} should hold a JSON {' or '.join(kinds)}, not a {type(content).__name__}")
    return content


def read_json_lines(path: Path, row: dict) -> Iterator[tuple[int, object]]:
    """Yield number and content of each line that is not empty. Raises ValueError for a line that is not JSON."""
    for index, line in enumerate(read_text(path).split("\n")):
        if line.strip():
            yield index, parse_json(line, f"{path}, line {index + 1}")


def entry_value(entry: object, name: str, kind: type | tuple[type, ...], path: Path, key: str | int):
    """Return a field of an entry of a file. Raises ValueError if it is missing or not of this kind."""
    value = entry.get(name) if isinstance(entry, dict) else None
    if not isinstance(value, kind):
        raise ValueError(f"{path}, row {key}: {name!r} is missing or of a wrong kind ({value!r})")
    return value

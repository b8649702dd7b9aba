"""Images and captions in a CSV file with the columns image and caption, read in parts of so many rows.

A part begins at a byte of the file, so that a late one costs no more than the first.
"""
import csv
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

COLUMNS = ("image", "caption")


class CsvRows(NamedTuple):
    """A part of a CSV file."""

    path: Path
    number: int
    start: int  # byte of its first row
    count: int  # of rows
    columns: tuple[int, int]  # places of image and caption
    folder: str  # that relative paths of images are in


def read_lines(file: BinaryIO) -> Iterator[str]:
    """Lines as they are asked for, so that `file.tell()` is where the next row begins."""
    while line := file.readline():
        yield line.decode("utf-8", errors="replace")


def read_rows(path: Path, lines: Iterator[str]) -> Iterator[list[str]]:
    """Rows of any length.

    Raises:
        ValueError: one is no row of a CSV file.
    """
    csv.field_size_limit(sys.maxsize)  # of the process; by default a caption of 131,072 letters is refused
    reader, line = csv.reader(lines, strict=True), 1  # not strict, an open quote takes all rows after it for one cell
    try:
        for row in reader:
            yield row
            line = reader.line_num + 1
    except csv.Error as problem:
        raise ValueError(f"{path}, line {line} is no row of a CSV file ({problem}): close its quotes, and double those "
                         f"within a caption") from problem


def split_csv(path: Path, size: int = 10_000) -> list[CsvRows]:
    """Parts of `size` rows; images are where the present folder says, as for open_clip_train.

    Raises:
        ValueError: it has no such columns, or no row.
    """
    parts: list[CsvRows] = []
    with path.open("rb") as file:
        rows = read_rows(path, read_lines(file))
        header = next(rows, [])
        if missing := [name for name in COLUMNS if name not in header]:
            raise ValueError(f"{path} has no column {missing[0]!r}, only {header}: it needs image,caption")
        columns = tuple(map(header.index, COLUMNS))
        while True:
            start = file.tell()
            count = sum(1 for _ in islice(rows, size))
            if not count:
                break
            parts.append(CsvRows(path.absolute(), len(parts), start, count, columns, os.getcwd()))
    if not parts:
        raise ValueError(f"{path} has no row")
    return parts


def read_csv(part: CsvRows) -> Iterator[tuple[str, Path, str]]:
    """A name (the image's, with #ROW where it comes again), the image's path and its caption.

    Raises:
        ValueError: a row has too few cells.
    """
    seen: set[str] = set()
    with part.path.open("rb") as file:
        file.seek(part.start)
        for number, row in enumerate(islice(read_rows(part.path, read_lines(file)), part.count)):
            if len(row) <= max(part.columns):
                raise ValueError(f"{part.path}: row {number + 1} after byte {part.start} has {len(row)} cells: {row}")
            image, caption = (row[place] for place in part.columns)
            yield image + f"#{number}" * (image in seen), Path(part.folder, image), caption
            seen.add(image)

"""Images and captions in a table (CSV or TSV), the one reader for training and tools, in parts of so many rows.

The header names the columns and tells the separator: comma, tab or semicolon. Quotes are doubled within a cell (RFC
4180). A header in quotes also allows escaped ones (R's write.table). In a table of tabs that cannot be read so, they
are part of the text. "None" and "NA" are captions. Blank lines and rows of empty cells are skipped.

A part begins at a byte, so that a late one costs no more than the first: of UTF-16 and of lines that end in CR a byte
of the same text in UTF-8 with LF, which is made in memory.
"""
import csv
import gzip
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path, PurePath
from typing import BinaryIO, NamedTuple

from .paths import to_shards
from .text import HEAD, check_head, decode_text, find_mark, no_text

TABLES = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz")
COLUMNS = (("image", "caption"), ("filepath", "title"))  # ours, OpenCLIP's
SEPARATORS = (",", "\t", ";")
QUOTES = {"doubled": {}, "escaped": {"escapechar": "\\", "doublequote": False}, "none": {}}


class Form(NamedTuple):
    separator: str
    quotes: str  # of QUOTES
    cells: int  # of each row
    columns: tuple[int, int]  # places of image and caption


class Row(NamedTuple):
    line: int  # where it begins, from 1
    image: str
    caption: str


class CsvRows(NamedTuple):
    path: Path
    number: int
    start: int  # byte of its first row
    count: int  # of rows
    form: Form
    folder: str  # that relative paths of images are in
    line: int  # of its first row


class Lines:
    """Lines as they are asked for, so that `file.tell()` is where the next row begins. Counts them."""

    def __init__(self, path: Path, file: BinaryIO, count: int = 0):
        self.path, self.file, self.count = path, file, count

    def __iter__(self) -> Iterator[str]:
        while line := self.file.readline():
            self.count += 1
            try:
                yield line.decode()
            except UnicodeDecodeError as problem:
                raise no_text(self.path, self.count, problem) from problem


def open_table(path: Path) -> BinaryIO:
    """Open a table's text as UTF-8 without a mark, by lines that end in LF. Raises ValueError where it is no text."""
    file = gzip.open(path) if path.suffix == ".gz" else path.open("rb")
    try:
        head = file.read(HEAD)
        check_head(path, head)
        mark, end = find_mark(head), re.search(b"\r\n?|\n", head)
        file.seek(0)
        if len(mark) == 2 or end and end[0] == b"\r":
            with file:
                return io.BytesIO(decode_text(file.read(), path).encode())
        file.seek(len(mark))
        return file
    except BaseException:
        file.close()
        raise


def looks_merged(row: list[str], form: Form) -> bool:
    """Return whether a cell of several lines holds other rows: its quote was never meant to open a cell."""
    suffix = PurePath(row[form.columns[0]].strip()).suffix
    inside = [line.split(form.separator) for cell in row if "\n" in cell for line in cell.split("\n")]
    if not suffix:  # a tab within a caption is rarer than an open quote
        return form.separator == "\t" and any(len(pieces) > 1 for pieces in inside)
    return any(len(pieces) > 1 and piece.strip(' "\r').endswith(suffix) for pieces in inside for piece in pieces)


def read_rows(lines: Lines, form: Form) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # of the process; by default a caption of 131,072 letters is refused
    if form.quotes == "none":
        rows = (line.rstrip("\r\n").split(form.separator) for line in lines)
    else:  # not strict, an open quote takes all rows after it for one cell
        rows = csv.reader(lines, delimiter=form.separator, strict=True, **QUOTES[form.quotes])
    first = lines.count + 1
    try:
        for row in rows:
            while len(row) > form.cells and not row[-1].strip():
                row.pop()
            if any(cell.strip() for cell in row):
                if len(row) != form.cells:
                    raise ValueError(f"{lines.path}, line {first} has {len(row)} cells and the header {form.cells}: "
                                     f"put a cell that holds {form.separator!r} or a line end in quotes")
                if lines.count > first and looks_merged(row, form):
                    raise ValueError(f"{lines.path}, line {first} opens a quote that closes in line {lines.count}, "
                                     f"with other rows between: close it, or double those within a caption")
                yield Row(first, *(row[place] for place in form.columns))
            first = lines.count + 1
    except csv.Error as problem:
        raise ValueError(f"{lines.path}, line {first} is no row of a CSV file ({problem}): close its quotes, and "
                         f"double those within a caption") from problem


def find_forms(lines: Lines, columns: Sequence[tuple[str, str]], separators: Iterable[str]) -> list[Form]:
    """Return how the rows after a header may be written, the likeliest first. Raises ValueError for its columns."""
    header = next((line for line in lines if line.strip()), "")
    cells = {sep: [cell.strip() for cell in next(csv.reader([header], delimiter=sep), [])] for sep in separators}
    for names in columns:
        for separator, found in cells.items():
            if set(names) <= set(found):
                if twice := [name for name in names if found.count(name) > 1]:
                    raise ValueError(f"{lines.path} has two columns {twice[0]!r}: rename one")
                quotes = ["doubled"] + ["escaped"] * ('"' in header) + ["none"] * (separator == "\t" and
                                                                                  '"' not in header)
                return [Form(separator, each, len(found), tuple(map(found.index, names))) for each in quotes]
    names = max(cells.values(), key=len)
    what = (f"make shards of it by {to_shards(lines.path)}" if "file_name" in names else
            "its first line should name them")
    raise ValueError(f"{lines.path} has no columns {' or '.join(','.join(pair) for pair in columns)}, only {names}: "
                     f"{what}")


def read_forms(path: Path, columns: Sequence[tuple[str, str]], separators: Iterable[str],
               read: Callable[[Lines, Form], list]) -> list:
    """Return what `read` makes of the lines after the header in the first form that fits all of them, not empty."""
    problem = None
    with open_table(path) as file:
        forms, begin = find_forms(header := Lines(path, file), columns, separators), file.tell()
        for form in forms:
            file.seek(begin)
            try:
                found = read(Lines(path, file, header.count), form)
            except ValueError as wrong:
                problem = problem or wrong
                continue
            if not found:
                raise ValueError(f"{path} has no row")
            return found
    raise problem


def split_csv(path: Path, size: int = 10_000) -> list[CsvRows]:
    """Return parts of `size` rows. Images are where the present folder says, as for open_clip_train."""
    def split(lines: Lines, form: Form) -> list[CsvRows]:
        parts: list[CsvRows] = []
        rows = read_rows(lines, form)
        while True:
            start, line = lines.file.tell(), lines.count + 1
            count = sum(1 for _ in islice(rows, size))
            if not count:
                return parts
            parts.append(CsvRows(path.absolute(), len(parts), start, count, form, os.getcwd(), line))

    return read_forms(path, COLUMNS, SEPARATORS, split)


def read_part(part: CsvRows) -> Iterator[Row]:
    with open_table(part.path) as file:
        file.seek(part.start)
        yield from islice(read_rows(Lines(part.path, file, part.line - 1), part.form), part.count)


def read_csv(part: CsvRows) -> Iterator[tuple[str, Path, str]]:
    """Yield a name (the image's, with #ROW where it comes again), the image's path and its caption."""
    seen: set[str] = set()
    for number, (_, image, caption) in enumerate(read_part(part)):
        yield image + f"#{number}" * (image in seen), Path(part.folder, image), caption
        seen.add(image)


def read_table(path: str | Path, image: str, caption: str, separator: str) -> list[Row]:
    """Return all rows, by open_clip_train's flags or, where these are OpenCLIP's defaults, as the header says."""
    named = (image, caption)
    columns = [named, COLUMNS[0]] if named == COLUMNS[1] else [named]
    separators = dict.fromkeys(s for s in (separator.replace("\\t", "\t"), *SEPARATORS) if len(s) == 1)
    return read_forms(Path(path), columns, separators, lambda lines, form: list(read_rows(lines, form)))

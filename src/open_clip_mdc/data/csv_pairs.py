"""Read images and captions from a CSV or TSV table, for training and for the command-line tools.

The header names the columns and tells the separator: comma, tab or semicolon. Quotes within a cell are doubled (RFC
4180). If the header is in quotes, they may also be escaped (R's write.table). If a table separated by tabs cannot be
read so, quotes are part of the text. "None" and "NA" are captions. Blank lines and rows of empty cells are skipped.

A table is read in parts of so many rows. A part knows the byte at which it begins, so that the last one is read as fast
as the first. UTF-16 and lines that end in CR are converted in memory to UTF-8 and LF, where the byte is counted.
"""
import csv
import gzip
import io
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, product
from pathlib import Path, PurePath
from typing import BinaryIO, NamedTuple

from .files import AnyPath, check_readable
from .paths import to_shards
from .text import HEAD, check_head, decode_text, find_mark, no_text, unique

TABLES = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz")
# Names of an image and of its captions, in a table's header and in JSON. Those of FILE_NAME are relative to the table.
FILE_NAME, CAPTIONS = "file_name", ("captions", "caption", "text", "title")
IMAGES = (FILE_NAME, "image", "filepath", "image_path", "image_file", "image_name")
OURS, OPEN_CLIPS = ("image", "caption"), ("filepath", "title")
COLUMNS = tuple(dict.fromkeys((OURS, OPEN_CLIPS, *product(IMAGES[1:], CAPTIONS))))
SEPARATORS = (",", "\t", ";")
QUOTES = {"doubled": {}, "escaped": {"escapechar": "\\", "doublequote": False}, "none": {}}
CUT_OFF = "is cut off or damaged: compress it again"
csv.field_size_limit(sys.maxsize)  # for the whole process. By default a cell of 131,072 characters is refused


class Form(NamedTuple):
    """The form of the rows in a table."""

    separator: str
    quotes: str  # a key of QUOTES
    cells: int  # number of cells in a row
    columns: tuple[int, int]  # indices of image and caption
    image: str  # name of the image's column


class Row(NamedTuple):
    """An image and its caption."""

    line: int  # the line where the row begins, from 1
    image: str
    caption: str


class CsvRows(NamedTuple):
    """A part of a table: consecutive rows."""

    path: Path
    number: int
    start: int  # byte of its first row
    count: int  # number of rows
    form: Form
    line: int  # line of its first row


class Lines:
    """The lines of a file, counted, and read one by one so that `file.tell()` is where the next row begins."""

    def __init__(self, path: Path, file: BinaryIO, count: int = 0):
        self.path, self.file, self.count = path, file, count

    def __iter__(self) -> Iterator[str]:
        try:
            while line := self.file.readline():
                self.count += 1
                yield line.decode()
        except UnicodeDecodeError as problem:
            raise no_text(self.path, self.count, problem) from problem
        except (EOFError, zlib.error) as problem:
            raise ValueError(f"{self.path} {CUT_OFF}") from problem


def open_table(path: Path) -> BinaryIO:
    """Open a table as UTF-8 without a byte order mark and with lines that end in LF. Raises ValueError if not text."""
    check_readable(path)
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
    except (EOFError, zlib.error) as problem:
        file.close()
        raise ValueError(f"{path} {CUT_OFF}") from problem
    except BaseException:
        file.close()
        raise


def looks_merged(row: list[str], form: Form) -> bool:
    """Return whether a cell of several lines contains other rows, because its quote was not meant to open a cell."""
    suffix = PurePath(row[form.columns[0]].strip()).suffix
    lines = [line for cell in row if "\n" in cell for line in cell.split("\n") if form.separator in line]
    if not suffix:  # tabs within a caption are rarer than open quotes
        return form.separator == "\t" and bool(lines)
    return any(piece.strip(' "\r').endswith(suffix) for line in lines for piece in line.split(form.separator))


def read_rows(lines: Lines, form: Form) -> Iterator[Row]:
    """Yield rows. Raises ValueError for a row with other numbers of cells than the header, or with an open quote."""
    if form.quotes == "none":
        rows = (line.rstrip("\r\n").split(form.separator) for line in lines)
    else:  # without strict=True an open quote would make all rows after it one cell
        rows = csv.reader(lines, delimiter=form.separator, strict=True, **QUOTES[form.quotes])
    first = lines.count + 1
    try:
        for row in rows:
            while len(row) > form.cells and not row[-1].strip():
                row.pop()
            if any(cell.strip() for cell in row):
                if len(row) != form.cells:
                    raise ValueError(f"{lines.path}, line {first} has {len(row)} cells and the header {form.cells}: "
                                     f"put cells that contain {form.separator!r} or a line end in quotes")
                if lines.count > first and looks_merged(row, form):
                    raise ValueError(f"{lines.path}, line {first} opens a quote that closes in line {lines.count}, "
                                     f"with other rows between: close it, or double those within a caption")
                yield Row(first, *(row[place] for place in form.columns))
            first = lines.count + 1
    except csv.Error as problem:
        raise ValueError(f"{lines.path}, line {first} is no row of a CSV file ({problem}): close its quotes, and "
                         f"double those within a caption") from problem


def find_forms(lines: Lines, columns: Sequence[tuple[str, str]], separators: Iterable[str]) -> list[Form]:
    """Return the forms that the rows may have by the header, the likeliest first. Raises ValueError for its columns."""
    header = next((line for line in lines if line.strip()), "")
    def split(separator: str) -> list[str]:
        return [cell.strip() for cell in next(csv.reader([header], delimiter=separator), [])]

    cells = {separator: split(separator) for separator in separators}
    for names in columns:
        for separator, found in cells.items():
            if set(names) <= set(found):
                if twice := [name for name in names if found.count(name) > 1]:
                    raise ValueError(f"{lines.path} has two columns {twice[0]!r}: rename one")
                quotes = ["doubled"] + ["escaped"] * ('"' in header) + ["none"] * (separator == "\t" and
                                                                                  '"' not in header)
                return [Form(separator, each, len(found), tuple(map(found.index, names)), names[0])
                        for each in quotes]
    separator = max((*cells, "|"), key=lambda separator: len(split(separator)))
    names = split(separator)
    what = f"make shards of it by {to_shards(lines.path)}" if FILE_NAME in names else "its first line should name them"
    if separator not in cells:
        what += f", and commas or tabs separate them, not {separator!r}"
    raise ValueError(f"{lines.path} has no columns {' or '.join(','.join(pair) for pair in columns[:2])}, only "
                     f"{str(names)[:300]} (separated by {separator!r}): {what}")


def read_forms(path: Path, columns: Sequence[tuple[str, str]], separators: Iterable[str],
               read: Callable[[Lines, Form], list]) -> list:
    """Return the result of `read` on the lines after the header, in the first form that fits all rows."""
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
    """Split a table into parts of `size` rows. Image paths are relative to the working directory, as in training."""
    def split(lines: Lines, form: Form) -> list[CsvRows]:
        parts, rows = [], read_rows(lines, form)
        while True:
            start, line = lines.file.tell(), lines.count + 1
            count = sum(1 for _ in islice(rows, size))
            if not count:
                return parts
            parts.append(CsvRows(path.absolute(), len(parts), start, count, form, line))

    return read_forms(path, COLUMNS, SEPARATORS, split)


def read_part(part: CsvRows) -> Iterator[Row]:
    """Yield the rows of a part."""
    with open_table(part.path) as file:
        file.seek(part.start)
        yield from islice(read_rows(Lines(part.path, file, part.line - 1), part.form), part.count)


def image_path(name: str) -> Path:
    """Return the path of a row's image. What Windows wrote with \\ is found with /, unless it is there as it is."""
    path, with_slashes = Path(name), Path(name.replace("\\", "/"))
    return with_slashes if "\\" in name and not path.exists() and with_slashes.exists() else path


def read_csv(part: CsvRows) -> Iterator[tuple[str, Path, str]]:
    """Yield name, path and caption of each image. The name is the image's, with #ROW if it appears again."""
    seen = set()
    for number, (_, image, caption) in enumerate(read_part(part)):
        yield unique(image, number, seen), image_path(image), caption


def read_table(path: AnyPath, image: str, caption: str, separator: str) -> list[Row]:
    """Return all rows, by the columns and separator of open_clip_train's flags. Defaults give way to the header."""
    named = (image, caption)
    columns = [named, *COLUMNS] if named == OPEN_CLIPS else [named]
    separators = dict.fromkeys(s for s in (separator.replace("\\t", "\t"), *SEPARATORS) if len(s) == 1)
    return read_forms(Path(path), columns, separators, lambda lines, form: list(read_rows(lines, form)))

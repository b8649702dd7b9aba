"""Read text files as common programs save them: UTF-8, or UTF-16 with a byte order mark (Excel), and any line ends."""
import codecs
import logging
import re
from collections import Counter
from pathlib import Path

from .files import AnyPath, check_readable
from .paths import to_shards

MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
HEAD = 2 ** 20  # bytes at the beginning that tell what a file is


def unique(name: str, number: int, seen: set) -> str:
    """Return a name that is not in `seen`, and add it: NAME, or NAME#NUMBER if it comes again."""
    while name in seen:
        name += f"#{number}"
    seen.add(name)
    return name


def find_mark(head: bytes) -> bytes:
    """Return the byte order mark at the beginning, or b"" if there is none."""
    return next((mark for mark in MARKS if head.startswith(mark)), b"")


def no_text(path: AnyPath, line: int, problem: UnicodeDecodeError) -> ValueError:
    """Return the error for a line that is not UTF-8."""
    return ValueError(f"{path}, line {line} is no UTF-8 text (byte 0x{problem.object[problem.start]:02x}): save the "
                      f"file as UTF-8")


def check_head(path: AnyPath, head: bytes) -> None:
    """Raise ValueError for a file that is not text at all."""
    zeros = 8 * head.count(0) > len(head) and len(find_mark(head)) != 2  # UTF-8 has few zeros, UTF-16 has many
    if zeros or head.startswith(b"PAR1") or head[257:262] == b"ustar":
        raise ValueError(f"{path} is no UTF-8 text but full of other bytes: save a text as UTF-8, make shards of a "
                         f"parquet table by {to_shards(path)}, and for a tar give --dataset-type webdataset")


def decode_text(content: bytes, path: AnyPath) -> str:
    """Decode a file's bytes to text without a mark and with LF at line ends. Raises ValueError that names the line."""
    check_head(path, content[:HEAD])
    mark = find_mark(content)
    content, encoding = content[len(mark):], MARKS.get(mark, "utf-8")
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as problem:
        before = content[:problem.start].decode(encoding, "ignore")
        raise no_text(path, 1 + len(re.findall("\r\n|\r|\n", before)), problem) from problem
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_text(path: AnyPath) -> str:
    """Return the text of a file (`decode_text`)."""
    check_readable(path)
    return decode_text(Path(path).read_bytes(), path)


def read_lines(path: AnyPath) -> list[str]:
    """Return the lines of a file, without white space at their ends and without blank lines."""
    # splitlines() would also split at U+2028 and the like, which captions may contain.
    return [line.strip() for line in read_text(path).split("\n") if line.strip()]


def read_names(path: AnyPath) -> list[str]:
    """Return the lines of a file whose line numbers are used. Warns of a repeated line, and raises for a blank one."""
    names = [line.strip() for line in read_text(path).rstrip().split("\n")]
    if "" in names:
        raise ValueError(f"{path}, line {names.index('') + 1} is blank, so that lines after it would be numbered "
                         f"wrongly: remove it")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        logging.warning("%s has %d lines more than once, such as %r", path, len(twice), twice[0])
    return names

"""A journal: JSON lines that note work as it is done, so that the same command resumes where it was stopped.

The first line is the key, everything that the rows depend on. The others are rows, objects with an id. A row is in the
journal once its line is whole: of a run that was killed the last line may not be. One process writes at a time.
"""
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from .files import lock, open_own, parse_json

SECONDS = 10  # that workers of a run that was killed may live on, with its lock: PyTorch's look for it every 5


class Rows(Mapping):
    """{id: row} of a journal, read from the file row by row: they may be more than fit into memory.

    Empty where the file does not exist or begins with another key. `id` is the field of a row that names it.
    """

    def __init__(self, path: str | Path, key: dict, id: str = "id"):
        head, self.size, self.places = json.dumps(key).encode() + b"\n", 0, {}
        self.path, self.id = Path(path), id
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            if file.readline() != head:
                return
            self.size = len(head)  # bytes of all whole lines
            for line in file:
                try:
                    row = json.loads(line) if line.endswith(b"\n") else {}
                    self.places[row[id]] = self.size
                except (ValueError, LookupError, TypeError):  # this line was broken off
                    return
                self.size += len(line)

    def __getitem__(self, id) -> dict:
        with self.path.open("rb") as file:
            file.seek(self.places[id])
            return json.loads(file.readline())

    def __iter__(self) -> Iterator:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def open_alone(path: Path) -> BinaryIO:
    """Open a file for appending, locked until it is closed. Raises ValueError where another process has it."""
    for _ in range(SECONDS):
        file = open_own(path, "ab")
        # Its last owner may have removed it.
        if lock(file.fileno()) and path.exists() and os.path.samefile(path, file.fileno()):
            return file
        file.close()
        time.sleep(1)
    raise ValueError(f"another run is writing {path}: wait for its end, or write to another file")


def check_journal(path: Path, key: dict) -> None:
    """Raise ValueError for a file of another key or program. It stays as it is: rows cost time or money."""
    head = json.dumps(key).encode() + b"\n"
    try:
        with path.open("rb") as file:
            line = file.readline(2 ** 24)
    except FileNotFoundError:
        return
    if head.startswith(line):  # the same, or broken off
        return
    try:
        earlier = parse_json(line)
        unlike = [name for name in {**key, **earlier} if earlier.get(name) != json.loads(head).get(name)]
    except (ValueError, AttributeError, TypeError):
        unlike = []
    if not unlike or not set(earlier) & set(key):
        raise ValueError(f"{path} is damaged or no file of this tool: give another --out or remove it")
    raise ValueError(f"{path} was begun with another {', '.join(unlike)}: give another --out or remove it")


class Journal:
    """Context manager of the journal that this process writes. Without a row it leaves no file.

    `rows` are those of an earlier run with the same key, and those appended since.
    """

    def __init__(self, path: str | Path, key: dict, id: str = "id"):
        self._path, self._arguments, self._head = Path(path), (key, id), json.dumps(key).encode() + b"\n"
        check_journal(self._path, key)

    def __enter__(self) -> "Journal":
        self._file = open_alone(self._path)
        self.rows = Rows(self._path, *self._arguments)
        self._file.truncate(self.rows.size)
        if not self.rows.size:
            self._write(self._head)
        return self

    def append(self, row: dict) -> None:
        """Write a row at once. It counts once its line is whole."""
        place = self.rows.size
        self._write(json.dumps(row).encode() + b"\n")
        self.rows.places[row[self.rows.id]] = place

    def _write(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()
        self.rows.size += len(line)

    def __exit__(self, *problem) -> None:
        empty = self._file.tell() == len(self._head)  # not by `rows`: Ctrl-C may fall between line and entry
        self._file.close()
        if empty:
            self.rows.path.unlink()

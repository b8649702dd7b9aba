"""A journal: JSON lines that record finished work, so that the same command resumes where it was stopped.

The first line is the key: all settings that the rows depend on. Every other line is a row, an object with an id. A row
counts once its line is complete, as the last line of a killed run may not be. Only one process writes at a time.
"""
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from .files import AnyPath, open_locked, parse_json

SECONDS = 10  # to wait for the lock: PyTorch's workers of a killed run keep it, and look for their parent every 5 s


class Journal(Mapping):
    """The mapping {id: row} of a journal after `read`. In a `with` block also its only writer.

    The block raises ValueError for a file with another key, whose rows `read` ignores. It leaves no file without rows.
    A row is read from the file when needed, as all may not fit into memory. `id` names the field of a row with its id.
    """

    def __init__(self, path: AnyPath, key: dict, id: str = "id"):
        self.path, self.key, self.id = Path(path), key, id

    def read(self) -> "Journal":
        """Find the rows of the file."""
        head, self.size, self.places = _head(self.key), 0, {}  # size: bytes of all complete lines
        if not self.path.exists():
            return self
        self.file = self.path.open("rb")  # it stays open, as to open it for each of a million rows takes long
        if self.file.readline() != head:
            return self
        self.size = len(head)
        for line in self.file:
            try:
                row = json.loads(line) if line.endswith(b"\n") else {}
                self.places[row[self.id]] = self.size
            except (ValueError, LookupError, TypeError):  # an incomplete line
                break
            self.size += len(line)
        return self

    def __getitem__(self, id) -> dict:
        self.file.seek(self.places[id])
        return json.loads(self.file.readline())

    def __iter__(self) -> Iterator:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __enter__(self) -> "Journal":
        check_journal(self.path, self.key)
        self._file = open_alone(self.path)
        self.read()
        self._file.truncate(self.size)
        self.file = self.path.open("rb")  # what it had read ahead may be gone
        if not self.size:
            self._write(_head(self.key))
        return self

    def note(self, row: dict) -> None:
        """Write a row at once."""
        place = self.size
        self._write(json.dumps(row).encode() + b"\n")
        self.places[row[self.id]] = place

    def _write(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()
        self.size += len(line)

    def __exit__(self, *problem) -> None:
        empty = self._file.tell() == len(_head(self.key))  # a row may lack its place after Ctrl-C within `note`
        self._file.close()
        if empty:
            self.path.unlink()


def _head(key: dict) -> bytes:
    return json.dumps(key).encode() + b"\n"


def open_alone(path: Path) -> BinaryIO:
    """Open a file for appending, locked until it is closed. Raises ValueError if another process has locked it."""
    for _ in range(SECONDS):
        if file := open_locked(path):
            return file
        time.sleep(1)
    raise ValueError(f"another run is writing {path}: wait until it ends, or write to another file")


def check_journal(path: Path, key: dict) -> None:
    """Raise ValueError for a journal with another key and for other files. They stay, as rows cost time or money."""
    head = _head(key)
    try:
        with path.open("rb") as file:
            line = file.readline(2 ** 24)
    except FileNotFoundError:
        return
    if head.startswith(line):  # the same key, perhaps cut off
        return
    try:
        earlier = parse_json(line)
        unlike = [name for name in {**key, **earlier} if earlier.get(name) != json.loads(head).get(name)]
    except (ValueError, AttributeError, TypeError):
        unlike = []
    if not unlike or not set(earlier) & set(key):
        raise ValueError(f"{path} is damaged or not from this command: give another --out or remove it")
    raise ValueError(f"{path} was begun with another {', '.join(unlike)}: give another --out or remove it")

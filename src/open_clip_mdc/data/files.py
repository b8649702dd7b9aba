"""Files and folders that appear under their name when they are complete, or not at all."""
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory


def temporary_name(path: Path) -> Path:
    """A hidden name beside `path` that no other process, on this machine or another, chooses."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")


def is_stdout(path: Path) -> bool:
    """Whether it leads to where this process prints."""
    try:
        return os.path.samestat(path.stat(), os.fstat(1))
    except OSError:  # that is closed
        return False


@contextmanager
def new_file(path: str | Path) -> Iterator[Path]:
    """A file to write, which becomes `path`, in place of what is there, when the block ends without an error.

    A link stays, and what it leads to is replaced. /dev/stdout, and what is no file, such as a FIFO, is written to.
    """
    path = Path(path)
    if path.exists() and not path.is_file() or path.is_symlink() and is_stdout(path):
        with TemporaryDirectory() as folder:
            partial = Path(folder, path.name)
            yield partial
            with partial.open("rb") as source, open(os.dup(1) if is_stdout(path) else path, "wb") as target:
                shutil.copyfileobj(source, target)
        return
    if path.is_symlink():
        path = Path(os.path.realpath(path))
    partial = temporary_name(path)
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@cache
def _digest(path: str, *state: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_state(path: str | Path) -> tuple[int, ...]:
    """What changes with a file's content: its number on the disk, its size and its times.

    The time of its last change of any kind among them, which no program can set: rsync, cp -p and the layers of a
    container give what they write the size and the time of modification of something else.
    """
    stat = os.stat(path)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def sha256(path: str | Path) -> str:
    """Of a file's content; a process reads it once, and again when it has changed."""
    return _digest(os.fspath(path), *file_state(path))


def files_below(folder: str | Path) -> list[str]:
    """All files in a folder and in those within, in order."""
    return sorted(os.path.join(where, name) for where, _, names in os.walk(folder) for name in names)


def parse_json(text: str | bytes, **options) -> object:
    """Of a file of others. Raises ValueError for what is no JSON, or is nested too deeply to be read.

    Args:
        options: of `json.loads`.
    """
    try:
        return json.loads(text, **options)
    except RecursionError as problem:
        raise ValueError("it is nested too deeply") from problem


def write_json(path: str | Path, content: object, **options) -> None:
    """Args: options of `json.dumps`."""
    with new_file(path) as partial:
        partial.write_text(json.dumps(content, **options))


@contextmanager
def new_folder(out: str | Path) -> Iterator[Path]:
    """A folder to fill, which appears as `out` when the block ends without an error and is removed otherwise.

    Raises:
        ValueError: `out` is there already and is not an empty folder.
    """
    out = Path(out).resolve()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder: remove it or choose another --out")
    partial = temporary_name(out)
    partial.mkdir(parents=True)
    try:
        yield partial
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)

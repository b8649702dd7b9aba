"""Write files and folders that appear under their name once they are complete, or not at all."""
import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import stat
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import BinaryIO

AnyPath = str | Path
ENDS = (signal.SIGTERM, signal.SIGHUP)  # of a batch system, and of a terminal that is closed


def _end(number: int, _) -> None:
    for each in ENDS:
        signal.signal(each, signal.SIG_IGN)  # do not interrupt the cleaning up
    for child in multiprocessing.active_children():
        child.terminate()
    sys.exit(128 + number)


def end_when_terminated() -> None:
    """Exit on the signals of ENDS, after removing half-written files here and in child processes."""
    for each in ENDS if threading.current_thread() is threading.main_thread() else ():
        if signal.getsignal(each) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(each, _end)


def open_own(path: Path, mode: str) -> BinaryIO:
    """Open a file that no user has named, such as a journal. Raises ValueError for a link, which may lead anywhere.

    What stands beside an output, OUT.part, is as private as the output.
    """
    out = Path(str(path).rpartition(".part")[0])
    allowed = out.stat().st_mode & 0o666 if out.is_file() else 0o666
    try:
        return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, allowed))
    except OSError as problem:
        if problem.errno != errno.ELOOP:
            raise
        raise ValueError(f"{path} is a link, and this file is never written through a link: remove it") from problem


def open_locked(path: Path, wait: bool = False) -> BinaryIO | None:
    """Open a file as `open_own` does, to append, and lock it until this process closes it or ends.

    Without `wait`, returns None if another process has it. Raises OSError on a file system without locks.
    """
    file = open_own(path, "ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB * (not wait))
    except BlockingIOError:
        file.close()
        return None
    except OSError as problem:
        raise OSError(f"{path.parent} is on a file system without locks ({problem.strerror}): give another place"
                      ) from problem
    if os.fstat(file.fileno()).st_nlink:
        return file
    file.close()  # who had it has removed it, and another may have a new one
    return open_locked(path, wait)


@contextmanager
def _partial(path: Path, folder: bool = False) -> Iterator[Path]:
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: its folder does not exist")
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"{path} is a pipe, a device or a socket: give a file")
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")
    try:
        partial.mkdir() if folder else partial.touch(exist_ok=False)
        yield partial
    except OSError as problem:  # name the output that the user named
        if not isinstance(problem.filename, (str, os.PathLike)) or str(partial) not in str(problem.filename):
            raise
        raise OSError(problem.errno, problem.strerror, str(problem.filename).replace(str(partial), str(path))
                      ) from problem
    finally:
        if folder:
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


def try_output(path: AnyPath, folder: bool = False) -> None:
    """Check before the work that `new_file` or `new_folder` will be able to write `path`. Raises OSError if not."""
    path = Path(os.path.realpath(path))
    if folder:
        place = next(above for above in (path, *path.parents) if above.exists())
        if not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "is no folder", str(place))
        try:
            with _partial(place / path.name, folder):
                return
        except OSError as problem:  # names a folder that nobody gave
            raise OSError(problem.errno, problem.strerror, str(path)) from problem
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))
    with _partial(path):
        pass


@contextmanager
def new_file(path: AnyPath, follow: bool = True, like: Path | None = None) -> Iterator[Path]:
    """Yield a file to write, which replaces `path` when the block ends without an error.

    The new file keeps the mode of the old one, or has that of `like`, the output that it stands beside. If `path` is a
    link, its target is replaced, or with `follow=False` the link. Raises ValueError for a pipe or a device.
    """
    path = Path(path)
    if path.is_symlink() and follow:
        path = Path(os.path.realpath(path))
    with _partial(path) as partial:
        mode = stat.S_IMODE(partial.stat().st_mode)
        if (like or path).is_file() and not path.is_symlink():
            mode = (like or path).stat().st_mode & 0o777
            partial.chmod(mode | 0o600)
        yield partial
        if stat.S_IMODE(partial.stat().st_mode) != mode:  # safetensors writes files that only their owner can read
            partial.chmod(mode)
        os.replace(partial, path)


def hash_file(path: AnyPath, algorithm: str, **options) -> str:
    """Return the hash of a file's content in hexadecimal. `algorithm` is one of hashlib's, with its `options`."""
    digest = hashlib.new(algorithm, **options)
    with open(path, "rb") as file:
        while block := file.read(2 ** 20):
            digest.update(block)
    return digest.hexdigest()


@cache
def _sha256(path: str, *state: int) -> str:
    return hash_file(path, "sha256")


def file_state(path: AnyPath) -> tuple[int, ...]:
    """Return values that change with a file's content: its inode, size and times."""
    now = os.stat(path)
    # No program can set st_ctime. rsync and cp -p may leave size and time of modification as they were.
    return now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns


def sha256(path: AnyPath) -> str:
    """Return the SHA-256 of a file's content. A process reads a file again only if it has changed."""
    return _sha256(os.fspath(path), *file_state(path))


def files_below(folder: AnyPath) -> list[str]:
    """Return all files in a folder and its subfolders, sorted, those of linked folders too, each folder once.

    A link to a folder above, which would be a loop, is not followed. A link that leads nowhere counts as a file.
    """
    found, waiting = [], [str(folder)]
    seen = {os.stat(above)[1:3] for above in Path(folder).resolve().parents}  # inode and device
    for start in waiting:  # the linked ones come last, as a file is named without a link if it can be
        for where, folders, names in os.walk(start):
            if (state := os.stat(where)[1:3]) in seen:
                folders.clear()
                continue
            seen.add(state)
            waiting += sorted(filter(os.path.islink, (os.path.join(where, name) for name in folders)))
            found += [os.path.join(where, name) for name in names]
    return sorted(found)


def check_readable(path: AnyPath) -> None:
    """Raise ValueError for a pipe with a name, a device or a socket, which might never be read to its end.

    The pipes of a shell, /dev/stdin and <(command), have no name and may be read.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # the code that opens it says why it cannot be
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) and os.path.exists(os.path.realpath(path)):
        raise ValueError(f"{path} is a pipe, a device or a socket: give a file")


def parse_json(text: str | bytes, place: object = None, **options) -> object:
    """Return json.loads(text, **options). Raises ValueError that names the `place`, also for too deep nesting."""
    try:
        return json.loads(text, **options)
    except (ValueError, RecursionError) as problem:
        why = "it is nested too deeply" if isinstance(problem, RecursionError) else problem
        if why is problem and place is None:
            raise
        raise ValueError(why if place is None else f"{place} is not JSON: {why}") from problem


def json_object(text: str | bytes) -> dict:
    """Return a JSON object, {} for any other text."""
    try:
        content = parse_json(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def write_json(path: AnyPath, content: object, follow: bool = True, like: Path | None = None, **options) -> None:
    """Write JSON by `new_file`, with the options of `json.dumps`."""
    with new_file(path, follow, like) as partial:
        partial.write_text(json.dumps(content, **options))


@contextmanager
def new_folder(out: AnyPath) -> Iterator[Path]:
    """Yield a folder to fill, which appears as `out` when the block ends without an error and is removed otherwise.

    Raises ValueError if `out` exists and is not an empty folder.
    """
    out = Path(out).resolve()
    there = out.is_dir()  # it is filled at the end, as a mount point could not be replaced
    of_others = (f".{out.name}.", "lost+found")  # of a run that was killed, and of the file system

    def check() -> None:
        if out.exists() and not (there and all(path.name.startswith(of_others) for path in out.iterdir())):
            raise ValueError(f"{out} exists and is not an empty folder: remove it or choose another --out")
    check()
    out.parent.mkdir(parents=True, exist_ok=True)
    with _partial(out / out.name if there else out, folder=True) as partial:
        yield partial
        check()  # another process may have filled it meanwhile
        for path in sorted(partial.iterdir()) if there else ():
            os.replace(path, out / path.name)
        if not there:
            os.replace(partial, out)

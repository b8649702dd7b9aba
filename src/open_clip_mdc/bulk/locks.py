"""File locks, so that processes that fill one folder, on one machine or several, share the work and do not repeat it.

A process that makes FOLDER/NAME holds a POSIX record lock on one byte of the hidden file FOLDER/.claims, whose offset
is a hash of NAME, and notes in that file who it is. A lock ends with its process, so it is never stale. If a file is
locked, a process makes another one first, and waits for locked files at the end. A process that hangs keeps its lock.
After an hour without a new byte, a waiting process makes the file as well, as both write the same bytes. Machines share
locks through NFS, Lustre (-o flock), GPFS or CephFS.
"""
import fcntl
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from glob import escape
from pathlib import Path

from tqdm import tqdm

from ..data.files import new_file, open_own

PATIENCE, REPEAT, LEASE = 20, 600, 3600  # seconds until a waiting process says so, says it again, and stops waiting


class Locks:
    """The locks of this process in one folder. Make only one per process and folder: closing a file drops all locks."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.file = folder, open_own(folder / ".claims", "a+b")

    def make(self, name: str, write: Callable[[Path], object], wait: bool) -> bool:
        """Make the file `name` of the folder with `write`, unless it exists. Returns True if it now exists.

        Without `wait`, returns False while another process is making it. Raises OSError if there are no locks on the
        file system.
        """
        target = self.folder / name
        offset = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        locked = self._lock(offset, name)
        if not locked and not wait:
            return target.exists()
        if not locked:
            locked = self._wait(offset, name)
        try:
            if locked:
                for rest in self._parts(name):  # of a process that was killed
                    rest.unlink()
            if not target.exists():
                with new_file(target, follow=False) as part:
                    write(part)
        finally:
            if locked:
                fcntl.lockf(self.file, fcntl.LOCK_UN, 1, offset)
        return True

    def _lock(self, offset: int, name: str) -> bool:
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
        except (BlockingIOError, PermissionError):  # POSIX allows either
            return False
        except OSError as problem:
            raise OSError(f"{self.folder} is on a file system without locks ({problem.strerror}): put --out "
                          "elsewhere") from problem
        holder = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        self.file.write(json.dumps([name, holder]).encode() + b"\n")
        self.file.flush()
        return True

    def _holder(self, name: str) -> str:
        notes = os.pread(self.file.fileno(), os.fstat(self.file.fileno()).st_size, 0)
        start = json.dumps([name])[:-1].encode() + b", "
        found = [line for line in notes.splitlines() if line.startswith(start)]
        return str(json.loads(found[-1])[1]) if found else "another process"

    def _parts(self, name: str) -> Iterator[Path]:
        return self.folder.glob(f".{escape(name)}.{'[0-9a-f]' * 12}")

    def _wait(self, offset: int, name: str) -> bool:
        seen, changed, tell = None, time.monotonic(), time.monotonic() + PATIENCE
        while not self._lock(offset, name):
            now = time.monotonic()
            size = sum(path.stat().st_size for path in self._parts(name) if path.exists())
            if size != seen:
                seen, changed = size, now
            if now - changed > LEASE:
                return False
            if now > tell:
                tqdm.write(f"waiting for {self.folder / name}, which is being made by {self._holder(name)}. If that "
                           "process hangs, end it, and this one continues", file=sys.stderr)
                tell = now + REPEAT
            time.sleep(min(1, PATIENCE))
        return True

    def close(self) -> None:
        self.file.close()
